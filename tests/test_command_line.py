"""Options and settings, before Hydra reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import command_line, config
from recipes.config import Config, ConfigError

CONF = Path(__file__).parent.parent / "conf"


def composed(*arguments: str) -> Config:
    """As a rank that was started by hand composes its command line."""
    config.register_schema()
    return config.compose(CONF, command_line.settings_only(arguments))[0]


def refusal(*arguments: str) -> str:
    with pytest.raises(config.MISTAKES) as caught:
        composed(*arguments)
    return config.explain(caught.value)


# --- which of the two batch sizes counts


@pytest.mark.parametrize(
    ("arguments", "per_device", "whole"),
    [
        ("recipe=digits_resnet18", 64, 64),
        ("recipe=digits_resnet18 batch_size=32", 32, 32),
        ("batch_size=32 topology=1x2 recipe=digits_resnet18", 32, 64),
        ("recipe=digits_resnet18 ++batch_size=16 topology=1x3", 16, 48),
        ("recipe=cifar10_resnet18 global_batch_size=64 topology=1x2", 32, 64),
        ("global_batch_size=64", 64, 64),
        ("batch_size=16 batch_size=8", 8, 8),
        ("batch_size=32 global_batch_size=64 topology=1x2", 32, 64),
        ("batch_size=null global_batch_size=48", 48, 48),
        ("global_batch_size=null recipe=cifar10_resnet18", 128, 128),
    ],
)
def test_the_batch_size_that_is_given_replaces_the_other(
    arguments: str, per_device: int, whole: int
) -> None:
    found = composed(*arguments.split())
    assert (found.batch_size, found.global_batch_size) == (per_device, whole)


def test_both_batch_sizes_have_to_agree() -> None:
    text = refusal("recipe=digits_resnet18", "batch_size=32", "global_batch_size=96")
    assert "makes 32 images a step, but global_batch_size=96" in text


# --- options


WORDS = st.lists(st.sampled_from(["epochs=3", "seed=1,2", "~model", "+x=1", "a", "-m"]), max_size=6)


@settings(max_examples=50, deadline=None)
@given(words=WORDS)
def test_the_place_of_options_does_not_matter(words: list[str]) -> None:
    line = command_line.read(words)
    assert sorted(line.arguments) == sorted(words)
    assert line.arguments == [*line.options, *line.settings]
    assert [word for word in words if word != "-m"] == list(line.settings)


def test_an_options_value_stays_with_it() -> None:
    line = command_line.read(["epochs=3", "--cfg", "job", "--package", "epochs", "seed=1"])
    assert line.options == ("--cfg", "job", "--package", "epochs")
    assert line.settings == ("epochs=3", "seed=1")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--lr 0.1", "optimizer.base_lr=0.1"),
        ("--epochs=3", "epochs=3"),
        ("--batch-size 32 topology=1x2", "batch_size=32"),
        ("-j 8", "dataset.workers=8"),
        ("--gpus", "topology.devices=…"),
        ("--data-dir epochs=3", "dataset.path=…"),
        ("--output-dir=/out", "hydra.run.dir=/out"),
        ("--frobnicate", "frobnicate=…"),
        ("--eval", "task=evaluate"),
    ],
)
def test_an_option_of_other_programs_leads_to_the_setting(arguments: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="there is no option -") as caught:
        command_line.read(arguments.split())
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("arguments", ["--cfg foo", "--config-name my", "--package", "-m -cp x"])
def test_options_that_do_not_work_are_told_in_one_message(arguments: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line.read(arguments.split())
    assert caught.value.remedy
    assert "usage" not in str(caught.value)


def test_a_rank_takes_no_options() -> None:
    with pytest.raises(ConfigError, match=r"-m: a rank of .* takes settings only"):
        command_line.settings_only(["-m", "seed=1,2"])


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("topology=4", "topology=1x4 for 4 devices of one machine"),
        ("topology=-4", "topology=NAME"),
        ("topology=1.5", "topology=NAME"),
        ("topology=null", "topology=NAME"),
        ("amp=true", "amp=o1"),
        ("amp=false", "amp=off"),
        ("model=50", "model=NAME"),
        ("optimizer=[momentum]", "optimizer=NAME"),
    ],
)
def test_a_choice_that_is_no_name(setting: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="is chosen by name") as caught:
        command_line.read([setting])
    assert caught.value.remedy.startswith(remedy)
    assert command_line.read(["recipe=null"]).settings == ("recipe=null",)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"optimizer.base_lr=1{'0' * 400}", "optimizer.base_lr: int too large"),
        (f"epochs={'1' * 5000}", "Exceeds the limit"),
        ("dataset.path='\0'", "dataset.path='\\x00' has characters that are no text"),
        ("dataset.path='\udcff'", "dataset.path='\\udcff' has characters that are no text"),
        ("topology=1x99999999999", "topology=1x99999999999 is not one of"),
        ("topology=${x}", "'${x}'"),
        ("dataset=[digits]", ""),
    ],
)
def test_what_hydra_itself_stumbles_over_is_one_message(setting: str, message: str) -> None:
    text = refusal(setting, "epochs=0")
    assert message in text
    assert len(text) < 1000
