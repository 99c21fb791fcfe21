"""What is mounted where, as the system tells it (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CODE = re.compile(r"\\([0-7]{3})")  # of a space and the like in a path


class Mount(NamedTuple):
    """One line.

    Attributes:
        root: the folder of the file system that is mounted.
        kind: of the file system, such as ``ext4``.
        super_options: of the file system.
    """

    point: Path
    root: str
    kind: str
    read_only: bool
    super_options: list[str]


def mounts(file: Path) -> Iterator[Mount]:
    """All mounts, the later of two on one point being the one that is seen; none where the file
    cannot be read."""
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        place, separator, kind = line.partition(" - ")
        fields, rest = place.split(" "), kind.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        root, point = (_CODE.sub(lambda code: chr(int(code[1], 8)), each) for each in fields[3:5])
        yield Mount(Path(point), root, rest[0], "ro" in fields[5].split(","), rest[2].split(","))
