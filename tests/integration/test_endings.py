"""Every way a run can end: nobody is left behind, one message says what happened."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import make_photographs
from launches import SMALL
from running import Finished, Running, ended, launch, started
from small_disk import tmpfs
from test_launches import check_checkpoint
from test_resume import contents

pytestmark = pytest.mark.launch

# Many short epochs with loader processes: there is always something to interrupt.
ENDLESS = (
    *(*SMALL, "dataset=synthetic", "dataset.num_classes=10", "dataset.image_size=16"),
    *("dataset.train_size=96", "dataset.eval_size=10", "dataset.workers=1"),
    *("global_batch_size=24", "epochs=1000"),
)
# What a person accepts after Ctrl-C, with what a busy machine adds.
PATIENCE = 20.0
RESULT_KEYS = {"status", "final", "best", "images_per_second", "wall_seconds", "topology"} | {
    "world_size"
}
ERROR_KEYS = {"node", "rank", "type", "message", "remedy"}


def check_failure(run: Finished, *, rank: int, type_: str, message: str) -> None:
    """One message on the console, the same in ``result.json``."""
    assert run.status not in (0, None)
    assert "Traceback" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert f"[node0 rank{rank}] error: {message}" in run.errors
    assert "remedy: " in run.errors
    assert set(run.result) == RESULT_KEYS | {"error"}
    assert run.result["status"] == "failed"
    error = run.result["error"]
    assert set(error) == ERROR_KEYS
    assert (error["node"], error["rank"], error["type"]) == (0, rank, type_)
    assert error["message"].startswith(message)
    assert error["remedy"]


def check_interrupted(run: Finished, number: signal.Signals) -> None:
    assert run.status == 128 + number
    assert run.errors == ""
    assert run.output.count(f"interrupted by {number.name}") == 1
    assert "error" not in run.output
    assert set(run.result) == RESULT_KEYS
    assert run.result["status"] == "interrupted"


@pytest.mark.parametrize(
    ("devices", "number"), [(1, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGTERM)]
)
def test_a_signal_ends_all_processes(devices: int, number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path / "run", *ENDLESS, f"topology.devices={devices}") as running:
        running.wait_for_step(9)
        everyone = running.processes()
        assert len(everyone) >= 2 * devices  # each rank has a loader process
        running.process.send_signal(number)
        with contextlib.suppress(ProcessLookupError):
            running.process.send_signal(number)  # by an impatient user
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    check_interrupted(run, number)
    check_checkpoint(run.folder / "checkpoints" / "last")
    assert run.result["world_size"] == devices


@pytest.mark.parametrize(
    ("loader", "number"), [("turbojpeg", signal.SIGTERM), ("paddle", signal.SIGHUP)]
)
def test_a_signal_to_every_process_of_a_job_is_one_to_the_run(
    photographs: Path, tmp_path: Path, loader: str, number: signal.Signals
) -> None:
    """As Slurm and systemd send it."""
    with started(
        tmp_path / "run",
        *(*endless_epochs(photographs), "topology=1x2"),
        *(f"loader={loader}", "save.every_epochs=1000"),
    ) as running:
        running.wait_for_step(5)
        for pid in running.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    check_interrupted(run, number)
    check_checkpoint(run.folder / "checkpoints" / "last")


def test_a_signal_while_the_ranks_start(tmp_path: Path) -> None:
    with started(tmp_path / "run", *ENDLESS, "topology=1x2") as running:
        running.wait_until(lambda: len(running.processes()) >= 4)
        running.process.send_signal(signal.SIGTERM)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    check_interrupted(run, signal.SIGTERM)


@pytest.mark.parametrize("launcher_too", [False, True])
def test_nothing_outlives_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_too: bool
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started(tmp_path / "run", *ENDLESS, "topology=1x2") as running:
        running.wait_for_step(5)
        assert len(running.processes()) >= 6
        assert list(temporary.iterdir())
        if launcher_too:
            os.kill(launcher_of(running), signal.SIGKILL)
        running.process.kill()
        running.wait_for_nobody(PATIENCE)
        running.finish()
    ends = time.monotonic() + PATIENCE
    while left := list(temporary.iterdir()):
        assert time.monotonic() < ends, left
        time.sleep(0.1)
    newest = max((running.folder / "checkpoints").glob("step-*"))
    check_checkpoint(newest)


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    with started(tmp_path / "run", *ENDLESS, "topology.devices=3") as running:
        running.wait_for_step(5)
        os.kill(running.rank(1), signal.SIGKILL)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    check_failure(run, rank=1, type_="RankDied", message="rank 1 was ended by SIGKILL")
    assert str(run.folder / "logs" / "rank-1.log") in run.errors


def test_the_end_of_the_launcher_is_told(tmp_path: Path) -> None:
    with started(tmp_path / "run", *ENDLESS, "topology=1x2") as running:
        running.wait_for_step(2)
        os.kill(launcher_of(running), signal.SIGKILL)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 1
    assert run.said.count("error:") == 1
    assert "paddle.distributed.launch" in run.errors
    assert "SIGKILL" in run.errors
    assert "before any rank started" not in run.errors
    assert run.result["status"] == "failed"


def launcher_of(running: Running) -> int:
    (pid,) = (
        pid
        for pid in running.processes()
        if b"paddle.distributed.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and "PADDLE_TRAINER_ID" not in running.processes()[pid]
    )
    return pid


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    return make_photographs(tmp_path / "images")


def endless_epochs(photographs: Path) -> tuple[str, ...]:
    """As `ENDLESS`, with two processes in each rank that decode."""
    return (
        *(*SMALL, "dataset=imagenet", f"dataset.path={photographs}", "dataset.image_size=32"),
        *("dataset.on_corrupt=skip", "dataset.workers=2", "global_batch_size=24", "epochs=1000"),
    )


@pytest.mark.parametrize("end", ["signal", "parent", "rank"])
def test_decoding_processes_end_with_their_rank(
    photographs: Path, tmp_path: Path, end: str
) -> None:
    with started(
        tmp_path / "run",
        *endless_epochs(photographs),
        "topology=1x2",
    ) as running:
        running.wait_for_step(5)
        assert len(running.processes()) >= 8  # parent, launcher, two ranks with two decoders each
        if end == "signal":
            running.process.send_signal(signal.SIGTERM)
        elif end == "parent":
            running.process.kill()
        else:
            os.kill(running.rank(1), signal.SIGKILL)
        if end == "parent":
            running.wait_for_nobody(PATIENCE)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    if end == "signal":
        check_interrupted(run, signal.SIGTERM)
    elif end == "rank":
        check_failure(run, rank=1, type_="RankDied", message="rank 1 was ended by SIGKILL")


@pytest.mark.parametrize("devices", [1, 2])
def test_the_second_signal_ends_a_run_whose_decoders_are_halted(
    photographs: Path, tmp_path: Path, devices: int
) -> None:
    with started(
        tmp_path / "run",
        *(*endless_epochs(photographs), f"topology.devices={devices}", "save.every_epochs=1000"),
    ) as running:
        running.wait_for_step(3)
        for decoder in sorted(running.processes())[-2 * devices :]:
            os.kill(decoder, signal.SIGSTOP)
        time.sleep(1)
        running.process.send_signal(signal.SIGINT)
        time.sleep(1)
        running.process.send_signal(signal.SIGINT)
        run = running.finish(PATIENCE / 2)
        running.wait_for_nobody(1.0)
    assert run.status == 130
    assert "SIGINT: ending" in run.output  # acknowledged
    assert "ended at once by SIGINT" in run.output
    assert run.said.count("error:") == 1, run.said
    assert re.search(r"error: steps 1 to \d are lost", run.errors), run.said


def test_a_signal_ends_all_runs_of_a_multirun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sweep = ("--multirun", "seed=1,2", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=${seed}")
    with started(folder, *sweep, *ENDLESS) as running:
        metrics = folder / "1" / "metrics.jsonl"
        running.wait_until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text())
        running.process.send_signal(signal.SIGINT)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 130
    assert run.errors == ""
    assert run.output.count("interrupted by SIGINT") == 1
    assert not (folder / "2").exists()
    told = re.search(r"^to go on: python (.+)$", run.output, flags=re.MULTILINE)
    assert told, run.output
    assert "--multirun" not in told[1]
    last = (folder / "1" / "checkpoints" / "last").resolve().name
    with ended(
        Running(folder / "1", [sys.executable, *shlex.split(told[1]), "max_steps=9"])
    ) as going_on:
        run = going_on.finish()
    assert run.status == 0, run.said
    assert f"continuing after step {int(last.removeprefix('step-'))} " in run.output


@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_decoding_process_ends_the_run_once_no_restart_is_left(
    photographs: Path, tmp_path: Path, devices: int
) -> None:
    restarts = 2 - devices
    with started(
        tmp_path / "run",
        *endless_epochs(photographs),
        *(f"topology.devices={devices}", f"restarts={restarts}"),
    ) as running:
        log = running.folder / "logs" / "rank-0.log"
        running.wait_for_step(5)
        for _ in range(restarts):
            os.kill(max(running.processes()), signal.SIGKILL)  # the last one that was started
            running.wait_until(lambda: "continuing after step" in log.read_text())
            running.wait_until(lambda: len(running.processes()) == 3)
        os.kill(max(running.processes()), signal.SIGKILL)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 1
    assert "Traceback" not in run.said
    assert run.errors.count("error: a decoding process died (SIGKILL)") == restarts + 1
    assert run.output.count("starting again from the last checkpoint") == restarts
    assert "dataset.workers" in run.errors
    assert run.result["status"] == "failed"


HOLDER = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(300)
"""


@contextlib.contextmanager
def not_answering(path: Path) -> Iterator[None]:
    """Have the opening of a file wait: another process holds a lease on it, as NFS servers do."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize(("devices", "decoders"), [(1, 1), (2, 2)])
def test_a_read_that_does_not_return_ends_the_run_with_the_path(
    photographs: Path, tmp_path: Path, devices: int, decoders: int
) -> None:
    path = photographs / "train" / "frog" / "0.png"
    settings = (*endless_epochs(photographs), "deadlines.read=2", f"dataset.workers={decoders}")
    with (
        not_answering(path),
        started(tmp_path / "run", *settings, f"topology.devices={devices}") as running,
    ):
        run = running.finish(40)
        running.wait_for_nobody(1.0)
    rank = run.result["error"]["rank"]
    message = f"{path}: not read within 2 s (deadlines.read)"
    check_failure(run, rank=rank, type_="PassingError", message=message)


@pytest.mark.parametrize("decoders", [1, 2])
def test_an_unreadable_image_is_told_by_the_rank_that_met_it(
    photographs: Path, tmp_path: Path, decoders: int
) -> None:
    """Without shuffling the image 10 of 24 lies in the share of rank 1 of 3, in the first step."""
    with started(
        tmp_path / "run",
        *(*SMALL, "dataset=imagenet", f"dataset.path={photographs}", "dataset.image_size=32"),
        *("dataset.shuffle=false", f"dataset.workers={decoders}", "global_batch_size=24"),
        "topology.devices=3",
    ) as running:
        run = running.finish()
        running.wait_for_nobody(1.0)
    path = photographs / "train" / "newt" / "2.png"
    check_failure(run, rank=1, type_="UserError", message=f"{path}: ")
    assert "dataset.on_corrupt=skip" in run.errors


def test_a_loss_that_is_not_finite_leaves_the_good_checkpoint(tmp_path: Path) -> None:
    settings = (*ENDLESS, "topology=1x2", "dataset.train_size=240")
    good = launch(tmp_path / "run", *settings, "max_steps=2")
    assert good.status == 0, good.said
    before = contents(good.folder / "checkpoints")
    with started(
        *(good.folder, *settings, "resume=auto"),
        *("optimizer.base_lr=1e30", "log.every=8"),  # the check waits for the logging step
    ) as running:
        run = running.finish()
        running.wait_for_nobody(1.0)
    told = re.search(r"the loss is not finite at step (\d+) on rank ([\d, ]+);", run.errors)
    assert told, run.said
    assert 3 <= int(told[1]) <= 8
    # Both ranks learn it from the same all-reduce, and either may be the first to say it.
    rank = run.result["error"]["rank"]
    assert rank in (0, 1)
    check_failure(run, rank=rank, type_="NonFiniteLoss", message="the loss is not finite at step")
    assert contents(run.folder / "checkpoints") == before
    assert [event["step"] for event in run.events("train")] == [1, 2]
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_folder_that_is_removed_ends_the_run(tmp_path: Path, devices: int) -> None:
    with started(
        tmp_path / "run", *ENDLESS, f"topology.devices={devices}", "save.every_epochs=1000"
    ) as running:
        running.wait_for_step(5)
        shutil.rmtree(running.folder)
        run = running.finish(PATIENCE)
        running.wait_for_nobody(1.0)
    assert run.status == 1
    assert "Traceback" not in run.said
    assert run.said.count("error:") == 1, run.said
    assert f"error: {run.folder} was removed" in run.errors
    assert not run.folder.exists()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the small backbone and not for two."""
    with tmpfs(tmp_path / "disk", "size=3500k") as folder:
        yield folder


def test_a_full_disk_leaves_the_older_checkpoint(small_disk: Path) -> None:
    with started(small_disk / "run", *ENDLESS, "topology=1x2") as running:
        run = running.finish()
        running.wait_for_nobody(1.0)
    (left,) = (run.folder / "checkpoints").glob("step-*")
    check_checkpoint(left)
    check_checkpoint(run.folder / "checkpoints" / "last")
    check_failure(run, rank=0, type_="UserError", message="checkpoint step-0000")
    assert "the disk is full" in run.errors
    assert "the older checkpoints are intact" in run.errors
