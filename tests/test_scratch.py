"""A temporary folder that nobody leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import scratch
from recipes.config import UserError
from recipes.scratch import Scratch

ROOT = Path(__file__).resolve().parents[1]
OWNER = """
import sys
from recipes.scratch import Scratch
with Scratch() as scratch:
    print(scratch.path, scratch._janitor.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def an_owner() -> tuple[subprocess.Popen[str], Path, int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    path, janitor = owner.stdout.readline().split()
    return owner, Path(path), int(janitor)


def gone(path: Path, seconds: float = 10.0) -> bool:
    ends = time.monotonic() + seconds
    while path.exists() and time.monotonic() < ends:
        time.sleep(0.02)
    return not path.exists()


def test_it_is_there_and_then_it_is_not(folder: Path) -> None:
    with Scratch() as made:
        (made.path / "file").write_text("content")
        assert made.path.parent == folder
        scratch.remove_left_behind()
        assert made.path.exists()  # it has an owner
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_it_does_not_outlive_an_owner_that_is_killed(number: int) -> None:
    owner, path, _ = an_owner()
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("content")
    owner.send_signal(number)
    owner.wait()
    assert gone(path)


def test_a_folder_without_room_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40_000))
    with pytest.raises(UserError, match="has 39 KiB left") as caught, Scratch():
        pytest.fail("made")
    assert "TMPDIR" in caught.value.remedy
    assert list(folder.iterdir()) == []


def test_the_next_run_removes_what_nobody_could(folder: Path) -> None:
    owner, path, janitor = an_owner()
    os.kill(janitor, signal.SIGKILL)
    owner.kill()
    owner.wait()
    fresh = folder / f"{scratch.PREFIX}fresh"  # another run's, which has not locked it yet
    fresh.mkdir()
    assert path.exists()
    with Scratch():
        assert not path.exists()
    assert fresh.exists()
