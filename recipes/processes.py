"""Processes as the system knows them (proc(5)): which are ours, and the end of those that are."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# Set in the environment of a process that is to outlive the run, and ends by itself.
OUTLIVES_VARIABLE = "FLEET_RECIPES_OUTLIVES"
_ROUNDS = 5  # a process that is being killed may have started another one


def descendants(root: int) -> list[int]:
    """The living processes that `root` started, and those that they started in turn; without any
    that is to outlive it."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, next_ones = [], [root]
    while next_ones:
        next_ones = [child for pid in next_ones for child in children.get(pid, [])]
        next_ones = [pid for pid in next_ones if not has_variable(pid, OUTLIVES_VARIABLE)]
        found += next_ones
    return found


def with_variable(name: str, value: str) -> list[int]:
    """The living processes, this one apart, that were started with a variable set so.

    A process forked from such a one has it as well, whoever its parent is by now.
    """
    return [pid for pid, _ in _parents() if pid != os.getpid() and has_variable(pid, name, value)]


def parent_of(pid: int) -> int | None:
    """The parent of a process; None where the process has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields and fields[0] != "Z" else None


def has_variable(pid: int, name: str, value: str | None = None) -> bool:
    """Whether a process was started with a variable; False for those of others."""
    wanted = f"{name}=" if value is None else f"{name}={value}\0"
    try:
        return f"\0{wanted}".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def kill_all(find: Callable[[], Iterable[int]], seconds: float = 1.0) -> None:
    """Kill what `find` finds until it finds nothing; also what is halted, which heeds only this.

    Args:
        seconds: to wait for their ends. One that the system holds (a disk that does not answer)
            ends when it is let go.
    """
    ends = time.monotonic() + seconds
    for _ in range(_ROUNDS):
        found = list(find())
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        while found and time.monotonic() < ends:
            found = [pid for pid in found if _state(pid) not in (None, "Z")]
            time.sleep(0.01)
        if not found and not list(find()):
            return


def _parents() -> list[tuple[int, int]]:
    """Each living process with its parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None and fields[0] != "Z":
            found.append((int(folder.name), int(fields[1])))
    return found


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _stat(pid: int) -> list[str] | None:
    """What follows a process's name in ``stat``: the state, the parent, …; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def that_ended(handles: Iterable[int], seconds: float) -> list[int]:
    """Of some processes those that have ended, by their pidfds; waits until one has, or for a time.

    Not by select(2), which takes no descriptor above 1023: node 0 has one for each other node.
    """
    ends = select.poll()
    for handle in handles:
        ends.register(handle, select.POLLIN)
    return [handle for handle, _ in ends.poll(seconds * 1000)]
