"""Whose a run folder is: one run's at a time, on this machine and on others that share the folder.

The claim is a record lock (fcntl(2)) on the file ``.claim``. The kernel, or the NFS server, drops
it when the process that holds it is gone, however that ended; so what a killed run leaves behind is
a file, and no lock. Two bytes are locked apart:

- the run's byte, by its parent on node 0, or by rank 0 under the bare launcher;
- the ranks' byte, shared by all ranks, those of other nodes too. They may outlive a parent that was
  killed, and write until they notice: a new run waits for them, or is refused.

Such locks belong to a process, and are neither inherited by those it forks (decoders do not write
here) nor kept once it closes any descriptor of the file: nothing else may open ``.claim`` in it.

On a file system without locks a heartbeat stands in: ``.claim.beat`` is written anew every few
seconds, and a claim is given up once its beat stands still.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from recipes.config import UserError
from recipes.file_lock import NO_LOCKS
from recipes.printable import printable
from recipes.writable import cannot_write

FILE = ".claim"
BEAT = ".claim.beat"
RANKS_SECONDS = 30.0  # in which the ranks of a parent that is gone have noticed, and ended
BEAT_SECONDS = 5.0
STILL_SECONDS = 4 * BEAT_SECONDS  # a beat that stands still for so long is nobody's
_RUN, _RANKS = 0, 1  # the bytes
_MOST_BYTES = 4096  # of what is read of a claim
_LOOK_SECONDS = 0.1
_TRIES = 50  # to open a file that others remove, or to read one that is just being written
_HELD = (errno.EACCES, errno.EAGAIN)
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid

_log = logging.getLogger(__name__)


class Claimed(UserError):
    """The folder is another run's."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder; `since` is local time as ISO 8601."""

    host: str
    pid: int
    since: str

    @classmethod
    def this(cls) -> Holder:
        """This process, from now on."""
        return cls(socket.gethostname(), os.getpid(), datetime.now().isoformat(timespec="seconds"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since.replace('T', ' ')}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for a run, which is made if need be; an empty one is left without the claim.

    Raises:
        Claimed: another run holds it, or ranks of one that was killed still do.
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock_new(folder / FILE)
    except OSError as error:
        if error.errno not in NO_LOCKS or not folder.is_dir():
            raise cannot_write(folder, error) from error
        with _heartbeat(folder):
            yield
        return
    try:
        _wait_for_ranks(folder, descriptor)
        _write(descriptor, json.dumps(asdict(Holder.this())))
    except OSError as error:
        _give_up(folder, descriptor)
        raise cannot_write(folder / FILE, error) from error
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield
    finally:
        _give_up(folder, descriptor)


@contextlib.contextmanager
def shared_by_rank(folder: Path) -> Iterator[None]:
    """Count as one of the ranks of the run that holds a folder.

    Where that cannot be told (no locks, no such folder on this node), nothing is.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _RANKS)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def holder_of(folder: Path) -> Holder | None:
    """Who holds a folder now; None where nobody does. Not for the process that holds it."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return _beating(folder)
    try:
        if _is_locked(descriptor, _RUN) or _is_locked(descriptor, _RANKS):
            return _read_holder(descriptor)
    except OSError:
        pass  # no locks here
    finally:
        os.close(descriptor)
    return _beating(folder)


def _is_locked(descriptor: int, byte: int) -> bool:
    """Whether another process holds a byte, without taking it (fcntl(2), F_GETLK).

    Raises:
        OSError: the file system has no locks.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    found = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return bool(found[0] != fcntl.F_UNLCK)


def _lock_new(path: Path) -> int:
    """Open and lock the run's byte of the file that has this name, once the lock is held.

    Raises:
        Claimed: another process holds it.
        OSError: the file cannot be opened, or has no locks.
    """
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _RUN)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except OSError as error:
            found = _read_holder(descriptor) if error.errno in _HELD else None
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # a run that ended removed it
                os.close(descriptor)
                raise claimed(path.parent, found) if error.errno in _HELD else error from None
        os.close(descriptor)
    raise OSError(errno.EBUSY, "others make and remove its claim all the time")


def _wait_for_ranks(folder: Path, descriptor: int) -> None:
    """Return once no rank of an earlier run is left.

    Raises:
        Claimed: some do not end.
    """
    ends = time.monotonic() + RANKS_SECONDS
    while _is_locked(descriptor, _RANKS):
        if time.monotonic() > ends:
            raise Claimed(
                f"{folder} is in use: ranks of a run whose parent was killed still write there "
                f"(the parent was {_read_holder(descriptor)})",
                "end them (on each of that run's machines: ps aux | grep train.py), or choose "
                "another hydra.run.dir",
            )
        time.sleep(_LOOK_SECONDS)


def _give_up(folder: Path, descriptor: int) -> None:
    """End a claim; the file stays where there is a run beside it.

    Over NFS, one who has just opened a removed file could not tell that it has no name any more.
    """
    with contextlib.suppress(OSError):
        if _read(descriptor):
            os.ftruncate(descriptor, 0)
        _remove_alone(folder)
    os.close(descriptor)


def _remove_alone(folder: Path) -> None:
    if [each.name for each in folder.iterdir()] == [FILE]:
        (folder / FILE).unlink()


@contextlib.contextmanager
def _heartbeat(folder: Path) -> Iterator[None]:
    """Hold a folder by a file that is written anew every few seconds.

    Raises:
        Claimed: another run's is.
        UserError: the folder cannot be written.
    """
    path, own = folder / BEAT, asdict(Holder.this()) | {"token": uuid.uuid4().hex}
    _wait_for_beat(path)
    ended = threading.Event()

    def beat(number: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _write(descriptor, json.dumps(own | {"beat": number}))
        finally:
            os.close(descriptor)

    def go_on() -> None:
        number = 1
        while not ended.wait(BEAT_SECONDS):
            number += 1
            with contextlib.suppress(OSError):  # a disk that is full now may not be later
                beat(number)

    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        beat(1)
    except FileExistsError:
        raise claimed(folder, _beating(folder)) from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    _log.warning(
        "%s is on a file system without locks: a heartbeat keeps other runs out of it, and after a "
        "kill the next run waits %.0f s for it",
        folder,
        STILL_SECONDS,
    )
    thread = threading.Thread(target=go_on, name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()
            _remove_alone(folder)


def _wait_for_beat(path: Path) -> None:
    """Return once nobody's beat is there; what stands still is removed.

    Raises:
        Claimed: it goes on.
    """
    before = _read_path(path)
    if before is None:
        return
    ends = time.monotonic() + STILL_SECONDS
    while time.monotonic() < ends:
        time.sleep(_LOOK_SECONDS)
        now = _read_path(path)
        if now is None:
            return
        if now and now != before:
            raise claimed(path.parent, _parse(now))
    path.unlink(missing_ok=True)


def _beating(folder: Path) -> Holder | None:
    """Whose beat is in a folder, be it going on or not."""
    found = _read_path(folder / BEAT)
    return None if found is None else _parse(found)


def _read_path(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _MOST_BYTES, 0)


def _write(descriptor: int, text: str) -> None:
    data = text.encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _read_holder(descriptor: int) -> Holder:
    """Whom the file names; it may be locked already and not written yet."""
    for _ in range(_TRIES):
        found = _read(descriptor)
        if found:
            break
        time.sleep(_LOOK_SECONDS / _TRIES)
    return _parse(found)


def _parse(content: bytes) -> Holder:
    try:
        told = json.loads(content)
        return Holder(printable(told["host"]), int(told["pid"]), printable(told["since"], 25))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Holder("a host that is not known", 0, "just now")


def claimed(folder: Path, holder: Holder | None) -> Claimed:
    """What the second of two runs is told."""
    return Claimed(
        f"{folder} is in use by another run: {holder}",
        "wait for its end or end it; another hydra.run.dir=… runs beside it",
    )
