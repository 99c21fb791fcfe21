"""The control groups of this process, versions 1 and 2, and those that they lie in (cgroups(7))."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from recipes.mountinfo import mounts

PROCESS = Path("/proc/self")


class Group(NamedTuple):
    """A control group: its folder, and the version of its hierarchy."""

    version: int
    folder: Path


def groups(controller: str, process: Path = PROCESS) -> Iterator[Group]:
    """Those whose limits hold for this process, as far as they can be seen from here.

    Args:
        controller: such as ``cpu``.
        process: the folder that proc(5) has of it.
    """
    own = dict(_memberships(controller, process))
    for mount in mounts(process / "mountinfo"):
        version = {"cgroup2": 2, "cgroup": 1}.get(mount.kind)
        if version is None or version not in own:
            continue
        if version == 2 or controller in mount.super_options:
            for folder in _folders(mount.point, PurePosixPath(mount.root), own[version]):
                yield Group(version, folder)


def lines(path: Path) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _memberships(controller: str, process: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """The process's group in each version's hierarchy that may have the controller."""
    for line in lines(process / "cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield 2, PurePosixPath(path)
        elif controller in controllers.split(","):
            yield 1, PurePosixPath(path)


def _folders(point: Path, root: PurePosixPath, own: PurePosixPath) -> Iterator[Path]:
    """A group's folder, and all above it up to the mount point.

    Args:
        root: the group that is at the mount point.
        own: the process's.
    """
    # A container may be shown its own group as the root, and yet its name as the host has it.
    group = point / own.relative_to(root) if own.is_relative_to(root) else point
    yield group
    while group != point:
        group = group.parent
        yield group
