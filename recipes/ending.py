"""How this process ends when it is asked to, and how it ends for certain.

The first signal is a request: the run finishes its step, saves and leaves its result. `Watch` sees
to it that the end comes all the same, and in time: a thread that hears of every signal at once,
also where the main thread is held by a read or a library that never returns, and that ends
everything by force when the time is over or a second signal comes. docs/endings.md has the table.

Nothing but the standard library is imported here, so that signals are heeded from the first moment,
while everything else is still being imported.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from recipes import processes

# What asks a run to end: a terminal that was closed, Ctrl-C, Ctrl-\ and batch systems, whose notice
# may be one of the last three.
POLITE = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)

# Exit statuses; 128 + n: ended by signal n.
COMPLETED = 0
FAILED = 1  # while running
REFUSED = 2  # before it began: a mistake that a user can mend

# Signals within it are one request: a batch system and a terminal may both tell of the same.
SAME_SECONDS = 0.5
# From the end of the run to the end of the process.
LEAVING_SECONDS = 5.0
_UNWINDING_SECONDS = 5.0  # for the main thread, where a deadline has passed
_EARLY_SECONDS = 2.0  # for the main thread, where there is no run yet that could be saved
_LAST_WORDS_SECONDS = 1.5
_CHILDREN_SECONDS = 0.5  # to end by themselves, once the run is given up
_TICK_SECONDS = 0.25


class Interrupted(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def interrupt_behind(error: BaseException) -> Interrupted | None:
    """The interruption during whose handling an error came up; None where there is none."""
    behind = error.__context__
    while behind is not None and not isinstance(behind, Interrupted):
        behind = behind.__context__
    return behind


class Overdue(BaseException):
    """The main thread has not moved on within a deadline."""


def status_of(number: int) -> int:
    """The exit status of what a signal ended."""
    return 128 + number


def number_of(name: str) -> int | None:
    """The number of a signal that asks for the end, by its name; None for other words."""
    return next((number for number in POLITE if number.name == name), None)


def saving_seconds(grace: float) -> float:
    """How much of the grace period a step and its checkpoint may take; the rest is for the ends of
    the processes."""
    return grace - min(3.5, grace / 2)


@dataclass
class _Run:
    """What is going on.

    Attributes:
        grace: seconds from the first signal to the end by force.
        doing: what the first signal is answered with.
        last_words: called before an end by force.
        ask: called with the first signal instead of raising `Interrupted`, which follows
            `ask_seconds` later.
        overdue: called several times a second; True where the main thread is to be given up.
    """

    grace: float
    doing: str
    last_words: Callable[[], None]
    ask: Callable[[], None] | None = None
    ask_seconds: float = 0.0
    overdue: Callable[[], bool] | None = None


class Watch:
    """Heeds signals from `start` on, and watches over the end of this process.

    Those that were ignored before (nohup, a shell's background job) stay so, SIGTERM apart.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._run: _Run | None = None
        self._asked: int | None = None  # the first signal, whichever thread heard of it
        self._answered = False  # the main thread has got to it
        self._raised: BaseException | None = None  # what the main thread was told
        self._over = False  # the run that was asked to end has ended
        self._leaving: int | None = None  # the exit status, once all is over
        self._told_at = math.inf  # when the main thread was told to give its run up
        self._forced_at = math.inf
        self._ending = threading.Lock()
        self._acknowledging: threading.Thread | None = None

    @property
    def asked(self) -> int | None:
        """The signal that has asked for the end, if one has."""
        return self._asked

    def start(self) -> Watch:
        """Take the signals over; from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        heeded = [
            number
            for number in POLITE
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in heeded:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._raise)
        # Written by the system's handler itself, whatever the main thread is held by.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Last of all: Python gives signals their own meaning back while it ends.
        atexit.register(self._settle)
        # What is forked from here must not write for its own signals.
        os.register_at_fork(after_in_child=_forget_wakeup)
        threading.Thread(
            target=self._watch, args=(reader, heeded), name="watch", daemon=True
        ).start()
        return self

    @contextlib.contextmanager
    def run(self, grace: float, doing: str, last_words: Callable[[], None]) -> Iterator[None]:
        """Meanwhile, have the first signal raise `Interrupted` in the main thread.

        Args:
            grace: seconds from the first signal to the end by force.
            doing: what a person is told at the first signal: "ending …".
            last_words: called before an end by force, in another thread; what it raises is dropped.
        """
        self._run = _Run(grace, doing, last_words)
        try:
            if self._asked is not None:  # just before
                raise Interrupted(self._asked)
            yield
        finally:
            self._run, self._over = None, self._asked is not None
            self._forced_at = time.monotonic() + LEAVING_SECONDS if self._over else math.inf

    @contextlib.contextmanager
    def asking(self, ask: Callable[[], None], seconds: float, doing: str) -> Iterator[None]:
        """Within `run`: meanwhile, have the first signal call `ask`, and raise `Interrupted` at the
        end, or `seconds` later where that comes first."""
        run = self._run
        assert run is not None
        before, run.doing = run.doing, doing
        run.ask_seconds, run.ask = seconds, ask
        try:
            yield
        finally:
            run.ask, run.doing = None, before
        if self._asked is not None:
            raise Interrupted(self._asked)

    @contextlib.contextmanager
    def deadline(self, overdue: Callable[[], bool]) -> Iterator[None]:
        """Within `run`: meanwhile, give the main thread up once `overdue` says so: `Overdue` is
        raised there, what this process has started is killed, and the process itself is ended
        where that does not help.

        Args:
            overdue: called several times a second, in another thread.
        """
        run = self._run
        assert run is not None
        run.overdue = overdue
        try:
            yield
        finally:
            run.overdue = None
            if isinstance(self._raised, Overdue):
                self._raised, self._forced_at = None, math.inf

    def stand_by(self) -> None:
        """Wait for the end where this process is being ended: what is met meanwhile comes of it."""
        if self._ending.locked():
            time.sleep(LEAVING_SECONDS)

    def leave(self, status: int) -> None:
        """Have the process end with `status` within seconds, also where a thread that never
        returns, or what runs at the end of Python, holds it."""
        self._leaving = status
        self._forced_at = time.monotonic() + LEAVING_SECONDS

    def _settle(self) -> None:
        if os.getpid() != self._process:
            return
        for number in POLITE:
            signal.signal(number, signal.SIG_IGN)
        # Python ends by an abort where a thread is writing to the console just then.
        said = self._acknowledging
        if said is not None:
            said.join(_LAST_WORDS_SECONDS)
            if said.is_alive() and self._leaving is not None:  # a console that takes nothing in
                os._exit(self._leaving)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """In the main thread, when it gets to it."""
        if os.getpid() != self._process or self._leaving is not None:
            return  # a decoder is ended by its rank
        if self._answered:
            return  # the thread sees to it
        self._answered = True
        self._asked = first = self._asked or number
        if self._run is None:
            self._end(status_of(first), f"interrupted by {_name(first)}")
        elif self._run.ask is not None:
            self._run.ask()
        else:
            self._raised = Interrupted(first)
            raise self._raised

    def _raise(self, *_: object) -> None:
        """In the main thread, woken by the other one."""
        if os.getpid() != self._process:
            return
        if self._raised is not None:
            raise self._raised
        if self._asked is not None:
            self._handle(self._asked, None)  # the other thread has taken the signal itself

    def _watch(self, reader: int, heeded: list[signal.Signals]) -> None:
        """The thread."""
        # A signal is the main thread's, and stays with the system while that one is in a call which
        # no signal interrupts, such as one about a file of a mount that does not answer. A thread
        # that blocks it may take it then.
        signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
        heard: tuple[int, float] | None = None  # the first signal, and when
        while True:
            with contextlib.suppress(OSError, ValueError):
                select.select([reader], [], [], _TICK_SECONDS)
            now = time.monotonic()
            for number in [*_read(reader), *_left_with_the_system(heeded)]:
                if heard is None:
                    self._asked = first = self._asked or number
                    heard = first, now
                    self._acknowledge(first)
                elif now - heard[1] > SAME_SECONDS:
                    self._end(self._status(), f"ended at once by {_name(number)}")
            if heard is not None:
                self._see_to_the_end(*heard)
            elif self._run is not None and self._run.overdue is not None:
                self._check_deadline(self._run.overdue)
            if now > self._forced_at:
                self._end(self._status(), "")

    def _status(self) -> int:
        if self._leaving is not None:
            return self._leaving
        return FAILED if self._asked is None else status_of(self._asked)

    def _acknowledge(self, number: int) -> None:
        run = self._run
        if run is None or self._leaving is not None:
            return
        text = f"{_name(number)}: {run.doing}, within {run.grace:g} s; once more ends at once"
        # In a thread of its own: a console that takes nothing in must not hold this one.
        said = threading.Thread(target=lambda: print(text, flush=True), daemon=True)
        with contextlib.suppress(RuntimeError):
            said.start()
            self._acknowledging = said

    def _see_to_the_end(self, number: int, since: float) -> None:
        """The main thread has been asked: wake it when it is to give up, and end it at last."""
        run, now = self._run, time.monotonic()
        if self._leaving is not None or self._over:
            return
        if not self._answered:
            # The system may have given the signal to another thread, and what the main thread waits
            # for was not interrupted. Now it is, and Python gets to its handlers.
            _wake_main_thread()
        grace = _EARLY_SECONDS if run is None else run.grace
        if run is not None and run.ask is not None and now > since + run.ask_seconds:
            run.ask, self._raised = None, Interrupted(number)
            self._told_at = now
            _wake_main_thread()
        if now > self._told_at + _CHILDREN_SECONDS:
            # It may wait for the end of a child that does not end.
            self._told_at = math.inf
            processes.kill_all(lambda: processes.descendants(self._process))
        if now > since + grace:
            self._end(
                status_of(number),
                f"ended by force, {grace:g} s after {_name(number)}: something held the process",
            )

    def _check_deadline(self, overdue: Callable[[], bool]) -> None:
        if self._raised is None and overdue():
            self._raised = Overdue()
            self._forced_at = time.monotonic() + _UNWINDING_SECONDS
            # It may be a decoder that never returns, and the main thread would wait for its end.
            processes.kill_all(lambda: processes.descendants(self._process))
            _wake_main_thread()

    def _end(self, status: int, words: str) -> None:
        """End the process, and all that it has started, now."""
        if not self._ending.acquire(blocking=False):
            return  # the other thread is at it
        processes.kill_all(lambda: processes.descendants(self._process))
        run = self._run
        if run is not None:
            last = threading.Thread(target=_quietly, args=(run.last_words,), daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads
                last.start()
                last.join(_LAST_WORDS_SECONDS)
        if words:
            say_at_once(words)
        os._exit(status)


def say_at_once(text: str) -> None:
    """Write a line to standard output past every buffer and lock, unless that had to wait."""
    with contextlib.suppress(OSError, ValueError):
        _, ready, _ = select.select([], [1], [], 0)
        if ready:
            os.write(1, f"{text}\n".encode())


def _quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(BaseException):
        call()


def _read(reader: int) -> list[int]:
    """The polite signals that have come."""
    try:
        return [number for number in os.read(reader, 512) if number in POLITE]
    except OSError:  # none
        return []


def _left_with_the_system(numbers: list[signal.Signals]) -> list[int]:
    """Those of these signals that no thread has taken yet; this takes them."""
    found = []
    while (taken := signal.sigtimedwait(numbers, 0)) is not None:
        found.append(taken.si_signo)
    return found


def _name(number: int) -> str:
    return signal.Signals(number).name


def _wake_main_thread() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGALRM)


def _forget_wakeup() -> None:
    with contextlib.suppress(ValueError):  # forked from another thread than the main one
        signal.set_wakeup_fd(-1)
