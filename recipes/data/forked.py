"""What a loader's process, forked from its rank, must and must not do."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cv2

from recipes import rank_signals
from recipes.ending import POLITE

_PR_SET_PDEATHSIG = 1


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector off; processes forked meanwhile start with it off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def live_with_rank(rank_process: int, clean_up: Callable[[], None] | None = None) -> None:
    """In a new process, forked without collection: live as long as the rank, and use one core.

    What feeds it looks whether the rank lives only when work arrives, so a killed rank would leave
    it waiting for ever. Ctrl-C and SIGTERM reach every process of a job; what they mean is the
    rank's decision, and it needs its processes until it has ended what it does.

    Args:
        rank_process: the rank's process id.
        clean_up: called before this process ends because the rank has.
    """

    def end_with_rank(*_: object) -> None:
        if os.getppid() != rank_process:
            if clean_up is not None:
                clean_up()
            os._exit(1)

    # Garbage of the rank must not be collected here: a reader of an earlier loader would join a
    # C++ thread that a forked process does not have, and abort.
    gc.freeze()
    gc.enable()
    for number in POLITE:
        signal.signal(number, end_with_rank)
    rank_signals.unblock()
    # SIGKILL ends a process that is halted as well; only what has to clean up is asked to end.
    last = signal.SIGTERM if clean_up is not None else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, last)
    end_with_rank()  # the rank may have died before the call above
    cv2.setNumThreads(0)
