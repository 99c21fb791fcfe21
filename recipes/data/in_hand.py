"""Which image each reader of a dataset is at: who is overdue, and what one had when it died.

A reader is a thread of the rank, or a process forked from it. It notes the image before it reads
it, in memory that all of them share, which takes about a microsecond.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from recipes.bounds import MOST_WORKERS
from recipes.config import DeadlinesConfig, PassingError

_NOTE = struct.Struct("<dq")  # time.monotonic(); the image's number and 1, or 0: none in hand
_LOOK_SECONDS = 0.5

T = TypeVar("T")


class Late(NamedTuple):
    """An image, and for how many seconds a reader has been at it."""

    image: int
    seconds: float


class InHand:
    """The notes of one dataset's readers, of which the rank's own thread is number 0."""

    def __init__(self) -> None:
        self._notes = mmap.mmap(-1, (MOST_WORKERS + 1) * _NOTE.size)
        self._own = threading.local()

    def number_reader(self, number: int) -> None:
        """Say which reader this thread is, 1 to `bounds.MOST_WORKERS`."""
        self._own.place = number * _NOTE.size

    def take(self, index: int) -> None:
        """This thread begins to read an image."""
        place = getattr(self._own, "place", 0)
        _NOTE.pack_into(self._notes, place, time.monotonic(), index + 1)

    def put_down(self) -> None:
        """This thread is done with its image."""
        _NOTE.pack_into(self._notes, getattr(self._own, "place", 0), 0.0, 0)

    def of(self, number: int) -> int | None:
        """The image that a reader is at, or was when it died."""
        _, taken = _NOTE.unpack_from(self._notes, number * _NOTE.size)
        return taken - 1 if taken else None

    def longest(self) -> Late | None:
        """The image that a reader has been at for the longest time; None where none is read."""
        notes = [(since, taken) for since, taken in _NOTE.iter_unpack(self._notes) if taken]
        if not notes:
            return None
        since, taken = min(notes)
        return Late(taken - 1, time.monotonic() - since)


class Source(NamedTuple):
    """What is read: the notes of its readers, and how a message names an image of it."""

    in_hand: InHand
    place: Callable[[int], str]


def read_seconds(deadlines: DeadlinesConfig) -> float:
    """How long one image may take; see `DeadlinesConfig.read`."""
    return min(deadlines.read, 0.75 * deadlines.step)


class Patience:
    """Waits for readers, as long as none of them has been at one image for too long.

    Args:
        sources: what they read.
        seconds: for one image.
        given_up: called before the error is raised: what waits for the reader's end must not.
    """

    def __init__(
        self, sources: Sequence[Source], seconds: float, given_up: Callable[[], None]
    ) -> None:
        self._sources, self._seconds, self._given_up = tuple(sources), seconds, given_up

    def result(self, future: Future[T]) -> T:
        """A future's result.

        Raises:
            PassingError: naming an image that a reader has been at for too long.
        """
        waited, pause = 0.0, min(_LOOK_SECONDS, self._seconds)
        while True:
            before = time.monotonic()
            try:
                return future.result(pause)
            except TimeoutError:
                if future.done():  # the reader's own
                    return future.result()
            # Where this very process was halted meanwhile, that is nobody's delay.
            waited += min(time.monotonic() - before, 2 * _LOOK_SECONDS)
            if waited >= self._seconds:
                self.check()

    def check(self) -> None:
        """See that no reader is overdue.

        Raises:
            PassingError: as `result`.
        """
        error = self.overdue()
        if error is not None:
            self._given_up()
            raise error

    def overdue(self) -> PassingError | None:
        """The error where a reader is overdue."""
        for in_hand, place in self._sources:
            late = in_hand.longest()
            if late is not None and late.seconds > self._seconds:
                return PassingError(
                    f"{place(late.image)}: not read within {self._seconds:g} s (deadlines.read)",
                    "see whether its disk or network mount answers; deadlines.read=… waits longer",
                )
        return None
