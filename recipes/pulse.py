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

_RECORD = struct.Struct("<dq")  # time.monotonic(), which all processes of a machine share; phase


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
    """Takes a rank's marks."""

    def mark(self, phase: Phase) -> None:
        """The rank has got here, now."""


class NoPulse:
    """For a rank without a parent that watches."""

    def mark(self, phase: Phase) -> None:
        """Nobody looks."""


class SharedPulse:
    """Writes a rank's marks where its parent reads them."""

    def __init__(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)

    def mark(self, phase: Phase) -> None:
        """Note the phase and the time."""
        _RECORD.pack_into(self._memory, 0, time.monotonic(), phase)


@dataclass(frozen=True)
class Mark:
    """A rank's last mark.

    Attributes:
        phase: what the rank was doing.
        age: seconds since then.
    """

    phase: Phase
    age: float


def read_mark(path: Path) -> Mark | None:
    """The last mark that a rank left at `path`; None before the first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _RECORD.size:
        return None
    at, phase = _RECORD.unpack(data)
    return Mark(Phase(phase), time.monotonic() - at) if phase else None


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
