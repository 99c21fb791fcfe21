"""Cores are counted by affinity and by the quota of control groups."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes import cores

ROOT = Path(__file__).parent.parent


def tree(folder: Path, group: str, version: int, root: str = "/") -> Path:
    """A process's folder and an empty hierarchy of control groups beside it: `folder`/sys."""
    process, point = folder / "proc", folder / "s y s"
    process.mkdir()
    point.mkdir()
    escaped = str(point).replace(" ", "\\040")
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,cpuacct")
    (process / "mountinfo").write_text(
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        f"32 31 0:29 {root} {escaped} rw,relatime shared:9 - {kind} cgroup {options}\n"
    )
    name = "0:" if version == 2 else "4:cpu,cpuacct"
    (process / "cgroup").write_text(f"9:memory:/elsewhere\n{name}:{group}\n")
    return process


def limit(folder: Path, version: int, quota: int | None, period: int = 100_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "expected"),
    [(50_000, 1), (100_000, 1), (100_001, 2), (250_000, 3), (10**9, 6), (None, 6)],
)
def test_a_quota_counts_rounded_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    quota: int | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    process = tree(tmp_path, "/a/b", version)
    limit(tmp_path / "s y s" / "a" / "b", version, quota)
    assert cores.usable_cores(process) == expected


@settings(suppress_health_check=list(HealthCheck), max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2]),
    st.lists(st.none() | st.integers(1_000, 10**7), min_size=1, max_size=4),
)
def test_the_smallest_quota_of_nested_groups_counts(
    tmp_path_factory: pytest.TempPathFactory, version: int, quotas: list[int | None]
) -> None:
    folder = tmp_path_factory.mktemp("groups")
    names = [f"g{number}" for number in range(len(quotas))]
    process = tree(folder, "/" + "/".join(names), version)
    for depth, quota in enumerate(quotas, 1):
        limit(folder.joinpath("s y s", *names[:depth]), version, quota)
    known = [quota / 100_000 for quota in quotas if quota is not None]
    assert cores.cpu_quota(process) == (min(known) if known else None)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("root", ["/docker/abc", "/"])
def test_a_container_that_sees_its_group_as_the_root(
    tmp_path: Path, version: int, root: str
) -> None:
    # The name is the host's, while the mount begins at the container's own group.
    process = tree(tmp_path, "/docker/abc", version, root)
    limit(tmp_path / "s y s", version, 150_000)
    assert cores.cpu_quota(process) == 1.5


@pytest.mark.parametrize("content", ["", "max\n", "50000\n", "x 100000\n", "0 0\n", "1 2 3\n"])
def test_what_is_no_quota_limits_nothing(tmp_path: Path, content: str) -> None:
    process = tree(tmp_path, "/", 2)
    (tmp_path / "s y s" / "cpu.max").write_text(content)
    assert cores.cpu_quota(process) is None
    assert cores.cpu_quota(tmp_path / "no process") is None


def test_ranks_share_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda *_: None)
    assert [cores.cores_of_rank(ranks, split=False) for ranks in (1, 2, 4, 99)] == [8, 4, 2, 1]
    assert cores.cores_of_rank(4, split=True) == 8  # what it may run on is its own already
    monkeypatch.setattr(cores, "cpu_quota", lambda *_: 3.5)
    assert [cores.cores_of_rank(ranks, split=False) for ranks in (1, 2, 4)] == [4, 2, 1]
    assert [cores.cores_of_rank(ranks, split=True) for ranks in (1, 2, 4)] == [4, 2, 1]


def test_cores_are_counted_in_one_place() -> None:
    """A count of its own would forget the quota."""
    counts = re.compile(r"len\((?:sorted\()?os\.sched_getaffinity|cpu_count\(\)|\$\(nproc")
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("recipes", "benchmarks", "docker")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh") and path.name != "cores.py"
        for line in path.read_text().splitlines()
        if counts.search(line)
    }
    assert {entry.partition(":")[0] for entry in found} <= {
        "recipes/affinity.py",  # the width of NVML's mask
        "recipes/telemetry.py",  # the machine's cores, beside the usable ones
    }
