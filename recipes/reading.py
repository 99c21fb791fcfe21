"""Small files of a run folder, read as a stranger's: where they are files, and within bounds."""

from __future__ import annotations

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


def bytes_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """A regular file's content.

    Raises:
        UserError: it cannot be read, is no file (a folder, a FIFO), or has more than `most` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{path}: cannot be read: it is no file", f"remove {path}")
            content = stream.read(most + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", RESTORE) from None
    if len(content) > most:
        raise UserError(f"{path}: more than {most} bytes, which none has that is written", RESTORE)
    return content


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
