"""``last`` and ``best``: links to a checkpoint beside them, or files that hold its name.

Some file systems have no symbolic links (exFAT, CIFS as it is often mounted, folders shared with a
virtual machine), and each says so by another error. There a pointer is a file of one line. Whoever
reads takes both, whatever wrote them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from recipes.config import UserError

NAMES = ("last", "best")
LOOKS = 20  # for what is missing; a writer replaces and removes it in a moment
PAUSE = 0.01  # seconds between two
_TARGET = re.compile(r"step-\d{8,20}", re.ASCII)
_LONGEST = 64  # bytes of such a file

T = TypeVar("T")


class Missing(UserError):
    """What a path or a pointer names is not there; it may be just now."""


def looked_again(look: Callable[[], T]) -> T:
    """What `look` returns, called again for a moment while something is missing.

    A writer lets a pointer lead on and removes what it led to before, and gives a new checkpoint
    the name of an old one. Whoever reads between the two finds nothing there.

    Raises:
        Missing: it stays so.
    """
    for _ in range(LOOKS - 1):
        try:
            return look()
        except Missing:
            time.sleep(PAUSE)
    return look()


def point(pointer: Path, target: str) -> None:
    """Let a pointer lead to the folder `target` beside it, at once: readers see it or the old one.

    A folder of that name, as copying a run leaves it where it follows links, stays under another.

    Raises:
        OSError: the folder cannot be written.
    """
    fresh = pointer.with_name(f".{pointer.name}.partial-{os.getpid()}")
    try:
        _make(fresh, target)
        if pointer.is_dir() and not pointer.is_symlink():
            pointer.rename(free_name(pointer, "copy"))
        fresh.replace(pointer)
    except OSError:
        with contextlib.suppress(OSError):  # of two errors the first
            fresh.unlink(missing_ok=True)
        raise


def _make(fresh: Path, target: str) -> None:
    fresh.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # whatever is in the way of a file too is told by that
        fresh.symlink_to(target)
        return
    with fresh.open("w", encoding="ascii") as stream:
        stream.write(f"{target}\n")
        stream.flush()
        os.fsync(stream.fileno())


def follow(path: Path) -> Path:
    """Where a path leads: through links and pointer files, to what is there.

    Raises:
        Missing: to nothing.
        UserError: to itself, or it cannot be followed.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        if path.name not in NAMES or not real.is_file():
            return real
        target = Path(os.path.realpath(real.with_name(_target(real)), strict=True))
    except FileNotFoundError:
        raise Missing(f"checkpoint {path}: a link to nothing") from None
    except OSError as error:
        reason = "a link to itself" if error.errno == errno.ELOOP else error.strerror
        raise UserError(f"checkpoint {path}: {reason}") from None
    return target


def free_name(path: Path, word: str) -> Path:
    """A name beside `path` that is not taken: ``NAME.WORD-1`` and so on."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{word}-{number}")):
        number += 1
    return path.with_name(f"{path.name}.{word}-{number}")


def _target(file: Path) -> str:
    with file.open("rb") as stream:
        text = stream.read(_LONGEST).decode("ascii", "replace").removesuffix("\n")
    if not _TARGET.fullmatch(text):
        raise UserError(
            f"checkpoint {file}: does not name a checkpoint beside it",
            "give the folder of a checkpoint, or remove the file",
        )
    return text
