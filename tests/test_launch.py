"""The parent of a run: what it shows, its run folder, and signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from claims import held_elsewhere

from recipes import config, launch, telemetry
from recipes.config import Config, TopologyConfig, UserError
from recipes.launch import Interrupted, Job, begin, signals_as_interrupts
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
        ({"traceback": ""}, "[node1 rank5] error: ValueError: bad\n  remedy: do it\n"),
    ],
)
def test_a_failure_is_one_message(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    failure = {"node": 1, "rank": 5, "type": "ValueError", "message": "bad", "remedy": "do it"}
    launch.report_failure(failure | change)
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
    job = Job(Config(), telemetry.RunFolder(tmp_path), NodeIdentity(0, "127.0.0.1", None))
    with held_elsewhere(tmp_path):
        job.interrupted(Interrupted(signal.SIGTERM))
    assert not job.run_folder.result.exists()
    job.interrupted(Interrupted(signal.SIGTERM))
    assert job.run_folder.result.exists()


# --- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_interrupt_and_further_ones_are_ignored(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    done = []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
            pytest.fail("the signal did not interrupt")
        finally:
            for each in before:
                os.kill(os.getpid(), each)
            time.sleep(0.01)
            done.append(True)  # what has to be done at the end is not interrupted

    with pytest.raises(Interrupted) as caught, signals_as_interrupts():
        work()
    assert done
    assert caught.value.number == number
    assert str(caught.value) == number.name
    assert not isinstance(caught.value, Exception)  # no `except Exception` may hold it back
    assert {each: signal.getsignal(each) for each in before} == before


def test_without_a_signal_nothing_is_changed() -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with signals_as_interrupts():
        assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
    assert {each: signal.getsignal(each) for each in before} == before


def test_an_interrupted_run_has_a_result(tmp_path: Path) -> None:
    made = Config(topology=TopologyConfig(1, 3))
    job = Job(made, telemetry.RunFolder(tmp_path), NodeIdentity(0, "127.0.0.1", None))
    job.interrupted(Interrupted(signal.SIGTERM))
    found = telemetry.read_result(telemetry.RunFolder(tmp_path))
    assert (found.status, found.topology, found.world_size) == ("interrupted", "1x3", 3)
    assert (found.error, found.final) == (None, None)
