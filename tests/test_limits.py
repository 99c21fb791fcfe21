"""Limits of the system: what refuses a start says so at once, with the limit and the setting."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from photographs import encoded, photo_folder, picture

from recipes import limits
from recipes.config import UserError
from recipes.data.decoding import UnreadableImage, read_file
from recipes.data.reading_threads import ReadingThreads
from recipes.topology import Place
from recipes.worker import describe

ROOT = Path(__file__).parents[1]

PROGRAM = """
import resource, sys, threading
from recipes.config import Config, DatasetConfig, UserError
from recipes.data import build
from recipes.data.loader import start_decoders

dataset = DatasetConfig(name="imagenet", path=sys.argv[1], image_size=8, workers=16)
config = Config(dataset=dataset, loader="turbojpeg", global_batch_size=4)
train = build(dataset, "train", 0)
if sys.argv[2] == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
else:
    started, start = [], threading.Thread.start
    def limited(thread):
        started.append(thread)
        if len(started) > int(sys.argv[2]):
            raise RuntimeError("can't start new thread")
        start(thread)
    threading.Thread.start = limited
try:
    start_decoders(config, train)
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", ["files", "9", "128", "129"])
def test_decoders_that_cannot_start_are_told_at_once(limit: str, tmp_path: Path) -> None:
    """Python's own executor leaves processes behind then, for which it waits for ever."""
    content = [encoded(picture(20, 30))] * 4
    root = photo_folder(tmp_path, content, content)
    began = time.monotonic()
    arguments = [sys.executable, "-c", PROGRAM, str(root), limit]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < 30
    assert run.returncode == 1
    assert run.stderr.startswith("decoding process ") or limit == "129", run.stderr
    assert "of 16 cannot be started: " in run.stderr
    if limit == "files":
        assert "Too many open files (limits here: 40 open files, " in run.stderr
    assert "remedy: a smaller dataset.workers, or a higher limit (ulimit -n" in run.stderr


def test_threads_that_cannot_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(UserError, match="thread 2 of 3 that read images cannot be started") as told:
        ReadingThreads(3, "reading", "prepare.workers")
    assert told.value.remedy.startswith("a smaller prepare.workers, or a higher limit")
    started[0].join(5)
    assert not started[0].is_alive()


def test_too_many_open_files_are_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_corrupt=skip, good images would be left out."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="a limit of the system is reached: Too many open files"):
        read_file("/pictures/1.jpg")
    monkeypatch.undo()
    with pytest.raises(UnreadableImage):
        read_file("/pictures/1.jpg")


def test_a_rank_that_meets_a_limit_says_so() -> None:
    place = Place(0, 1, 0, 0)
    for error in (
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError(limits.NO_THREAD),
        RuntimeError("Resource temporarily unavailable"),  # as gloo says it
    ):
        told = describe(error, place)
        assert told["message"].startswith("a limit of the system is reached: ")
        assert told["traceback"] is None
    assert describe(BlockingIOError(errno.EAGAIN, "locked"), place)["traceback"] is not None


@pytest.mark.parametrize(("text", "expected"), [("16", 16), ("max", None)])
@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_is_known(
    tmp_path: Path, version: int, text: str, expected: int | None
) -> None:
    group = tmp_path / "cgroup" / "box"
    group.mkdir(parents=True)
    (group / "pids.max").write_text(f"{text}\n")
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text("0::/box\n" if version == 2 else "4:pids:/box\n")
    kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,pids"
    (process / "mountinfo").write_text(f"30 20 0:26 / {tmp_path}/cgroup rw,nosuid - {kind}\n")
    assert limits.most_processes(process) == expected
