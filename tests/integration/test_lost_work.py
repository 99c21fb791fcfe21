"""What a signal costs a training that cannot save: it is said, on the console and in the result."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import SMALL
from running import started
from small_disk import tmpfs
from test_endings import ENDLESS, ERROR_KEYS, PATIENCE, RESULT_KEYS

pytestmark = pytest.mark.launch


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for everything but a checkpoint, once `fill` has been called."""
    with tmpfs(tmp_path / "disk", "size=8m") as folder:
        yield folder


def fill(folder: Path, left: int) -> None:
    """Leave so many bytes on a file system."""
    found = os.statvfs(folder)
    with (folder / "filling").open("wb") as file:
        file.write(bytes(found.f_bavail * found.f_bsize - left))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_that_fails_after_the_signal_is_no_mere_interruption(
    small_disk: Path, devices: int
) -> None:
    with started(
        small_disk / "run", *ENDLESS, f"topology.devices={devices}", "save.every_epochs=1000"
    ) as running:
        running.wait_for_step(5)
        fill(small_disk, 300_000)
        running.process.send_signal(signal.SIGTERM)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 1
    assert "interrupted by SIGTERM" in run.output
    assert "Traceback" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert "the disk is full" in run.errors
    assert "to go on" not in run.said
    assert set(run.result) == RESULT_KEYS | {"error"}
    assert run.result["status"] == "failed"
    assert set(run.result["error"]) == ERROR_KEYS
    assert "the disk is full" in run.result["error"]["message"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_disk_that_fills_to_the_last_byte_is_one_message(small_disk: Path, devices: int) -> None:
    with started(
        small_disk / "run", *ENDLESS, f"topology.devices={devices}", "save.every_epochs=1000"
    ) as running:
        running.wait_for_step(5)
        fill(small_disk, 0)
        run = running.finish()  # what is left of a block of the file is written first
        running.wait_for_nobody(1.0)
    assert run.status == 1
    assert "Traceback" not in run.said
    assert "Logging error" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert "No space left on device; nor could result.json be written" in run.errors


def test_a_disk_that_is_full_before_the_start_refuses_the_run(small_disk: Path) -> None:
    fill(small_disk, 0)
    with started(small_disk / "run", *ENDLESS) as running:
        run = running.finish()
    assert run.status == 2
    assert "Traceback" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert "No space left on device" in run.errors
    assert not run.folder.exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_longer_than_the_grace_are_said_to_be_lost(tmp_path: Path, devices: int) -> None:
    with started(
        tmp_path / "run",
        *(*SMALL, "dataset=synthetic", "dataset.num_classes=10", "epochs=9"),
        *("dataset.image_size=32", "dataset.train_size=1600", "dataset.workers=1"),
        *("global_batch_size=800", f"accumulate={200 // devices}", "eval_batch_size=8"),
        *(f"topology.devices={devices}", "save.every_epochs=1000", "deadlines.grace=0.5"),
    ) as running:
        running.wait_for_step(1)
        running.process.send_signal(signal.SIGTERM)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 143
    assert "Traceback" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert re.search(r"error: step 1 is lost: .*deadlines\.grace", run.errors), run.said
    assert run.result["status"] == "interrupted"
    assert run.result["error"]["type"] == "NotSaved"
