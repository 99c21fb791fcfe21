"""Paths on a mount that does not answer: told with the key, and a signal ends whoever waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dead_mounts import dead_mount
from running import ROOT, started

from recipes import answering
from recipes.config import DeadlinesConfig, UserError

ONE = ("topology=1x1", "device=cpu", "max_steps=1")
IMAGES = ("dataset=imagenet", "model.stem=cifar", "dataset.image_size=32")


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("dataset.path", IMAGES),
        ("dataset.path", (*IMAGES, "task=prepare", "prepare.output=prepared")),
        ("dataset.path", (*IMAGES, "task=preflight")),
        ("prepare.output", (*IMAGES, "task=prepare")),
        ("model.pretrained", ()),
        ("resume", ()),
        ("checkpoint", ("task=evaluate",)),
        ("runs.folder", ("task=runs",)),
    ],
)
def test_a_path_that_does_not_answer_is_told(
    key: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    with dead_mount(tmp_path / "dead") as dead:
        path = dead / "below"
        command = (*ONE, *others, f"{key}={path}", "deadlines.read=0.5")
        with started(tmp_path / "run", *command) as run:
            ended = run.finish(30)
    assert ended.status == 2, ended.said
    assert f"error: {key}={path} does not answer: a look at it has not come back" in ended.said
    assert "remedy: " in ended.said


def test_a_run_folder_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlinesConfig, "read", 0.5)
    with (
        dead_mount(tmp_path / "dead") as dead,
        pytest.raises(UserError, match=rf"hydra\.run\.dir={dead}/run does not answer"),
    ):
        answering.require_run_folder(["seed=1", f"hydra.run.dir={dead}/run"])


HELD = """
import os, sys
from recipes.ending import Watch
Watch().start()
print("about to look", flush=True)
os.stat(sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_what_waits_for_a_mount(number: signal.Signals, tmp_path: Path) -> None:
    """The system keeps the signal for the main thread, which does not come back to take it."""
    with dead_mount(tmp_path / "dead") as dead:
        held = subprocess.Popen(
            [sys.executable, "-c", HELD, str(dead)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert held.stdout is not None
        held.stdout.readline()
        time.sleep(0.3)
        held.send_signal(number)
        said, _ = held.communicate(timeout=10)
    assert held.returncode == 128 + number
    assert number.name in said
