"""How many cores this process may compute on: what it is allowed to run on, and for how long.

A container's quota (``docker run --cpus``, a Kubernetes limit) leaves it all cores and stops it for
a part of the time: threads beyond the quota only take turns. Cores are counted here and nowhere
else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from recipes.mountinfo import mounts
from recipes.topology import threads_per_rank

_PROCESS = Path("/proc/self")


def usable_cores(process: Path = _PROCESS) -> int:
    """The cores of this process's affinity, or fewer where a quota of its control groups says so.

    A quota of half a core, or of two and a half, is rounded up.

    Args:
        process: the folder that proc(5) has of it.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(process)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cores_of_rank(ranks: int, *, split: bool) -> int:
    """The share of one of a node's ranks; at least one.

    Args:
        ranks: on the node.
        split: this process may run on its rank's cores alone, see `recipes.affinity`.
    """
    if not split:
        return threads_per_rank(usable_cores(), ranks)
    own, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return own if quota is None else min(own, threads_per_rank(math.ceil(quota), ranks))


def cpu_quota(process: Path = _PROCESS) -> float | None:
    """The smallest quota of this process's control groups and those that they lie in, in cores.

    Returns:
        None where there is none, or none that can be seen from here.
    """
    quotas = [
        quota
        for mount in _mounts(process)
        for folder in mount.folders()
        if (quota := _quota(folder, mount.version)) is not None
    ]
    return min(quotas, default=None)


class _Mount(NamedTuple):
    """Where a hierarchy of control groups can be seen."""

    version: int
    point: Path
    root: PurePosixPath  # the group that is at the mount point
    group: PurePosixPath  # this process's

    def folders(self) -> Iterator[Path]:
        """The process's own group, and all above it up to the mount point."""
        inside = self.group.is_relative_to(self.root)
        # A container may be shown its own group as the root, and yet its name as the host has it.
        group = self.point / self.group.relative_to(self.root) if inside else self.point
        yield group
        while group != self.point:
            group = group.parent
            yield group


def _mounts(process: Path) -> Iterator[_Mount]:
    groups = dict(_groups(process))
    for mount in mounts(process / "mountinfo"):
        version = {"cgroup2": 2, "cgroup": 1}.get(mount.kind)
        if version == 1 and "cpu" not in mount.super_options:
            continue
        if version is not None and version in groups:
            yield _Mount(version, mount.point, PurePosixPath(mount.root), groups[version])


def _groups(process: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """The process's group in each version's hierarchy that may limit cores (cgroups(7))."""
    for line in _lines(process / "cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield 2, PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            yield 1, PurePosixPath(path)


def _quota(folder: Path, version: int) -> float | None:
    """A group's own quota; a period of 100 ms in which it may run for 50 ms is half a core."""
    if version == 2:
        words = " ".join(_lines(folder / "cpu.max")).split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in _lines(folder / name)]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
