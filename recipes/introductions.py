"""What nodes tell each other of themselves, as it is checked before it is used."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from recipes.config import UserError
from recipes.forms import Malformed, a_list, a_text, an_integer, of_form
from recipes.printable import printable_lines

Given = TypeVar("Given")

_NAME = 255  # characters; the longest that a file system and the DNS take


@dataclass(frozen=True)
class Arrival:
    """A node that has come.

    Attributes:
        run: the name of its run folder; that of node 0 counts.
        host: how the machine calls itself.
    """

    run: str
    host: str

    def value(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def received(cls, value: Any) -> Arrival:
        """As another node gives it.

        Raises:
            Malformed: it is none, or the run folder's name leads elsewhere.
        """
        found = of_form(value, {"run": a_text(_NAME), "host": a_text(_NAME)})
        run = found["run"]
        if run in ("", ".", "..") or "/" in run or "\0" in run:
            raise Malformed("run: no name of a folder")
        return cls(run, printable_lines(found["host"]))


@dataclass(frozen=True)
class Offer:
    """Where a node's launcher would let the others meet."""

    address: str
    port: int

    def value(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def received(cls, value: Any) -> Offer:
        """As another node gives it.

        Raises:
            Malformed: it is none.
        """
        return cls(**of_form(value, {"address": _address, "port": _port}))


def facts_received(value: Any) -> dict[str, Any]:
    """A node's facts for the preflight, without what a terminal would obey.

    What is common to all forms of them is checked; the form itself tells of the rest.

    Raises:
        Malformed: they are none.
    """
    common = {"node": an_integer, "host": a_text(_NAME), "address": _address, "port": _port}
    of_form(value, common)
    return dict(_shown(value))


def view_received(value: Any) -> dict[str, Any]:
    """What a node saw of the others' ports.

    Raises:
        Malformed: it is nothing of the kind.
    """
    return dict(_shown(of_form(value, {"clock": _number, "unreached": a_list})))


def of_all(values: Sequence[Any], received: Callable[[Any], Given]) -> list[Given]:
    """What every node has given, in order.

    Raises:
        UserError: what a node has given is not what it should be.
    """
    found = []
    for node, value in enumerate(values):
        try:
            found.append(received(value))
        except Malformed as fault:
            raise UserError(
                f"node {node} said of itself what cannot be used: {fault}",
                "put the same commit, or the same image, on every node",
            ) from None
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, dict):
        return {printable_lines(str(key)): _shown(each) for key, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list) else value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise Malformed("no number")
    return float(value)


def _port(value: Any) -> int:
    port = an_integer(value)
    if not 0 < port < 2**16:
        raise Malformed("no port")
    return port


def _address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(a_text(_NAME)(value)))
    except ValueError:
        raise Malformed("no address") from None
