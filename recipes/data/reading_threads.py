"""Threads that read and decode, and that the end of the process does not wait for.

Python waits for the threads of its own executors when a process ends; one that is held by a disk
or a network mount would hold the process for ever.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from recipes.limits import cannot_start

T = TypeVar("T")


class _Task(NamedTuple):
    future: Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


_Tasks = SimpleQueue[_Task | None]  # None: one thread is to end


class ReadingThreads:
    """A number of threads, which take what is submitted in turn.

    Args:
        count: of threads.
        name: of each, with its number.
        setting: that says how many, for errors.
        begin: called in each thread at its start, with its number from 1 on.

    Raises:
        UserError: the system does not let them start.
    """

    def __init__(
        self,
        count: int,
        name: str,
        setting: str = "dataset.workers",
        begin: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._tasks: _Tasks = SimpleQueue()
        self._left_behind = False
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._tasks, count)  # where nobody calls `close`
        for number in range(1, count + 1):
            thread = threading.Thread(
                target=_serve,
                args=(self._tasks, begin, number),
                name=f"{name}_{number}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                what = f"thread {number} of {count} that read images"
                raise cannot_start(what, error, setting) from error
            self._threads.append(thread)

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread make this call."""
        future: Future[T] = Future()
        self._tasks.put(_Task(future, call, arguments))
        return future

    def leave_behind(self) -> None:
        """Do not wait for the threads any more: one of them is held by the system."""
        self._left_behind = True

    def close(self) -> None:
        """End the threads: what they have begun is finished, what waits is dropped."""
        if not self._end.alive:
            return
        with contextlib.suppress(Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task.future.cancel()
        self._end()
        if not self._left_behind:
            for thread in self._threads:
                thread.join()


def _end(tasks: _Tasks, count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _serve(tasks: _Tasks, begin: Callable[[int], None], number: int) -> None:
    begin(number)
    while _make_next(tasks):
        pass


def _make_next(tasks: _Tasks) -> bool:
    """Make the next call. By itself, so that what it was about is not held while none waits."""
    task = tasks.get()
    if task is None:
        return False
    if task.future.set_running_or_notify_cancel():
        try:
            result = task.call(*task.arguments)
        except BaseException as error:
            task.future.set_exception(error)
        else:
            task.future.set_result(result)
    return True
