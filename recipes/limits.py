"""The system's limits that a run may meet, in words: open files, processes and threads."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from recipes.config import UserError
from recipes.control_groups import PROCESS, groups, lines

# What the system answers where a limit is reached, and not where a file is at fault.
REACHED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
HIGHER = "a higher limit (ulimit -n, ulimit -u, docker run --ulimit nofile=… --pids-limit=…)"


def cannot_start(what: str, error: Exception, setting: str) -> UserError:
    """The message where threads or processes cannot be started.

    Args:
        what: could not be started.
        error: of the system; `RuntimeError` where Python cannot start a thread.
        setting: that asks for fewer.
    """
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UserError(
        f"{what} cannot be started: {reason} (limits here: {in_force()})",
        f"a smaller {setting}, or {HIGHER}",
    )


def in_force(process: Path = PROCESS) -> str:
    """The limits of this process, for a message."""
    known = [f"{_shown(resource.getrlimit(resource.RLIMIT_NOFILE)[0])} open files"]
    processes = [
        each
        for each in (resource.getrlimit(resource.RLIMIT_NPROC)[0], most_processes(process))
        if each is not None and each != resource.RLIM_INFINITY
    ]
    known.append(f"{_shown(min(processes, default=-1))} processes and threads")
    return ", ".join(known)


def most_processes(process: Path = PROCESS) -> int | None:
    """How many processes and threads this process's control groups may have; None: no limit."""
    found = [
        int(line)
        for group in groups("pids", process)
        for line in lines(group.folder / "pids.max")
        if line.isdigit()
    ]
    return min(found, default=None)


def is_reached(error: OSError) -> bool:
    """Whether an error says that a limit of this process or machine is reached."""
    return error.errno in REACHED


def _shown(limit: int) -> str:
    return "any number of" if limit in (-1, resource.RLIM_INFINITY) else str(limit)
