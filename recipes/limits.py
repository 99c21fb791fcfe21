"""The system's limits that a run may meet, in words: open files, processes and threads."""

from __future__ import annotations

import errno
import os
import resource
import threading
import traceback
from pathlib import Path

from recipes.config import UserError
from recipes.control_groups import PROCESS, groups, lines

NO_THREAD = "can't start new thread"
_SIGNS = (NO_THREAD, os.strerror(errno.EMFILE), os.strerror(errno.EAGAIN))
HIGHER = "a higher limit (ulimit -n, ulimit -u, docker run --ulimit nofile=… --pids-limit=…)"


def cannot_start(what: str, error: Exception, setting: str) -> UserError:
    """The message where threads or processes cannot be started.

    Args:
        what: could not be started.
        error: of the system; `RuntimeError` where Python cannot start a thread.
        setting: that asks for fewer.
    """
    return UserError(
        f"{what} cannot be started: {_reason(error)} (limits here: {in_force()})",
        f"a smaller {setting}, or {HIGHER}",
    )


def see_that_threads_start(count: int) -> None:
    """Start so many threads at once, and end them again.

    Raises:
        RuntimeError: the system does not let them start.
    """
    end = threading.Event()
    started = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    finally:
        end.set()
        for thread in started:
            thread.join()


def told(error: BaseException) -> UserError | None:
    """The message for an error that says that a limit of this process or machine is reached; None
    for any other."""
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if not files and not _is_of_a_start(error):
        return None
    return UserError(
        f"a limit of the system is reached: {_reason(error)} (limits here: {in_force()})",
        f"fewer dataset.workers or threads, or {HIGHER}",
    )


def told_by(output: str) -> bool:
    """Whether a program's last words say that it met a limit."""
    return any(sign in output for sign in _SIGNS)


def _is_of_a_start(error: BaseException) -> bool:
    """Whether the system has refused a process or a thread."""
    if isinstance(error, RuntimeError):  # of Python's threads, or of those that C++ starts (gloo)
        return str(error) in (NO_THREAD, os.strerror(errno.EAGAIN))
    frames = traceback.extract_tb(error.__traceback__)
    where = Path(frames[-1].filename).name if frames else ""
    return isinstance(error, BlockingIOError) and where in ("subprocess.py", "popen_fork.py")


def _reason(error: BaseException) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


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


def _shown(limit: int) -> str:
    return "any number of" if limit in (-1, resource.RLIM_INFINITY) else str(limit)
