"""The parent of a run: what it shows, its run folder, and signals."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from claims import held_elsewhere

from recipes import config, launch, telemetry
from recipes.checkpoint import save
from recipes.config import (
    Config,
    DatasetConfig,
    ModelConfig,
    TaskConfig,
    TopologyConfig,
    UserError,
)
from recipes.ending import Interrupted, Watch
from recipes.launch import Job, begin
from recipes.rendezvous import JobFailed, node_failure
from recipes.snapshot import Snapshot
from recipes.topology import NodeIdentity

# --- what is shown


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"traceback": "Traceback:\n  there\nValueError: bad\n\n"},
            "Traceback:\n  there\nValueError: bad\n[node1 rank5] error: ValueError: bad\n"
            "  remedy: do it\n",
        ),
        ({"traceback": None}, "[node1 rank5] error: bad\n  remedy: do it\n"),
        ({"traceback": None, "remedy": ""}, "[node1 rank5] error: bad\n"),
        (
            {"traceback": None, "message": "caf\udce9\x1b[31m.jpg: bad"},
            "[node1 rank5] error: caf\\udce9\\x1b[31m.jpg: bad\n  remedy: do it\n",
        ),
        ({"traceback": ""}, "[node1 rank5] error: ValueError: bad\n  remedy: do it\n"),
    ],
)
def test_a_failure_is_one_message(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    failure = {"node": 1, "rank": 5, "type": "ValueError", "message": "bad", "remedy": "do it"}
    launch.report_failure(failure | change, 1)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", expected)


# --- the run folder


def test_a_new_run_leaves_its_configuration(tmp_path: Path) -> None:
    made = config.with_batch_sizes(Config(batch_size=8))
    run = telemetry.RunFolder(tmp_path / "a" / "run")
    begin(made, run)
    assert run.config.read_text() == config.dump(made)
    begin(made, run)  # one that never got to its first event may start again


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
@pytest.mark.parametrize("resume", [None, "auto", "other/run"])
def test_an_existing_run_is_left_alone_unless_it_is_continued(
    tmp_path: Path, name: str, resume: str | None
) -> None:
    (tmp_path / name).write_text("kept")
    made = config.with_batch_sizes(Config(batch_size=8, resume=resume))
    if resume == "auto":
        begin(made, telemetry.RunFolder(tmp_path))
        assert (tmp_path / name).read_text() == "kept"  # until its checkpoint is accepted
        return
    with pytest.raises(UserError, match="holds a run already") as caught:
        begin(made, telemetry.RunFolder(tmp_path))
    assert str(tmp_path) in caught.value.message
    assert "resume=auto" in caught.value.remedy
    assert "hydra.run.dir=" in caught.value.remedy
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "kept"}


def test_a_result_is_left_in_a_folder_of_its_own_alone(tmp_path: Path) -> None:
    job = a_job(Config(), tmp_path)
    with held_elsewhere(tmp_path):
        job.interrupted(Interrupted(signal.SIGTERM))
    assert not job.run_folder.result.exists()
    job.interrupted(Interrupted(signal.SIGTERM))
    assert job.run_folder.result.exists()


# --- a further attempt


def a_checkpoint(folder: Path) -> Path:
    return save(folder / "checkpoints", Snapshot({}, {}, {"step": 1}), best=False, keep=1)


def test_an_attempt_before_the_first_checkpoint_continues_what_the_run_was_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def attempt(job: Job, number: int) -> None:
        asked.append(job.config.resume)
        if number == 0:
            begin(job.config, job.run_folder)
        if number == 2:
            a_checkpoint(job.run_folder.path)
        if number < 4:
            raise JobFailed(node_failure(0, "RankDied", "rank 1 was ended", ""), again=True)

    monkeypatch.setattr(Job, "_attempt", attempt)
    other = a_checkpoint(tmp_path / "other")
    made = config.with_batch_sizes(Config(batch_size=8, resume=str(other), restarts=4))
    a_job(made, tmp_path / "run").run_until_done()
    assert asked == [str(other), str(other), str(other), "auto", "auto"]


def test_a_run_that_is_continued_before_its_first_checkpoint_continues_the_other_one(
    tmp_path: Path,
) -> None:
    other, run = a_checkpoint(tmp_path / "other"), telemetry.RunFolder(tmp_path / "run")
    begin(config.with_batch_sizes(Config(batch_size=8, resume=str(other))), run)
    run.metrics.write_text("")
    for _ in range(2):  # killed again
        again = config.with_batch_sizes(Config(batch_size=8, resume="auto"))
        begin(again, run)
        assert again.resume == str(other)
        run.config.write_text(config.dump(again))  # as rank 0 does
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match="does not exist"):
        begin(config.with_batch_sizes(Config(batch_size=8, resume="auto")), run)


def test_a_run_with_checkpoints_of_its_own_continues_them(tmp_path: Path) -> None:
    other, run = a_checkpoint(tmp_path / "other"), telemetry.RunFolder(tmp_path / "run")
    begin(config.with_batch_sizes(Config(batch_size=8, resume=str(other))), run)
    a_checkpoint(run.path)
    again = config.with_batch_sizes(Config(batch_size=8, resume="auto"))
    begin(again, run)
    assert again.resume == "auto"


# --- endings


def a_job(made: Config, folder: Path) -> Job:
    return Job(made, telemetry.RunFolder(folder), NodeIdentity(0, "127.0.0.1", None), Watch())


@pytest.mark.parametrize("before", [None, "notes.txt", "config.yaml"])
def test_a_start_that_is_refused_leaves_a_folder_as_it_was(
    tmp_path: Path, before: str | None
) -> None:
    made = config.with_batch_sizes(
        Config(
            task=TaskConfig("train"),
            batch_size=8,
            model=ModelConfig("ResNet18", pretrained=str(tmp_path / "nowhere.pdparams")),
            dataset=DatasetConfig("digits"),
        )
    )
    folder = tmp_path / "outputs" / "run"
    folder.mkdir(parents=True)
    if before is not None:
        (folder / before).write_text("")
    job = a_job(made, folder)
    with job.holding, pytest.raises(UserError, match=r"nowhere\.pdparams"):
        job.run()
    assert {each.name for each in folder.iterdir()} - {".claim", "logs"} == {before} - {None}
    assert (folder / "logs").exists() == (before == "config.yaml")


def test_an_interrupted_run_has_a_result(tmp_path: Path) -> None:
    made = Config(topology=TopologyConfig(1, 3))
    job = a_job(made, tmp_path)
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 143
    found = telemetry.read_result(telemetry.RunFolder(tmp_path))
    assert (found.status, found.topology, found.world_size) == ("interrupted", "1x3", 3)
    assert (found.error, found.final) == (None, None)


@pytest.mark.parametrize(
    ("rank", "message", "expected"),
    [
        (None, "it is lost", "[node0] error: on node 1: it is lost\n"),
        (None, "node 1 (b) is lost", "[node0] error: node 1 (b) is lost\n"),
        (5, "bad", "[node0] error: on node 1, rank 5: bad\n"),
    ],
)
def test_a_node_speaks_of_another_ones_failure_under_its_own_name(
    capsys: pytest.CaptureFixture[str], rank: int | None, message: str, expected: str
) -> None:
    failure = node_failure(1, "NodeLost", message, "") | {"rank": rank}
    launch.report_failure(failure, 0)
    assert capsys.readouterr().err == expected


def test_a_training_that_could_not_save_is_not_silently_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Config(task=TaskConfig("train"), topology=TopologyConfig(1, 2))
    job = a_job(made, tmp_path)
    job._steps = lambda: (3, 7)
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 143
    found = telemetry.read_result(telemetry.RunFolder(tmp_path))
    assert found.status == "interrupted"
    assert found.error is not None
    assert found.error["message"].startswith("steps 4 to 7 are lost")
    said = capsys.readouterr()
    assert "steps 4 to 7 are lost" in said.err
    assert "to go on" not in said.out


def test_an_interrupted_run_that_continues_another_one_goes_on_from_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(Config(task=TaskConfig("train"), resume="outputs/other"), tmp_path)
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 143
    assert "to go on" not in capsys.readouterr().out  # nothing is noted there yet
    job.run_folder.config.write_text(config.dump(job.config))
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 143
    said = capsys.readouterr().out
    assert f"to go on: python train.py resume=auto hydra.run.dir={tmp_path}" in said


def test_what_kept_the_checkpoint_from_the_disk_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Config(task=TaskConfig("train"), topology=TopologyConfig(1, 2))
    job = a_job(made, tmp_path)
    job._begun = True
    job._not_saved = node_failure(0, "UserError", "the disk is full", "make room", fatal=True)
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 1
    found = telemetry.read_result(telemetry.RunFolder(tmp_path))
    assert found.status == "failed"
    assert found.error is not None
    assert found.error["message"] == "the disk is full"
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_is_one_message_wherever_it_is_met(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    begun: bool,
) -> None:
    def fail(_: Job) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/any")

    monkeypatch.setattr(Job, "run_until_done", fail)
    job = a_job(Config(), tmp_path)
    job._begun = begun
    if begun:
        assert job.run() == 1
        said = capsys.readouterr().err
    else:
        with pytest.raises(UserError) as caught:
            job.run()
        said = str(caught.value)
    assert "/tmp/any: No space left on device" in said
    assert "make room" in said


def test_another_error_of_the_system_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Job) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(Job, "run_until_done", fail)
    with pytest.raises(OSError, match="Bad file"):
        a_job(Config(), tmp_path).run()


def test_a_signal_to_another_node_interrupts_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(Config(), tmp_path)
    failure = node_failure(1, "SIGTERM", "node 1 was asked to end by SIGTERM", "", fatal=True)
    assert job.failed(failure) == 143
    found = telemetry.read_result(telemetry.RunFolder(tmp_path))
    assert (found.status, found.error) == ("interrupted", None)
    said = capsys.readouterr()
    assert "interrupted: node 1 was asked to end by SIGTERM; results: " in said.out
    assert said.err == ""


def test_a_run_that_completed_as_the_signal_came_has_completed(tmp_path: Path) -> None:
    job = a_job(Config(task=TaskConfig("smoke")), tmp_path)
    run = telemetry.RunFolder(tmp_path)
    telemetry.Result.untrained(job.config.shape, 1.0).write(run)
    assert job.interrupted(Interrupted(signal.SIGTERM)) == 0
    # One that was there before is not this run's.
    again = a_job(Config(task=TaskConfig("smoke")), tmp_path)
    assert again.interrupted(Interrupted(signal.SIGTERM)) == 143


def test_a_result_that_cannot_be_written_makes_no_second_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = a_job(Config(), Path("/proc/self"))
    job._begun = job._claimed = True
    assert job.failed(node_failure(0, "UserError", "bad", "mend it")) == 1
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "bad; nor could result.json be written" in said


@pytest.mark.parametrize(
    ("begun", "fatal", "status"), [(False, True, 2), (False, False, 1), (True, True, 1)]
)
def test_refused_and_failed_are_two_statuses(
    tmp_path: Path, begun: bool, fatal: bool, status: int
) -> None:
    job = a_job(Config(), tmp_path)
    job._begun = begun
    assert job.failed(node_failure(0, "UserError", "bad", "mend it", fatal=fatal)) == status
