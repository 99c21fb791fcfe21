"""Settings that a run takes over from the one it scores or continues."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from mutations import mutated
from omegaconf import OmegaConf

from recipes import config, earlier_run, foresight
from recipes.config import Config, UserError
from recipes.telemetry import RunFolder

CONF = Path(__file__).parent.parent / "conf"
TRAINED = (
    *("recipe=digits_resnet18", "model=resnet50", "topology=1x2", "optimizer.base_lr=0.05"),
    *("dataset.image_size=32", "dataset.augment=true", "log.every=7", "max_steps=3"),
    *("model.num_classes=12", "+model.arguments.stride_list=[1,1,2,2,2]", "threads=1"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint."""
    config.register_schema()
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "last").symlink_to("step-00000001")
    (folder / "config.yaml").write_text(config.dump(config.compose(CONF, list(TRAINED))[0]))
    return folder


def composed(*settings: str, folder: Path = Path("nowhere")) -> Config:
    config.register_schema()
    words = [*settings, f"hydra.run.dir={folder}"]
    raw, path = config.compose_unchecked(CONF, words)
    return config.from_hydra(earlier_run.with_its_settings(raw, words, path, CONF))


def plain(made: Config) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.structured(made)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "below", ["", "checkpoints", "checkpoints/last", "checkpoints/step-00000001"]
)
def test_an_evaluation_needs_nothing_but_the_checkpoint(run: Path, below: str) -> None:
    made = composed("task=evaluate", f"checkpoint={run / below}")
    trained = config.compose(CONF, list(TRAINED))[0]
    assert (made.model, made.dataset) == (trained.model, trained.dataset)
    assert (made.eval_batch_size, made.dtype, made.seed) == (100, "float32", 0)
    # Where and how it runs is its own affair.
    assert (str(made.shape), made.threads, made.optimizer.base_lr) == ("1x1", None, 0.1)


def test_what_the_command_line_names_wins(run: Path) -> None:
    made = composed(
        *("task=evaluate", f"checkpoint={run}", "dataset.augment=false", "model.num_classes=null"),
        *("dataset.image_size=128", "eval_batch_size=5"),
    )
    assert (made.dataset.augment, made.model.num_classes, made.eval_batch_size) == (False, None, 5)
    assert (made.dataset.image_size, made.model.name) == (128, "ResNet50")
    # The weights have the form for small images, whatever size is looked at now.
    assert made.model.stem == "cifar"
    group = composed("task=evaluate", f"checkpoint={run}", "model=resnet18")
    assert (group.model.name, group.model.num_classes) == ("ResNet18", None)
    assert group.dataset.image_size == 32


def test_the_recipe_a_run_began_from_changes_nothing_and_another_one_does(run: Path) -> None:
    evaluate = ("task=evaluate", f"checkpoint={run}")
    same, none = composed(*evaluate, "recipe=digits_resnet18"), composed(*evaluate)
    assert (same.model, same.dataset) == (none.model, none.dataset)
    other = composed(*evaluate, "recipe=cifar10_resnet18")
    assert (other.dataset.name, other.model.name) == ("cifar10", "ResNet18")


def test_a_continued_training_needs_nothing_but_the_run(run: Path) -> None:
    made = plain(composed(f"resume={run}", "topology=1x4"))
    trained = plain(config.compose(CONF, list(TRAINED))[0])
    differing = {key for key, value in made.items() if value != trained[key]}
    # The global batch stays; where it runs and how far it goes is said anew.
    assert differing == {"topology", "batch_size", "threads", "max_steps", "resume"}
    assert (made["max_steps"], made["threads"], made["batch_size"]) == (None, None, 16)


def test_resume_auto_takes_over_what_was_to_be_continued(run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    made = config.compose(CONF, ["recipe=cifar10_resnet18", f"resume={run}"])[0]
    (begun / "config.yaml").write_text(config.dump(made))
    assert composed("resume=auto", folder=begun).dataset.name == "cifar10"


def test_a_batch_that_is_named_is_taken(run: Path) -> None:
    made = composed(f"resume={run}", "global_batch_size=24", "batch_size=null")
    assert (made.global_batch_size, made.batch_size) == (24, 24)


def test_a_checkpoint_without_a_run_gives_nothing(run: Path) -> None:
    (run / "config.yaml").unlink()
    assert composed("task=evaluate", f"checkpoint={run}").model.name == "ResNet18"
    assert composed(f"resume={run / 'checkpoints'}").model.name == "ResNet18"


def test_what_is_otherwise_than_in_the_earlier_run_is_named(run: Path) -> None:
    evaluate = ("task=evaluate", f"checkpoint={run}")
    assert earlier_run.changed(composed(*evaluate), RunFolder(Path("nowhere"))) == []
    named = composed(*evaluate, "dataset.image_size=128", "eval_batch_size=5", "threads=3")
    # The stem is the one that it was, now by name; where it runs changes no score.
    assert earlier_run.changed(named, RunFolder(Path("nowhere"))) == [
        "dataset.image_size: 32 -> 128",
        "eval_batch_size: 100 -> 5",
    ]


@pytest.mark.parametrize("resume", ["auto", "PATH"])
def test_what_a_continued_training_changes_is_named(run: Path, resume: str) -> None:
    settings = ("optimizer.base_lr=0.2", "topology=1x2", "threads=1", "max_steps=9")
    source = "auto" if resume == "auto" else str(run)
    made = composed(f"resume={source}", *settings, folder=run if resume == "auto" else Path("new"))
    changes = earlier_run.changed(made, RunFolder(run if resume == "auto" else Path("new")))
    assert changes == ["optimizer.base_lr: 0.05 -> 0.2", "max_steps: 3 -> 9"]


@pytest.mark.parametrize(
    "words",
    [
        ("task=evaluate", "checkpoint=RUN", "dataset=digits"),
        ("resume=RUN", "dataset=digits"),
        ("resume=RUN", "dataset=digits", "model.num_classes=4"),
    ],
)
def test_too_few_classes_of_a_checkpoint_are_no_setting(run: Path, words: tuple[str, ...]) -> None:
    text = (run / "config.yaml").read_text().replace("num_classes: 12", "num_classes: 4")
    (run / "config.yaml").write_text(text)
    made = composed(*(word.replace("RUN", str(run)) for word in words))
    with pytest.raises(UserError) as caught:
        foresight.check(made)
    assert "model.num_classes=4, but digits has 10 classes" in caught.value.message
    assert "leave dataset" in caught.value.remedy
    assert ("model.pretrained=" in caught.value.remedy) == (words[0] == "resume=RUN")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no keys"),
        ("model: {name: [", "not a YAML file"),
        ("- 1", "holds no keys"),
        ("model: 3", "model"),
        ("model: {name: {a: 1}}", "model.name"),
        ("model: {unknown: 1}", "model.unknown"),
        ("model: {name: '${oc.env:HOME}'}", "model.name"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nmodel: {name: *b}", "refers to parts of itself"),
        ("[" * 100_000, "not a YAML file"),
        ("#" * 5_000_000, "more than"),
        ("dataset: {image_size: 1" + "0" * 5000 + "}", "not a YAML file"),
    ],
)
def test_what_is_no_configuration_is_one_message(run: Path, text: str, reason: str) -> None:
    (run / "config.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        composed("task=evaluate", f"checkpoint={run}")
    assert str(run / "config.yaml") in caught.value.message
    assert reason in caught.value.message
    assert len(caught.value.message) < 1000


def test_mutations_of_a_configuration_give_a_message_or_a_configuration(run: Path) -> None:
    chance = random.Random(0)
    whole = (run / "config.yaml").read_bytes()
    raw, path = config.compose_unchecked(CONF, [f"resume={run}"])
    taken = 0
    for _ in range(300):
        (run / "config.yaml").write_bytes(mutated(whole, chance))
        with contextlib.suppress(UserError):
            config.from_hydra(earlier_run.with_its_settings(raw, [], path, CONF))
            taken += 1
    assert 0 < taken < 300


def test_a_run_without_a_checkpoint_yet_begins_anew_with_its_settings(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    made = composed("resume=auto", "max_steps=1", folder=run)
    trained = config.compose(CONF, list(TRAINED))[0]
    assert (made.model, made.dataset) == (trained.model, trained.dataset)
    assert (made.log.every, made.max_steps) == (7, 1)
