"""A node that was halted is what its own messages name."""

from __future__ import annotations

import pytest

from recipes.halted import blame
from recipes.rendezvous import node_failure


@pytest.mark.parametrize(
    ("kind", "consequence", "halted", "told"),
    [
        ("RuntimeError", True, 40.0, "NodeHalted"),
        ("NoContact", False, 40.0, "NoContact"),
        ("RuntimeError", True, 15.0, None),  # the others bear it
        ("ValueError", False, 40.0, None),  # has another cause
    ],
)
def test_the_cause_of_what_comes_after_a_halt(
    kind: str, consequence: bool, halted: float, told: str | None
) -> None:
    failure = node_failure(0, kind, "connection reset", "", consequence=consequence)
    found = blame(failure, 1, halted, 20.0)
    if told is None:
        assert found == failure
        return
    assert (found["node"], found["type"], found["consequence"]) == (1, told, False)
    assert found["message"] == "node 1 was halted for 40 s, and the others gave it up after 20 s"
