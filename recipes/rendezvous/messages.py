"""The messages between a member and its coordinator: their kinds and parts, and JSON for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recipes.forms import (
    Check,
    Malformed,
    a_duration,
    a_list,
    a_text,
    a_truth,
    an_integer,
    anything,
    of_form,
)
from recipes.printable import printable
from recipes.rendezvous import failures

MEET = "meet"  # the exchange that every attempt begins with

MESSAGE_BYTES = 1 << 22  # of one that a member sends; what it gets holds one value of each node
NAME_CHARACTERS = 100  # of an exchange
_HOST_CHARACTERS = 255

Forms = Mapping[str, Mapping[str, Check]]


def _host(value: Any) -> str:
    return printable(a_text(_HOST_CHARACTERS)(value), _HOST_CHARACTERS)


TO_COORDINATOR: Forms = {
    "hello": {"node": an_integer, "nodes": an_integer, "host": _host, "session": a_text(64)},
    "alive": {},
    "again": {},
    "bye": {},
    "exchange": {
        "name": a_text(NAME_CHARACTERS),
        "value": anything,
        "deadline": a_duration,
    },
    "stop": {"step": an_integer},
    "failed": {"failure": failures.received},
}
TO_MEMBER: Forms = {
    "alive": {},
    "who": {},
    "all": {"name": a_text(NAME_CHARACTERS), "values": a_list},
    "stop": {"step": an_integer},
    "failed": {"failure": failures.received, "again": a_truth},
}


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as one line, without its end."""
    return json.dumps(message).encode()


def decode(line: bytes, forms: Forms) -> dict[str, Any]:
    """A message of one of some forms.

    Raises:
        Malformed: it is none of them.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is not str or kind not in forms:
        raise Malformed("a message of no known type")
    return {"type": kind} | of_form(value, forms[kind])
