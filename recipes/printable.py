"""Text of others, as a message may show it."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 8  # lines listed in one message


def printable(text: object, most: int = 80) -> str:
    """The text on one line, cut to `most` characters, and without what a terminal would obey."""
    whole = str(text)
    cut = whole if len(whole) <= most else f"{whole[:most]} …"
    return "".join(each if each.isprintable() else _code(each) for each in cut)


def _code(character: str) -> str:
    return ascii(character)[1:-1]


def listed(lines: Sequence[str]) -> str:
    """Lines below a message, the first few of them."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines[:SHOWN], *more])


def printable_lines(text: str, most: int | None = None) -> str:
    """The text with its lines kept, each cut to `most` characters, and without what a terminal
    would obey."""
    lines = text.expandtabs(8).split("\n")
    return "\n".join(printable(line, most or len(line)) for line in lines)
