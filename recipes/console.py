"""Standard streams that a run outlives.

A pipe whose reader has gone (``| head``), a terminal that was closed, a full disk behind ``>``, or
a stream that was closed before the start (``>&-``): none of them may end a training, nor make its
exit status one of Python's. What cannot be written is dropped from then on; the run folder has it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

_STREAMS = (0, 1, 2)


def outlive_console() -> None:
    """Put streams in the place of `sys.stdout` and `sys.stderr` whose writes never fail."""
    for number in _STREAMS:
        _fill(number)
    sys.stdout = _lasting(1, sys.stdout)
    sys.stderr = _lasting(2, sys.stderr)


class _LastingFile(io.FileIO):
    """Writes to a descriptor, and to nowhere once that has failed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            # In the descriptor's own place: libraries and child processes write there as well,
            # and what is buffered is written again when the interpreter ends.
            _redirect_to_nowhere(self.fileno())
            return len(memoryview(data).cast("B"))


def _lasting(number: int, before: TextIO | None) -> TextIO:
    """A text stream on a descriptor, buffered as the one before."""
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    buffer = io.BufferedWriter(_LastingFile(number, "wb", closefd=False))
    return io.TextIOWrapper(
        buffer,
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors="backslashreplace",  # a file name need not fit the terminal's encoding
        line_buffering=getattr(before, "line_buffering", False) or number == 2,
        write_through=getattr(before, "write_through", False),
    )


def _fill(number: int) -> None:
    """Open nowhere in the place of a stream that is closed: the next file that is opened would
    take its number, and be written to by whoever means the console."""
    try:
        os.fstat(number)
    except OSError:
        _redirect_to_nowhere(number)


def _redirect_to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    else:
        os.set_inheritable(number, True)
