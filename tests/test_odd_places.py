"""Where a node is and what it reads: taken, or refused in words, before anything starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import test_any_word
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipes import config, earlier_run

CONF = Path(__file__).resolve().parents[1] / "conf"
NODE_0 = {"topology.nodes": 2, "topology.master": "h", "topology.node_rank": 0}


def refused(**given: Any) -> str | None:
    """What a user reads of these settings; None where they are taken."""
    composed = copy.deepcopy(test_any_word.base("seed=0"))
    try:
        for key, value in given.items():
            OmegaConf.update(composed, key, value)
        whole = earlier_run.with_its_settings(composed, list(given), Path("nowhere"), CONF)
        test_any_word.before_the_start(whole)
    except config.MISTAKES as mistake:
        test_any_word.assert_told(mistake)
        return config.explain(mistake)
    return None


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from(sorted(NODE_0)),
    value=st.none() | st.integers() | st.floats() | test_any_word.ANY,
)
@example(key="topology.master", value="h:-1")
@example(key="topology.master", value="h:99999999")
@example(key="topology.master", value="")
@example(key="topology.master", value="x" * 64)
@example(key="topology.node_rank", value=-1)
def test_any_place_of_a_node_is_taken_or_refused_in_words(key: str, value: Any) -> None:
    refused(**(NODE_0 | {key: value}))


@pytest.mark.parametrize("key", ["resume", "checkpoint"])
def test_paths_that_lead_nowhere_are_refused_in_words(key: str, tmp_path: Path) -> None:
    loop, ring, file = tmp_path / "loop", tmp_path / "ring", tmp_path / "file"
    loop.symlink_to(ring)
    ring.symlink_to(loop)
    file.touch()
    task = "evaluate" if key == "checkpoint" else "train"
    for path in (loop, loop / "x", file, file / "x", tmp_path / ("a/" * 1900)):
        assert refused(**{"task.name": task, key: str(path)}) is not None
