"""A run outlives its console: a reader that goes away, a terminal that is closed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from running import DEADLINE, ROOT
from test_endings import ENDLESS, PATIENCE
from test_launches import check_checkpoint

pytestmark = pytest.mark.launch


def command(folder: Path, *settings: str) -> list[str]:
    return [sys.executable, "train.py", *ENDLESS, *settings, f"hydra.run.dir={folder}"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path, devices: int) -> None:
    folder = tmp_path / "run"
    piped = ["bash", "-c", '"$@" 2>&1 | head -1; exit ${PIPESTATUS[0]}', "bash"]
    ended = subprocess.run(
        [*piped, *command(folder, f"topology.devices={devices}", "max_steps=3")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert json.loads((folder / "result.json").read_text())["status"] == "completed"


def be_led_by_terminal() -> None:
    """In a new process: make its standard input the terminal that it hears of hang-ups from."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_terminal_that_is_closed_asks_the_run_to_end(tmp_path: Path, devices: int) -> None:
    folder = tmp_path / "run"
    leader, terminal = os.openpty()
    running = subprocess.Popen(
        command(folder, f"topology.devices={devices}", "save.every_epochs=1000"),
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=be_led_by_terminal,
    )
    os.close(terminal)
    os.set_blocking(leader, False)
    metrics = folder / "metrics.jsonl"
    try:
        ends = time.monotonic() + DEADLINE
        while not metrics.exists() or '"step": 3,' not in metrics.read_text():
            assert time.monotonic() < ends
            assert running.poll() is None
            with contextlib.suppress(BlockingIOError):
                os.read(leader, 1 << 16)
            time.sleep(0.05)
        os.close(leader)
        status = running.wait(PATIENCE)
    finally:
        running.kill()
        running.wait()
    assert status == 128 + signal.SIGHUP
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    check_checkpoint(folder / "checkpoints" / "last")
