"""A rank's marks, its parent's word to stop, and what the system tells of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import pulse
from recipes.pulse import NoPulse, OwnPulse, Phase, SharedPulse


def test_there_is_no_mark_before_the_first(tmp_path: Path) -> None:
    assert pulse.read_mark(tmp_path / "none") is None
    SharedPulse(tmp_path / "made")
    assert pulse.read_mark(tmp_path / "made") is None


@pytest.mark.parametrize("phase", Phase)
def test_a_mark_tells_phase_step_and_age(tmp_path: Path, phase: Phase) -> None:
    path = tmp_path / "pulse-0"
    shared = SharedPulse(path)
    shared.mark(phase)
    found = pulse.read_mark(path)
    assert found is not None
    assert (found.phase, found.step) == (phase, None)
    shared.mark(phase, 17)
    shared.mark(Phase.EVALUATING)  # keeps the step
    time.sleep(0.05)
    found = pulse.read_mark(path)
    assert found is not None
    assert (found.phase, found.step) == (Phase.EVALUATING, 17)
    assert 0.05 <= found.age < 5
    assert phase.words


@given(stop=st.integers(1, 2**40), steps=st.lists(st.integers(0, 2**40), max_size=5))
def test_a_rank_stops_at_the_parents_step(
    tmp_path_factory: pytest.TempPathFactory, stop: int, steps: list[int]
) -> None:
    path = tmp_path_factory.mktemp("pulse") / "pulse-3"
    shared = SharedPulse(path)
    assert not any(shared.asks_to_stop(step) for step in steps)
    pulse.ask_to_stop(path, stop)
    for step in (*steps, stop - 1, stop, stop + 1):
        shared.mark(Phase.STEPPING, step)  # does not take the parent's word away
        assert shared.asks_to_stop(step) == (step >= stop)
    found = pulse.read_mark(path)
    assert found is not None
    assert found.step == stop + 1


def test_the_other_pulses() -> None:
    nobody = NoPulse()
    nobody.mark(Phase.STARTING, 3)
    assert not nobody.asks_to_stop(10**9)
    own = OwnPulse()
    assert not own.asks_to_stop(5)
    own.ask()
    assert own.asks_to_stop(0)


def test_what_the_system_tells_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not pulse.is_stopped(process.pid)
        assert pulse.exit_status(process.pid) is None  # it runs
        process.send_signal(signal.SIGSTOP)
        ends = time.monotonic() + 10
        while not pulse.is_stopped(process.pid) and time.monotonic() < ends:
            time.sleep(0.01)
        assert pulse.is_stopped(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, unasked
        assert pulse.exit_status(process.pid) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    assert pulse.exit_status(process.pid) is None
    assert not pulse.is_stopped(process.pid)


def test_kills_for_lack_of_memory_are_counted_or_unknown() -> None:
    first, second = pulse.oom_kills(), pulse.oom_kills()
    assert first == second or (first is not None and second is not None and second > first)
