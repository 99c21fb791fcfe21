"""Damage to files, for tests: bytes as chance has them, and JSON that keeps its form."""

from __future__ import annotations

import copy
import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Values of every type, at the limits of what a program may expect.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1000, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "x", "..", "../../etc/passwd", "/etc/passwd", "\0", "\x1b[31m", "ä" * 99),
    *([], {}, [[]], [1, 2], {"": None}, [None] * 1000, "9" * 5000),
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one to four changes: of bits, of runs, cut, repeated, moved, overwritten."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        size = len(result)
        at = chance.randrange(size + 1)
        length = min(chance.choice((1, 2, 8, 64, 1000)), size - at)
        part = bytes(result[at : at + length])
        change = chance.randrange(7)
        if change == 0 and length:
            result[at] ^= 1 << chance.randrange(8)
        elif change == 1:
            result[at : at + length] = chance.randbytes(length)
        elif change == 2:
            del result[at : at + length]
        elif change == 3:
            result[at:at] = part * chance.choice((1, 2, 50))
        elif change == 4:
            result[at : at + length] = chance.choice((b"\0", b"\xff", b"[", b"9", b"/")) * length
        elif change == 5:
            there = chance.randrange(len(result) + 1)
            result[there:there] = part
        else:
            del result[at:]
    return bytes(result)


def mutated_json(content: Any, chance: random.Random) -> Any:
    """The content with one to three of its values changed, dropped, added or swapped."""
    result = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice(list(_places(result)) or [(None, None)])
        if holder is None:
            return copy.deepcopy(chance.choice(ODD))
        change = chance.randrange(5)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            name = chance.choice(("", "x", "format", "..", str(key).upper()))
            holder[name] = copy.deepcopy(chance.choice(ODD))
        elif change == 2:
            there, other = chance.choice(list(_places(result)))
            holder[key] = copy.deepcopy(there[other])
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return result


def dumped(content: Any) -> bytes:
    """JSON as a careless program would write it, with NaN and infinities."""
    return json.dumps(content).encode()


@contextmanager
def little_memory(mebibytes: int) -> Iterator[None]:
    """Let this process take so much more address space than it has, and a `MemoryError` beyond."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (mebibytes << 20), before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder with each of its keys or indices, all the way down."""
    if not isinstance(content, dict | list):
        return
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        yield content, key
        yield from _places(content[key])
