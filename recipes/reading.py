"""Small files of a run folder, read as a stranger's: where they are files, and within bounds."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from recipes.config import UserError
from recipes.printable import printable

MOST_BYTES = 4 * 2**20  # of one document
MOST_YAML_BYTES = 2**18
RESTORE = "restore the file, or remove it"


def bytes_of(path: Path, most: int = MOST_BYTES, *, links: bool = False) -> bytes:
    """A regular file's content.

    Args:
        links: are followed: those in a dataset's folder are of who put the data there.

    Raises:
        UserError: it cannot be read, is no file (a folder, a FIFO; a link, which may lead
            anywhere, where they are not followed), or has more than `most` bytes.
    """
    try:
        opened = follow_links if links else no_link
        descriptor = opened(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise UserError(f"{path}: cannot be read: it is no file", f"remove {path}")
        with os.fdopen(descriptor, "rb") as stream:
            content = stream.read(min(status.st_size, most) + 1)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UserError(f"{path}: cannot be read: {why}", RESTORE) from None
    if len(content) > most:
        raise UserError(f"{path}: more than {most} bytes, which none has that is written", RESTORE)
    return content


def follow_links(path: Path, flags: int) -> int:
    """Open a file, or what a link leads to; its descriptor."""
    return os.open(path, flags | os.O_CLOEXEC)


def no_link(path: Path, flags: int) -> int:
    """Open a file that is not a symbolic link; its descriptor.

    Raises:
        OSError: ELOOP where it is one.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def json_of(path: Path) -> Any:
    """A JSON document.

    Raises:
        UserError: as `bytes_of`, or it is none.
    """
    try:
        return json.loads(bytes_of(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file: {printable(error, 200)}", RESTORE) from None


def yaml_of(path: Path) -> Any:
    """A YAML document without references, which a short one could grow by without bound.

    Raises:
        UserError: as `bytes_of`, or it is none.
    """
    content = bytes_of(path, MOST_YAML_BYTES)
    loader = yaml.CSafeLoader  # bounds how deep a document goes, and is not slow
    try:
        if any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(content, loader)):
            raise UserError(f"{path}: refers to parts of itself, which none that is written does")
        return yaml.load(content, loader)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: not a YAML file: {printable(error, 200)}", RESTORE) from None
