"""What a node tells of a failure, its own or another's."""

from __future__ import annotations

from typing import Any

from recipes.forms import Malformed, a_text, a_truth, an_integer, of_form, or_none
from recipes.printable import printable, printable_lines

# node, rank, type, message, remedy, traceback; `consequence`: it failed because another did;
# `fatal`: another attempt would fail as well.
Failure = dict[str, Any]

_WORDS = 1 << 14  # characters of a message and of a remedy
_TRACEBACK = 1 << 16
_FORM = {
    "node": an_integer,
    "rank": or_none(an_integer),
    "type": a_text(200),
    "message": a_text(_WORDS),
    "remedy": a_text(_WORDS),
    "traceback": or_none(a_text(_TRACEBACK)),
    "consequence": a_truth,
    "fatal": a_truth,
}


class JobFailed(Exception):
    """The job has failed on some node.

    Attributes:
        failure: where and why, the same on every node.
        again: whether the nodes are to meet for another attempt.
    """

    def __init__(self, failure: Failure, *, again: bool) -> None:
        super().__init__(failure["message"])
        self.failure = failure
        self.again = again


def node_failure(
    node: int,
    kind: str,
    message: str,
    remedy: str,
    *,
    consequence: bool = False,
    fatal: bool = False,
) -> Failure:
    """A failure of a whole node, in the form of a rank's report."""
    return {
        "node": node,
        "rank": None,
        "type": kind,
        "message": message,
        "remedy": remedy,
        "traceback": None,
        "consequence": consequence,
        "fatal": fatal,
    }


def to_send(failure: Failure) -> Failure:
    """A failure of this node within the bounds of what another one takes."""
    trace = failure["traceback"]
    return {name: failure[name] for name in _FORM} | {
        "message": _cut(failure["message"], _WORDS),
        "remedy": _cut(failure["remedy"], _WORDS),
        "traceback": None if trace is None else trace[-_TRACEBACK:],  # its end says most
    }


def received(value: Any) -> Failure:
    """A failure that another node tells, without what a terminal would obey.

    Raises:
        Malformed: it has not the form of one.
    """
    if isinstance(value, dict) and value.keys() != _FORM.keys():
        raise Malformed("a failure with other parts than it should have")
    failure = of_form(value, _FORM)
    failure["type"] = printable(failure["type"], 200)
    for name in ("message", "remedy", "traceback"):
        if failure[name] is not None:
            failure[name] = printable_lines(failure[name])
    return failure


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]} …"
