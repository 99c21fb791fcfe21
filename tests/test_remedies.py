"""A remedy is not refused in its turn: whoever does what a message says, gets on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_config
import test_foresight
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes import command_line, config, foresight, launch, named_paths
from recipes.config import Machine

CONF = Path(__file__).resolve().parents[1] / "conf"
CPU, GPU = test_config.CPU, test_config.GPU
_SETTING = re.compile(r"(?<![\w.=/-])[+~]?[a-z][\w.]*=(?:\[[^\]]*\]|[^\s,;?)]+)")
# What a person puts in the place of a word in capitals.
_MEANT = {"PATH": "/data", "FOLDER": "/data", "outputs/<run>/checkpoints/best": "/data"}


def refusal(words: Sequence[str], machine: Machine) -> str | None:
    """What a user reads; None where it can run."""
    return _refusal(tuple(words), machine)


@functools.cache  # composing takes a tenth of a second, and ways out meet
def _refusal(words: tuple[str, ...], machine: Machine) -> str | None:
    try:
        arguments = command_line.read(words).arguments
        config.register_schema()
        composed, _ = config.compose_unchecked(CONF, arguments)
        found = config.from_hydra(composed, machine)
        named_paths.check(found)
        foresight.check(found)
        launch.identify(found)
        launch.check_checkpoint(found)
    except config.MISTAKES as mistake:
        return config.explain(mistake)
    return None


def remedies(message: str) -> Iterator[list[list[str]]]:
    """Of each remedy in a message the ways out that it gives as settings, which go together where
    a blank parts them."""
    for line in re.findall(r"remedy: (.*)", message):
        ways: list[list[str]] = []
        end = None
        for found in _SETTING.finditer(line):
            key, _, value = found[0].rstrip(".").partition("=")
            value = _MEANT.get(value, value)
            if value.isupper() or "…" in value:
                continue  # only the user knows it
            if end is None or line[end : found.start()].strip():
                ways.append([])
            ways[-1].append(f"{key}={value}")
            end = found.end()
        if ways:
            yield ways


def told(message: str) -> set[str]:
    """The lines of a message that say what is wrong."""
    return {line for line in message.splitlines() if "remedy: " not in line}


def applied(words: Sequence[str], way: Sequence[str]) -> list[str]:
    """The command line with settings in the place of those of the same key."""
    keys = {each.partition("=")[0] for each in way}
    return [*(each for each in words if each.partition("=")[0] not in keys), *way]


def check_remedies(words: Sequence[str], machine: Machine, depth: int = 4) -> None:
    """Follow each way out of a refusal, and those of what is refused then."""
    message = refusal(words, machine)
    for ways in remedies(message or ""):
        for way in ways:
            after = applied(words, way)
            again = refusal(after, machine)
            if again is None:
                continue
            shown = f"{words}: {message}\n{way}: {again}"
            # Of several mistakes this mends one: the others may stay, and another one come up.
            assert told(message or "") - told(again), shown
            assert not any(again.startswith(f"{each.lstrip('+')} ") for each in way), shown
            assert depth > 0, f"no end of remedies: {shown}"
            check_remedies(after, machine, depth - 1)


def cases_of(test: Any) -> Any:
    """What a test is parametrized with."""
    return test.pytestmark[0].args[1]


def rows() -> Iterator[tuple[str, Machine]]:
    """The faulty command lines of other tests."""
    for case in cases_of(test_config.test_impossible_combinations):
        yield case[0], case[1]
    for case in cases_of(test_foresight.test_what_the_ranks_would_find_is_found_before):
        yield case[0], CPU
    for case in cases_of(test_config.test_a_mistake_is_explained_in_a_line_or_two):
        if "optimizer=" in case[0] or "recipe=" in case[0] or "model=res" in case[0]:
            yield case[0], CPU
    yield from (("topology=4", CPU), ("global_batch_size=3 topology=1x4", CPU))
    yield from (("batch_size=1 topology=1x4", CPU), ("device=gpu topology=1x2", test_config.CUDA_0))


@pytest.mark.parametrize(("line", "machine"), list(rows()))
def test_a_remedy_leads_on(line: str, machine: Machine) -> None:
    check_remedies(line.split(), machine)


POOL = [
    *("topology=1x1", "topology=1x4", "topology=2x4", "topology=1x64", "topology=2", "model=vgg11"),
    *("batch_size=1", "batch_size=32", "batch_size=2000", "batch_size=null", "accumulate=7"),
    *("global_batch_size=1", "global_batch_size=3", "global_batch_size=100", "loader=dali"),
    *("global_batch_size=null", "dataset=synthetic", "dataset=imagenet", "dataset=cifar10"),
    *("dataset.train_size=3", "dataset.train_size=null", "dataset.num_classes=4", "task=evaluate"),
    *("model.num_classes=4", "model.stem=cifar", "task=benchmark", "task=prepare", "checkpoint=x"),
    *("prepare.output=x", "prepare.verify=true", "resume=x", "resume=auto", "max_steps=7"),
    *("device=gpu", "device=cpu", "amp=o1", "dtype=float64", "compile=true", "sync_bn=true"),
    *("gradients.dtype=float16", "gradients.dtype=bfloat16", "optimizer=adamw", "schedule=step"),
    *("optimizer.fused=true", "dataset.cutout=8", "loader=turbojpeg", "optimizer=sgd"),
    *("schedule.milestones=[3,1]", "schedule.milestones=[]", "recipe=imagenet_resnet50_1x4"),
]


def one_of_each_key(words: Sequence[str]) -> list[str]:
    return list({word.partition("=")[0]: word for word in words}.values())


@settings(max_examples=6, deadline=None)
@given(
    words=st.lists(st.sampled_from(POOL), min_size=2, max_size=4).map(one_of_each_key),
    machine=st.sampled_from([CPU, GPU, test_config.CUDA_0, test_config.CUDA_2]),
)
@example(words=["batch_size=1", "global_batch_size=4", "topology=1x4"], machine=CPU)
def test_remedies_of_several_mistakes_lead_on(words: list[str], machine: Machine) -> None:
    check_remedies(words, machine)
