"""What an unknown word leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import hints
from recipes.config import known_keys

CONF = Path(__file__).parent.parent / "conf"


@pytest.mark.parametrize("word", sorted(hints._SETTINGS))
def test_every_word_leads_to_something_that_is_there(word: str) -> None:
    meant = hints.settings_like(word, known_keys())
    assert len(meant) == 1
    key = meant[0]
    group, _, choice = key.partition("=")
    if choice:
        assert (CONF / group / f"{choice}.yaml").exists()
    else:
        assert key in [*known_keys(), "hydra.run.dir", "recipe"]


@pytest.mark.parametrize("word", sorted(hints._SETTINGS))
def test_no_word_is_a_key_itself(word: str) -> None:
    assert word not in known_keys()


@pytest.mark.parametrize("group", sorted(hints._CHOICES))
def test_every_word_for_a_choice_leads_to_one(group: str) -> None:
    options = [path.stem for path in (CONF / group).glob("*.yaml")]
    for word in hints._CHOICES[group]:
        assert word not in options
        assert hints.choice_like(group, word, options) in options


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", ["optimizer.base_lr"]),
        ("optimizer.lr", ["optimizer.base_lr"]),
        ("weight_decay", ["optimizer.weight_decay"]),
        ("weight-decay", ["optimizer.weight_decay"]),
        ("Epochs", ["epochs"]),
        ("train.epochs", ["epochs"]),
        ("workers", ["dataset.workers"]),
        ("gpus", ["topology.devices"]),
        ("nodes", ["topology.nodes"]),
        ("devices", ["topology.devices"]),
        ("data", ["dataset.path"]),
        ("path", ["dataset.path"]),
        ("num_classes", ["model.num_classes", "dataset.num_classes"]),
        ("image_sze", ["dataset.image_size"]),
        ("optimiser.base_lr", ["optimizer.base_lr"]),
        ("frobnicate", []),
    ],
)
def test_common_words(key: str, meant: list[str]) -> None:
    assert hints.settings_like(key, known_keys()) == meant


def test_a_beginning_leads_to_the_choice() -> None:
    options = ["cifar10_resnet18", "digits_resnet18", "smoke"]
    assert hints.choice_like("recipe", "digits", options) == "digits_resnet18"
    assert hints.choice_like("recipe", "digit_resnet18", options) == "digits_resnet18"
    assert hints.choice_like("recipe", "", options) is None
    assert hints.choice_like("recipe", "xyz", options) is None
