"""Checks of the types and sizes of what others say: other nodes, and files that anybody wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]  # gives the value; raises `Malformed`

_LARGEST = 2**53  # an integer that every JSON reader takes exactly


class Malformed(ValueError):
    """What was said has not the form that it should have."""


def anything(value: Any) -> Any:
    """A value whose receivers check it themselves."""
    return value


def an_integer(value: Any) -> int:
    """A whole number of a common size; a truth value is none."""
    if type(value) is not int or abs(value) > _LARGEST:
        raise Malformed("no whole number")
    return value


def a_duration(value: Any) -> float:
    """Seconds, 0 or more and finite."""
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST or math.isnan(value):
        raise Malformed("no number of seconds")
    return float(value)


def a_truth(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise Malformed("neither true nor false")
    return value


def a_text(most: int) -> Check:
    """A text of at most so many characters."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > most:
            raise Malformed(f"no text of at most {most} characters")
        return value

    return check


def or_none(check: Check) -> Check:
    """As another check says, or nothing."""
    return lambda value: None if value is None else check(value)


def a_list(value: Any) -> list[Any]:
    """A list of anything."""
    if type(value) is not list:
        raise Malformed("no list")
    return value


def of_form(value: Any, form: Mapping[str, Check]) -> dict[str, Any]:
    """The parts of an object that a form names; further ones are left out.

    Raises:
        Malformed: it is no object, or a part is missing or not as its check says.
    """
    if type(value) is not dict:
        raise Malformed("no object")
    found = {}
    for name, check in form.items():
        if name not in value:
            raise Malformed(f"without {name}")
        try:
            found[name] = check(value[name])
        except Malformed as fault:
            raise Malformed(f"{name}: {fault}") from None
    return found
