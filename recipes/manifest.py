"""The files of one checkpoint, and the manifest that says what they have to be.

Two things can be wrong with a checkpoint. Either it is damaged: bytes are missing or others than
were written. Or it cannot be read here, and may be intact: it is of another version, of another
user, or on a disk that does not answer. Nobody may take the second for the first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from recipes.config import UserError
from recipes.printable import printable

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (MODEL, OPTIMIZER, STATE)
RANKS = "ranks.safetensors"  # only where ranks differ

_LONGEST_MANIFEST = 1 << 20  # bytes
_LONGEST_STATE = 1 << 24
_CHUNK = 1 << 20


class Damaged(UserError):
    """A checkpoint whose bytes are missing, or others than were written."""


class Unreadable(UserError):
    """A checkpoint that cannot be read here and now, and may be intact."""


def manifest_of(files: Mapping[str, bytes], sequence: int) -> bytes:
    """The manifest of a checkpoint as written: it also holds a checksum of its own content.

    Args:
        files: name to content.
        sequence: the checkpoint's place in the order of writing.
    """
    content = {
        "format": FORMAT,
        "sequence": sequence,
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        },
    }
    return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def sequence_of(path: Path) -> int:
    """The place of the checkpoint at `path` in the order of writing, from its manifest alone.

    Raises:
        Damaged, Unreadable: the manifest is not as it must be.
    """
    return int(_read_manifest(path)["sequence"])


def verify(path: Path) -> None:
    """Compare every byte of a checkpoint with its manifest; this takes no memory to speak of.

    Raises:
        Damaged, Unreadable: naming the file and what differs.
    """
    for name, recorded in _recorded(path).items():
        with _opened(path, name) as stream:
            _check_size(path, name, stream, recorded["size"])
            digest = hashlib.sha256()
            with _reading(path, name):
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
        _check_digest(path, name, digest.hexdigest(), recorded["sha256"])


def read_verified(path: Path) -> dict[str, bytes]:
    """The content of a checkpoint's files, by name.

    Raises:
        Damaged, Unreadable: naming the file and what differs.
    """
    recorded = _recorded(path)
    _check_memory(path, sum(each["size"] for each in recorded.values()))
    if recorded[STATE]["size"] > _LONGEST_STATE:
        raise not_understood(path, STATE, f"it is larger than {_LONGEST_STATE} bytes")
    files = {}
    for name, each in recorded.items():
        with _opened(path, name) as stream:
            _check_size(path, name, stream, each["size"])
            with _reading(path, name):
                files[name] = stream.read(each["size"])
        _check_size(path, name, files[name], each["size"])
        _check_digest(path, name, hashlib.sha256(files[name]).hexdigest(), each["sha256"])
    return files


def can_be_read(path: Path) -> bool:
    """Whether this version understands a checkpoint's manifest, and may open its files."""
    try:
        for name in _recorded(path):
            with _opened(path, name):
                pass
    except UserError:
        return False
    return True


def not_understood(path: Path, name: str, difference: str) -> Unreadable:
    """The error for a file whose checksum is right and whose content is not of this version."""
    return Unreadable(
        f"checkpoint {path}: {name}: not as this version writes it: {difference}",
        f"continue it with the version of the recipes that wrote it; {another(path)}",
    )


def another(path: Path) -> str:
    """What a person can do who cannot use the checkpoint at `path`."""
    return (
        "resume=FOLDER/step-… hydra.run.dir=NEW goes on from another checkpoint, and moving "
        f"{path} away lets resume=auto do so"
    )


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _recorded(path: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of each file."""
    recorded = _read_manifest(path)["files"]
    return {name: recorded[name] for name in (*FILES, RANKS) if name in recorded}


def _read_manifest(path: Path) -> dict[str, Any]:
    with _opened(path, MANIFEST) as stream, _reading(path, MANIFEST):
        data = stream.read(_LONGEST_MANIFEST)
    try:
        content = json.loads(data)
        version = content["format"]
        own = content.pop("sha256")
        intact = data == _canonical({**content, "sha256": own})
        intact = intact and own == hashlib.sha256(_canonical(content)).hexdigest()
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        version, intact = FORMAT, False
    if version != FORMAT:
        raise _of_another_format(path, version, intact)
    if not intact:
        raise _damaged(path, MANIFEST, "it was altered or cut short (its own checksum differs)")
    if difference := _unexpected(content):
        raise not_understood(path, MANIFEST, difference)
    return dict(content)


def _of_another_format(path: Path, version: object, intact: bool) -> Unreadable:
    """Other formats may sum themselves up otherwise, so that this one cannot check their sum."""
    doubt = "" if intact else ", or it was altered (its own checksum differs)"
    return Unreadable(
        f"checkpoint {path}: {MANIFEST}: format {printable(repr(version))}, this version reads "
        f"format {FORMAT}{doubt}",
        f"use the version of the recipes that wrote it; {another(path)}",
    )


def _unexpected(content: Mapping[str, Any]) -> str | None:
    """What a manifest with a right checksum lacks."""
    if not _is_count(content.get("sequence")):
        return "sequence is not a number"
    files = content.get("files")
    if not isinstance(files, dict):
        return "files is missing"
    for name in (*FILES, RANKS):
        recorded = files.get(name)
        if recorded is None and (name == RANKS and name not in files):
            continue
        if not isinstance(recorded, dict):
            return f"files.{name} is missing"
        if not _is_count(recorded.get("size")) or not isinstance(recorded.get("sha256"), str):
            return f"files.{name} lacks its size or its sha256"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


@contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    """A file of a checkpoint, opened without following a link out of it or waiting for a pipe."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path / name, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, name, "it is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_understood(path, name, "it is a link") from None
        raise _cannot_be_read(path, name, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_understood(path, name, "it is no regular file")
    with open(descriptor, "rb") as stream:  # noqa: PTH123 (a descriptor)
        yield stream


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_be_read(path, name, error) from error


def _check_size(path: Path, name: str, held: IO[bytes] | bytes, size: int) -> None:
    found = len(held) if isinstance(held, bytes) else os.fstat(held.fileno()).st_size
    if found != size:
        raise _damaged(path, name, f"it has {found} bytes, the manifest says {size}")


def _check_digest(path: Path, name: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise _damaged(path, name, "its content was altered (SHA-256 differs)")


def _check_memory(path: Path, size: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise Unreadable(
            f"checkpoint {path}: its files have {size} bytes, this machine's memory {memory}",
            f"continue it on a larger machine; {another(path)}",
        )


def _damaged(path: Path, name: str, difference: str) -> Damaged:
    return Damaged(f"checkpoint {path}: {name}: {difference}")


def _cannot_be_read(path: Path, name: str, error: OSError) -> Unreadable:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Unreadable(
            f"checkpoint {path}: {name}: uid {os.geteuid()} may not read it",
            f"give it to this user (as its owner or root: chown -R {os.geteuid()} {path}), or "
            "run as its owner",
        )
    return Unreadable(
        f"checkpoint {path}: {name}: it cannot be read: {error.strerror or error}",
        f"try again once the disk answers; {another(path)}",
    )
