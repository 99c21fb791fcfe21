"""The programs of `make bench`: what they make of what they measure, and each once, briefly."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checkpoint_stall, loop_cost, memory, start_time
from recipes.config import UserError
from recipes.pulse import Phase, read_mark

# --- checkpoint_stall


@settings(max_examples=100, deadline=None)
@given(
    every=st.integers(2, 7),
    saves=st.integers(1, 4),
    usual=st.floats(0.1, 5),
    copied=st.floats(0, 2),
    slowed=st.floats(0, 2),
    data=st.data(),
)
def test_what_a_checkpoint_costs_is_found(
    every: int, saves: int, usual: float, copied: float, slowed: float, data: st.DataObject
) -> None:
    """Steps that all take as long, but for a copy before one and a writer beside the next."""
    tail = data.draw(st.integers(1, every - 1))
    total = every * (saves + 1) + 1
    ends, now = [], 0.0
    for step in range(1, total + 1):
        now += usual
        after = (step - 1) % every  # steps since the last checkpoint
        if step > every and after == 0:
            now += copied
        if step > every and after == every - tail - 1:  # the last that the writer may disturb
            now += slowed
        ends.append(now)
    durations = [after - before for before, after in pairwise(ends)]
    lost, undisturbed = checkpoint_stall.stalls(durations, every, tail)
    assert undisturbed == pytest.approx([usual] * len(undisturbed))
    assert lost == pytest.approx([copied + slowed] * saves, abs=1e-6)


def test_the_stall_program_saves_as_often_as_it_says() -> None:
    given = dict(each.split("=", 1) for each in checkpoint_stall.OVERRIDES)
    steps, every = int(given["max_steps"]), int(given["save.every_steps"])
    assert every == checkpoint_stall.EVERY > checkpoint_stall.TAIL
    durations = [1.0] * (steps - 1)
    lost, _ = checkpoint_stall.stalls(durations, every, checkpoint_stall.TAIL)
    assert len(lost) == checkpoint_stall.SAVES


@pytest.mark.launch
def test_the_stall_of_a_small_model() -> None:
    row = checkpoint_stall.measure(
        ["model=paddleclas", "model.name=MobileNetV1_x0_25", "dataset.image_size=32"]
    )
    assert len(row.ours) == checkpoint_stall.SAVES
    assert median(row.peer) > 0
    assert row.note.startswith(("1 MiB", "2 MiB", "3 MiB", "4 MiB"))


# --- memory


@pytest.mark.launch
def test_memory_is_looked_at_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FIRST", 20)
    monkeypatch.setattr(memory, "WINDOW", 20)
    row = memory.measure(60, ["log.every=5"])
    assert 100 < row.peer[0] < 4000
    assert row.ratio == pytest.approx(1, abs=0.2)


def test_a_training_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)the training failed.*epochs=0 must be"):
        memory.watch(10, ["epochs=0"], tmp_path)


# --- start_time


def test_the_wait_ends_with_the_text_and_leaves_no_process(tmp_path: Path) -> None:
    said = tmp_path / "said"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(0.3)\n"
        f"pathlib.Path({str(said)!r}).write_text('before step 1 loss 2.3')\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    seconds = start_time.seconds_until(command, said, start_time.SAID, tmp_path)
    assert 0.3 <= seconds < 20
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a child outlived the wait"
        time.sleep(0.05)


def test_a_start_that_fails_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    with pytest.raises(UserError, match=r"(?s)no first step within .*no luck"):
        start_time.seconds_until(command, tmp_path / "never", "x", tmp_path)


def test_both_starts_train_alike() -> None:
    """The bare script's choices are those of the recipe."""
    from hydra import compose, initialize_config_dir

    from recipes import config

    config.register_schema()
    root = Path(__file__).resolve().parents[2]
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        made = config.from_hydra(compose("config", overrides=list(start_time.OURS[1:])))
    script = (root / "benchmarks" / "bare_start.py").read_text()
    assert made.global_batch_size == start_time.GLOBAL_BATCH
    assert (made.model.name, made.dataset.name, made.optimizer.name) == (
        *("ResNet18", "digits", "momentum"),
    )
    assert f"weight_decay={made.optimizer.weight_decay:g}".replace("0.0001", "1e-4") in script
    assert "Momentum(" in script
    assert made.log.every == 1


# --- loop_cost


class Bare:
    """Takes as long as it is told."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.turns: list[int] = []

    def run(self, steps: int) -> None:
        self.turns.append(steps)
        time.sleep(self.seconds)


def test_turns_are_timed_each_for_itself(tmp_path: Path) -> None:
    bare: Any = Bare(0.02)
    turns = loop_cost.Turns(bare, tmp_path / "pulse")
    turns.mark(Phase.READING, 0)
    for step in range(3 * loop_cost.TURN + 1):
        turns.mark(Phase.STEPPING, step)
        if step % loop_cost.TURN == 5:
            time.sleep(0.05)
        turns.mark(Phase.READING, step + 1)
    turns.mark(Phase.SAVING)
    assert bare.turns == [loop_cost.TURN] * 3
    assert len(turns.ours) == len(turns.bare) == 3
    assert all(0.05 <= seconds < 0.069 for seconds in turns.ours)  # without the bare loop's
    assert all(0.02 <= seconds < 0.049 for seconds in turns.bare)
    mark = read_mark(tmp_path / "pulse")
    assert mark is not None
    assert mark.phase is Phase.SAVING
    assert not turns.asks_to_stop(1)


@pytest.mark.launch
def test_the_loops_take_turns() -> None:
    row = loop_cost.measure(2, [*loop_cost.MODEL[:2], "batch_size=2", "threads=1"])
    assert len(row.ours) == len(row.peer) == 2
    assert 0.3 < row.ratio < 3


def test_a_loop_that_fails_is_told() -> None:
    with pytest.raises(UserError, match=r"benchmarks\.loop_cost failed: .*batch_size=0"):
        loop_cost.measure(1, ["batch_size=0"])
