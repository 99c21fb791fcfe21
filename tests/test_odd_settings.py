"""Any value of any setting is taken, or refused in words: before anything is started."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from recipes import bounds, config, earlier_run, foresight, launch, network, scheduler
from recipes.config import Config, Machine

CONF = Path(__file__).resolve().parents[1] / "conf"
CPU = Machine(visible=None, nvidia_driver=False, paddle_for_gpu=False)


@functools.cache
def default() -> DictConfig:
    config.register_schema()
    return config.compose_unchecked(CONF, [])[0]


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every setting of the schema, without its groups."""
    for name, value in vars(node).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


KEYS = sorted(keys(Config()))
NUMBERS = (
    st.sampled_from([0, -1, 1, 2, 3, 2**16, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**9])
    | st.sampled_from([10**400, -(10**400), 5e-324, 1.7e308, float("nan"), float("inf"), -0.0])
    | st.integers()
    | st.floats()
)
PATHS = ["/", "//", "", ".", "..", "~", "-", "a:", ":1", "[", "]", "*", "/dev/null", "/dev/full"]
PATHS += ["/proc/self/mem", "/etc/passwd", "/etc/passwd/x", "/proc/self/fd", "a" * 300, "a/" * 3000]
PATHS += ["\0", "a\nb", "\x1b[31m", "\udcff", " ", "None", "null", "auto", "http://", "https://["]
PATHS += ["file:///etc/passwd", "paddleclas", "h:-1", "h:99999999", "a..b", "x" * 64, "[::1]:80"]
TEXTS = st.sampled_from(PATHS) | st.text(st.characters(), max_size=20)
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(TEXTS, PLAIN, max_size=2)


PLACE = ["topology.master", "topology.node_rank", "topology.nodes", "network.interface"]
# Words of Python and of the libraries that say nothing to a user.
INTERNAL = re.compile(r"Traceback|object_type|full_key|reference_type|\b[A-Z]\w+Config\b|NoneType")


def told(key: str, value: Any, **others: Any) -> str | None:
    """What a user reads of a setting before anything is started; None where it is taken.

    Args:
        others: settings that are made before.
    """
    composed = copy.deepcopy(default())
    try:
        for name, each in (*others.items(), (key, value)):
            try:
                OmegaConf.update(composed, name, each)
            except config.HYDRAS_OWN as error:
                if isinstance(error, config.MISTAKES):
                    raise
                raise config.not_composed(error, [name]) from error
        whole = earlier_run.with_its_settings(composed, [f"{key}=0"], Path("outputs/odd"), CONF)
        made = config.from_hydra(whole, CPU)
        scheduler.refuse_several_processes(made, {})
        foresight.check(made)
        launch.identify(made)
        network.environment(made, None, {})
    except config.MISTAKES as mistake:
        return config.explain(mistake)
    return None


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(KEYS), value=VALUES)
@example(key="resume", value=10**600)
@example(key="checkpoint", value="a/" * 2047 + "a")
@example(key="accumulate", value="\x1b[31m" + "a/" * 3000)
def test_any_value_of_any_setting_is_taken_or_refused_in_words(key: str, value: Any) -> None:
    message = told(key, value)
    if message is not None:
        assert not INTERNAL.search(message)
        assert len(message) < bounds.LONGEST_TEXT + 1000
        assert "\x1b" not in message


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(PLACE), value=VALUES)
def test_any_place_of_a_node_is_taken_or_refused_in_words(key: str, value: Any) -> None:
    others = {"topology.nodes": 2, "topology.master": "h", "topology.node_rank": 0}
    message = told(key, value, **others | {key: others.get(key)})
    assert message is None or not INTERNAL.search(message)


@settings(max_examples=100, deadline=None)
@given(
    task=st.sampled_from(config.TASKS),
    dataset=st.sampled_from(config.DATASETS),
    key=st.sampled_from(KEYS),
    value=VALUES,
)
@example(task="evaluate", dataset="digits", key="checkpoint", value="a" * 300)
@example(task="train", dataset="imagenet", key="dataset.path", value="a" * 300)
def test_whatever_the_task_and_the_data_are(task: str, dataset: str, key: str, value: Any) -> None:
    others = {"task.name": task, "dataset.name": dataset, "dataset.path": "/"}
    message = told(key, value, **others)
    assert message is None or not INTERNAL.search(message)


@pytest.mark.parametrize("key", ["resume", "checkpoint"])
def test_paths_that_lead_nowhere_are_no_traceback(key: str, tmp_path: Path) -> None:
    loop, ring, file = tmp_path / "loop", tmp_path / "ring", tmp_path / "file"
    loop.symlink_to(ring)
    ring.symlink_to(loop)
    file.touch()
    task = {"task.name": "evaluate" if key == "checkpoint" else "train"}
    for path in (loop, loop / "x", file, file / "x", tmp_path / ("a/" * 1900)):
        told(key, str(path), **task)
