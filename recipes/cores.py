"""How many cores this process may compute on: what it is allowed to run on, and for how long.

A container's quota (``docker run --cpus``, a Kubernetes limit) leaves it all cores and stops it for
a part of the time: threads beyond the quota only take turns. Cores are counted here and nowhere
else.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from recipes.control_groups import PROCESS, groups, lines
from recipes.topology import threads_per_rank


def usable_cores(process: Path = PROCESS) -> int:
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


def cpu_quota(process: Path = PROCESS) -> float | None:
    """The smallest quota of this process's control groups and those that they lie in, in cores.

    Returns:
        None where there is none, or none that can be seen from here.
    """
    quotas = [
        quota
        for group in groups("cpu", process)
        if (quota := _quota(group.folder, group.version)) is not None
    ]
    return min(quotas, default=None)


def _quota(folder: Path, version: int) -> float | None:
    """A group's own quota; a period of 100 ms in which it may run for 50 ms is half a core."""
    if version == 2:
        words = " ".join(lines(folder / "cpu.max")).split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in lines(folder / name)]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None
