"""A temporary folder that a killed process does not leave behind.

Its owner removes it at the end. Where the owner is killed, a small shell does, which waits for
nothing but the owner's end; and where that one was killed as well (a batch system ends every
process of a job), the next run on the machine does: whose lock is free has no owner any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from recipes import file_lock
from recipes.config import UserError
from recipes.processes import OUTLIVES_VARIABLE

PREFIX = "fleet-recipes-"
_LOCK = "owner.lock"
_ROOM_BYTES = 4 << 20
# Until standard input ends, which is when nobody holds its other end. Who was killed with the owner
# may still be writing.
_JANITOR = 'read -r _; for n in 1 2 3 4 5; do rm -rf -- "$1" && exit; sleep 1; done'


class Scratch:
    """A context that makes the folder and removes it.

    Raises:
        UserError: there is no room.

    Attributes:
        path: of the folder, which other processes may use too.
    """

    def __enter__(self) -> Self:
        remove_left_behind()
        _check_room(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        file_lock.taken(self._lock, str(self.path))
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, OUTLIVES_VARIABLE: "1"},
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()


def _check_room(folder: Path) -> None:
    """See that there is room for the output and the reports of processes, which could not say that
    there is none.

    Raises:
        UserError: there is not.
    """
    found = shutil.disk_usage(folder)
    if found.total and found.free < _ROOM_BYTES:
        raise UserError(
            f"{folder}, the folder for temporary files, has {found.free >> 10} KiB left",
            f"make room for {_ROOM_BYTES >> 20} MiB, or name another folder in TMPDIR",
        )


def remove_left_behind() -> None:
    """Remove the folders of this user whose owners are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or made this very moment: no lock yet
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
