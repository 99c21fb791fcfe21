"""How a rank shows its parent that it moves on: a few bytes of shared memory.

A mark costs about a microsecond, so the loop can set one at every step. The parent reads the marks
of its ranks to tell which one holds up the others, and for how long.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.config import DeadlinesConfig

# time.monotonic(), which all processes of a machine share; phase; optimizer steps done; and, from
# the parent, the step before which to stop (0: none).
_RECORD = struct.Struct("<dqqq")
_MARK = struct.Struct("<dqq")
_STOP = struct.Struct("<q")
_STOP_OFFSET = _RECORD.size - _STOP.size


class Phase(enum.IntEnum):
    """What a rank is doing."""

    STARTING = 1  # joining the group
    PREPARING = 2  # building data and model
    READING = 3  # waiting for its next batch
    STEPPING = 4  # computing and communicating
    EVALUATING = 5
    SAVING = 6

    @property
    def words(self) -> str:
        """As part of a sentence."""
        return {
            Phase.STARTING: "joining the group",
            Phase.PREPARING: "preparing data and model",
            Phase.READING: "waiting for its data",
            Phase.STEPPING: "in a training step",
            Phase.EVALUATING: "evaluating",
            Phase.SAVING: "saving a checkpoint",
        }[self]


class Pulse(Protocol):
    """Takes a rank's marks, and gives its parent's word to stop."""

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """The rank has got here, now, after `step` optimizer steps (None: as many as before)."""

    def asks_to_stop(self, step: int) -> bool:
        """Whether the rank is to stop now that it has done `step` optimizer steps."""


class NoPulse:
    """For a rank without a parent that watches."""

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """Nobody looks."""

    def asks_to_stop(self, step: int) -> bool:
        """Nobody asks."""
        del step
        return False


class OwnPulse:
    """For the only rank, in its parent's process, where another thread watches it."""

    def __init__(self) -> None:
        self._stop = False
        self._last: tuple[float, Phase] | None = None
        self._first_step: int | None = None  # not training yet
        self._step: int | None = None

    def ask(self) -> None:
        """Have the rank stop after its step."""
        self._stop = True

    def steps(self) -> tuple[int, int] | None:
        """Optimizer steps before the first of this run, and those done; None before it trains."""
        if self._first_step is None or self._step is None:
            return None
        return self._first_step, self._step

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """Note the phase, the step and the time."""
        if step is not None:
            self._step = step
            self._first_step = step if self._first_step is None else self._first_step
        self._last = time.monotonic(), phase

    def last(self) -> Mark | None:
        """The last mark; None before the first."""
        last = self._last
        return last and Mark(last[1], time.monotonic() - last[0], self._step)

    def asks_to_stop(self, step: int) -> bool:
        """Whether it was asked to."""
        del step
        return self._stop


class SharedPulse:
    """Writes a rank's marks where its parent reads them."""

    def __init__(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._step = -1  # not training yet

    def mark(self, phase: Phase, step: int | None = None) -> None:
        """Note the phase, the step and the time; what the parent has written stays."""
        self._step = self._step if step is None else step
        _MARK.pack_into(self._memory, 0, time.monotonic(), phase, self._step)

    def asks_to_stop(self, step: int) -> bool:
        """Whether the parent's step has come."""
        stop: int = _STOP.unpack_from(self._memory, _STOP_OFFSET)[0]
        return 0 < stop <= step


def ask_to_stop(path: Path, step: int) -> None:
    """Tell the rank whose marks are at `path` to stop after `step` optimizer steps."""
    with path.open("r+b") as file:
        file.seek(_STOP_OFFSET)
        file.write(_STOP.pack(step))


@dataclass(frozen=True)
class Mark:
    """A rank's last mark.

    Attributes:
        phase: what the rank was doing.
        age: seconds since then.
        step: optimizer steps it had done; None before it trains.
    """

    phase: Phase
    age: float
    step: int | None = None


def read_mark(path: Path) -> Mark | None:
    """The last mark that a rank left at `path`; None before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _RECORD.size:
        return None
    at, phase, step, _ = _RECORD.unpack(data)
    if not phase:
        return None
    return Mark(Phase(phase), time.monotonic() - at, step if step >= 0 else None)


class Halts:
    """How long this very process was halted (SIGSTOP, a suspended machine or container): no rank of
    its machine is to be blamed for that time, since the ranks may have been halted with it."""

    _UNUSUAL_SECONDS = 2.0  # between two looks
    _RECENT_SECONDS = 30.0

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._halts: list[tuple[float, float]] = []  # when each was noticed, and how long it was

    def look(self) -> float:
        """To be called several times a second; gives the seconds of a halt that has just ended."""
        now = time.monotonic()
        seconds, self._looked = now - self._looked, now
        if seconds < self._UNUSUAL_SECONDS:
            return 0.0
        self._halts.append((now, seconds))
        return seconds

    def within(self, age: float) -> float:
        """Seconds of the last `age` seconds in which this process was halted."""
        began = time.monotonic() - age
        return sum(min(seconds, at - began) for at, seconds in self._halts if at > began)

    @property
    def recent(self) -> float:
        """Seconds of the longest halt that was noticed shortly before."""
        since = time.monotonic() - self._RECENT_SECONDS
        return max((seconds for at, seconds in self._halts if at > since), default=0.0)


def is_overdue(mark: Mark, deadlines: DeadlinesConfig, halts: Halts) -> bool:
    """Whether a rank has not moved on within the deadline of what it is doing."""
    limits = {Phase.STARTING: deadlines.start, Phase.PREPARING: deadlines.prepare}
    return mark.age - halts.within(mark.age) > limits.get(mark.phase, deadlines.step)


def is_stopped(pid: int) -> bool:
    """Whether a process is halted by a signal such as SIGSTOP (proc(5), state T or t)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def exit_status(pid: int) -> int | None:
    """The exit status of a process that has ended and whose parent has not asked for it yet
    (proc(5), exit_code); less than 0: by a signal. None where that is over."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[48])) if state == "Z" else None


def oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory in this control group, so far.

    None where the system does not count them.
    """
    for path in (
        "/sys/fs/cgroup/memory.events",  # version 2
        "/sys/fs/cgroup/memory/memory.oom_control",  # version 1
        "/proc/vmstat",  # the whole machine
    ):
        if not os.access(path, os.R_OK):
            continue
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
