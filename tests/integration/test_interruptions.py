"""A training that is interrupted or killed, and goes on exactly where it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import SMALL
from running import Finished, launch, started, timeless
from test_launches import check_checkpoint

pytestmark = pytest.mark.launch

# Without sync-BN each rank has running statistics of its own, which have to come back as well.
PLAIN = (
    *(*SMALL, "topology=1x2", "sync_bn=false", "global_batch_size=180", "epochs=3"),
    *("save.every_steps=3", "save.keep=2"),
)
STEPS = 24  # eight an epoch


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = launch(tmp_path_factory.mktemp("straight") / "run", *PLAIN)
    assert run.status == 0, run.said
    return run


def events(run: Finished) -> list[dict[str, Any]]:
    """All events in the order of their steps, without times."""
    both = [*run.events("train"), *run.events("eval")]
    return sorted(map(timeless, both), key=lambda event: (event["step"], event["event"]))


def test_a_signal_saves_the_step_it_came_in(straight: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, *PLAIN) as running:
        running.wait_for_step(10)
        running.process.send_signal(signal.SIGTERM)
        run = running.finish(20.0)
        running.wait_for_nobody(1.0)
    assert run.status == 128 + signal.SIGTERM
    assert run.errors == ""
    assert run.result["status"] == "interrupted"
    stopped = max(event["step"] for event in run.events("train"))
    assert 10 < stopped < STEPS
    assert run.result["final"]["step"] == 8
    last = folder / "checkpoints" / "last"
    check_checkpoint(last)
    assert last.resolve().name == f"step-{stopped:08d}"
    again = launch(folder, *PLAIN, "resume=auto")
    assert f"continuing after step {stopped} " in again.output
    assert events(again) == events(straight)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    straight: Finished, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with started(folder, *PLAIN) as running:
        running.wait_for_step(14)
        running.process.kill()
        running.finish(20.0)
        running.wait_for_nobody(20.0)
    again = launch(folder, *PLAIN, "resume=auto")
    assert again.status == 0, again.said
    assert "continuing after step 12 " in again.output
    assert events(again) == events(straight)
    steps = [event["step"] for event in again.events("train")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_training_survives_chaos(tmp_path: Path) -> None:
    """`make chaos` does the same with ten kills."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--kills", "2", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal" in ended.stdout
    assert "NOT EQUAL" not in ended.stdout
