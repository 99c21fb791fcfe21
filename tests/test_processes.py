"""Finding and ending the processes of a run."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from recipes import processes

ROOT = Path(__file__).resolve().parents[1]
# A child and a grandchild, both of which ignore every request, the grandchild halted.
FAMILY = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def family(**variables: str) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_descendants_are_found_and_killed_whatever_they_do() -> None:
    child, grandchild = family()
    assert {child.pid, grandchild} <= set(processes.descendants(os.getpid()))
    assert processes.parent_of(grandchild) == child.pid
    processes.kill_all(partial(processes.descendants, child.pid))
    assert not living(grandchild)
    assert living(child.pid)
    child.kill()
    child.wait()


def test_those_of_a_run_are_found_by_what_they_were_started_with() -> None:
    child, grandchild = family(FLEET_RECIPES_OF_A_TEST=f"run {os.getpid()}")
    other, others_child = family(FLEET_RECIPES_OF_A_TEST=f"run {os.getpid()}0")
    child.kill()  # an orphan is found as well
    child.wait()
    find = partial(processes.with_variable, "FLEET_RECIPES_OF_A_TEST", f"run {os.getpid()}")
    assert find() == [grandchild]
    processes.kill_all(find)
    assert not living(grandchild)
    assert living(other.pid)
    for pid in (others_child, other.pid):
        os.kill(pid, signal.SIGKILL)
    other.wait()


def test_who_is_to_outlive_the_run_is_left_alone() -> None:
    spared, _ = family(**{processes.OUTLIVES_VARIABLE: "1"})
    try:
        assert spared.pid not in processes.descendants(os.getpid())
    finally:
        processes.kill_all(partial(processes.descendants, spared.pid))
        spared.kill()
        spared.wait()


def test_a_process_that_is_gone_is_nobody() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert processes.parent_of(child.pid) is None
    assert not processes.has_variable(child.pid, "PATH")
    began = time.monotonic()
    processes.kill_all(lambda: [child.pid])
    assert time.monotonic() - began < 3


def test_the_end_of_a_process_is_seen_by_one_who_has_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with subprocess.Popen(["sleep", "60"]) as long, subprocess.Popen(["true"]) as short:
            low = [os.pidfd_open(long.pid), os.pidfd_open(short.pid)]
            high = [fcntl.fcntl(each, fcntl.F_DUPFD, 2000) for each in low]
            assert processes.that_ended(high, 20) == high[1:]
            assert processes.that_ended(high[:1], 0.01) == []
            long.kill()
            for each in (*low, *high):
                os.close(each)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
