"""Continuing: the same training as without the break, or a refusal that says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launches import SMALL
from running import Finished, launch, started, timeless
from test_launches import check_board, check_checkpoint, curves_of

pytestmark = pytest.mark.launch

# Two epochs of four steps. With sync-BN the ranks' statistics do not depend on where it stops.
TWO_EPOCHS = (
    *(*SMALL, "topology=1x2", "sync_bn=true", "global_batch_size=360", "epochs=2"),
    *("optimizer.base_lr=0.05", "schedule.warmup_epochs=0.5", "save.keep_finished=3"),
)
STEPS = 8
BREAKS = (2, 4)  # in the middle of the first epoch, and at its end


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Both epochs at once."""
    run = launch(tmp_path_factory.mktemp("straight") / "run", *TWO_EPOCHS)
    assert run.status == 0, run.said
    return run


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    """The same in three launches, all of them with resume=auto, the first in an empty folder."""
    folder = tmp_path_factory.mktemp("pieces") / "run"
    runs = []
    for stop in (*BREAKS, None):
        limit = [] if stop is None else [f"max_steps={stop}"]
        runs.append(launch(folder, *TWO_EPOCHS, "resume=auto", *limit))
        assert runs[-1].status == 0, runs[-1].said
    return runs


def by_step(run: Finished, kind: str, steps: Iterable[int]) -> list[dict[str, Any]]:
    return [timeless(event) for event in run.events(kind) if event["step"] in steps]


def test_a_broken_training_goes_on_bit_for_bit(straight: Finished, pieces: list[Finished]) -> None:
    last = pieces[-1]
    for kind in ("train", "eval"):
        steps = [event["step"] for event in last.events(kind)]
        assert len(set(steps)) == len(steps), f"{kind} steps twice: {steps}"
    every = range(1, STEPS + 1)
    assert by_step(last, "train", every) == by_step(straight, "train", every)
    assert [event["step"] for event in straight.events("eval")] == [4, 8]
    assert by_step(last, "eval", (4, 8)) == by_step(straight, "eval", (4, 8))
    ours, theirs = last.folder / "checkpoints/last", straight.folder / "checkpoints/last"
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    assert last.result["final"] == straight.result["final"]


def test_the_curves_of_a_continued_run_have_each_step_once(pieces: list[Finished]) -> None:
    (file,) = (pieces[-1].folder / "visualdl").iterdir()
    curves = curves_of(file)
    assert sorted(curves["train/loss"]) == list(range(1, STEPS + 1))
    assert sorted(curves["eval/top1"]) == [2, 4, 8]
    check_board(pieces[-1])


def test_a_continued_run_says_from_where(pieces: list[Finished]) -> None:
    first, *others = pieces
    assert first.said.count("no checkpoint in") == 1
    assert "starting from the beginning" in first.output
    for run, step in zip(others, BREAKS, strict=True):
        source = run.folder / "checkpoints" / f"step-{step:08d}"
        assert f"continuing after step {step} from {source}" in run.output


def test_another_run_goes_on_from_a_checkpoint(
    pieces: list[Finished], straight: Finished, tmp_path: Path
) -> None:
    source = pieces[0].folder / "checkpoints" / "step-00000002"
    before = contents(pieces[0].folder)
    settings = (*TWO_EPOCHS, f"resume={source}", "restarts=1")
    with started(tmp_path / "new", *settings) as running:
        # A rank is killed before the new folder has a checkpoint of its own.
        log, said = running.folder / "logs" / "rank-0.log", f"continuing after step 2 from {source}"
        running.wait_until(lambda: log.exists() and said in log.read_text())
        os.kill(running.rank(1), signal.SIGKILL)
        run = running.finish()
    assert run.status == 0, run.said
    assert "1 was ended by SIGKILL" in run.errors
    assert run.output.count(said) == 2
    assert contents(pieces[0].folder) == before
    rest = range(3, STEPS + 1)
    assert [event["step"] for event in run.events("train")] == list(rest)
    assert by_step(run, "train", rest) == by_step(straight, "train", rest)
    assert by_step(run, "eval", (4, 8)) == by_step(straight, "eval", (4, 8))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    pieces: list[Finished], straight: Finished, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pieces[-1].folder, folder, symlinks=True)
    newest = folder / "checkpoints" / f"step-{STEPS:08d}"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    run = launch(folder, *TWO_EPOCHS, "resume=auto")
    assert run.status == 0, run.said
    assert run.said.count("passing over a damaged checkpoint") == 1
    assert f"{newest}: model.safetensors: its content was altered" in run.output
    assert "continuing after step 4" in run.output
    every = range(1, STEPS + 1)
    assert by_step(run, "train", every) == by_step(straight, "train", every)
    assert [event["step"] for event in run.events("eval")] == [2, 4, 8]
    check_checkpoint(folder / "checkpoints" / "last")
    check_board(run)


def test_another_training_is_refused_with_what_differs(
    pieces: list[Finished], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pieces[-1].folder, folder, symlinks=True)
    kept = {path: text for path, text in contents(folder).items() if "logs" not in str(path)}
    run = launch(
        folder,
        *(*TWO_EPOCHS, "resume=auto", "seed=1", "global_batch_size=180"),
        *("model.name=MobileNetV1_x0_5", "model.num_classes=12"),
    )
    assert run.status != 0
    for key, saved, ours in (
        ("model", "MobileNetV1_x0_25", "MobileNetV1_x0_5"),
        ("num_classes", 10, 12),
        ("seed", 0, 1),
        ("global_batch_size", 360, 180),
    ):
        assert f"{key}: {saved} in the checkpoint, {ours} in this run" in run.errors
    assert run.errors.count("error:") == 1
    assert "Traceback" not in run.said
    assert "[node0 rank0] error: " in run.errors
    assert "seed=0" in run.errors.partition("remedy: ")[2]
    # What the folder says of the run that was not continued stays true.
    assert kept.items() <= contents(folder).items()
    assert run.result["status"] == "completed"


def test_a_finished_run_that_is_continued_keeps_its_speed(
    straight: Finished, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder, symlinks=True)
    run = launch(folder, *TWO_EPOCHS, "resume=auto")
    assert run.status == 0, run.said
    assert run.events("train") == straight.events("train")
    assert "no step is left to train: epochs=2 ends with step 8, and step 8 is done" in run.output
    speed = straight.result["images_per_second"]
    assert run.result["images_per_second"] == pytest.approx(speed, rel=0.05)
    assert run.result["final"] == straight.result["final"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("config.yaml", "torn"), ("metrics.jsonl", "folder"), ("metrics.jsonl", "fields")],
)
def test_a_damaged_file_of_the_run_is_named_and_the_rest_left_alone(
    straight: Finished, tmp_path: Path, name: str, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder, symlinks=True)
    path = folder / name
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:100] + b"\n  - {")
    elif damage == "fields":
        path.write_text(path.read_text().replace('"step": 2', '"step": "2"'))
    else:
        path.unlink()
        path.mkdir()
    before = contents(folder)
    run = launch(folder, *TWO_EPOCHS, "epochs=3", "resume=auto")
    assert run.status in (1, 2)
    assert run.errors.count("error:") == 1, run.said
    assert str(path) in run.errors
    assert "Traceback" not in run.said
    left = {key: value for key, value in contents(folder).items() if not key.startswith("logs/")}
    assert left == {key: value for key, value in before.items() if not key.startswith("logs/")}


def test_a_checkpoint_that_does_not_exist_is_told_before_the_ranks_start(tmp_path: Path) -> None:
    for task in (["resume=nowhere/step-00000001"], ["task=evaluate", "checkpoint=nowhere/best"]):
        run = launch(tmp_path / "run", *TWO_EPOCHS, *task)
        assert run.status == 2
        assert "error: checkpoint nowhere/" in run.errors
        assert "does not exist" in run.errors
        assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused(straight: Finished) -> None:
    before = contents(straight.folder)
    again = launch(straight.folder, *SMALL)
    assert again.status == 2
    assert re.search(rf"error: {straight.folder} holds a run already", again.errors)
    assert "resume=auto" in again.errors
    assert again.output == ""
    assert contents(straight.folder) == before


def test_the_launcher_by_hand_refuses_such_a_folder_too(straight: Finished, tmp_path: Path) -> None:
    before = contents(straight.folder)
    by_hand = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    again = launch(
        straight.folder, *TWO_EPOCHS, launcher=[*by_hand, "--log_dir", str(tmp_path / "log")]
    )
    assert again.status == 2
    assert f"error: {straight.folder} holds a run already" in again.said
    assert "Traceback" not in again.said
    assert contents(straight.folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_config_and_state_say_the_same_of_a_continued_run(pieces: list[Finished]) -> None:
    state = json.loads((pieces[-1].folder / "checkpoints/last/state.json").read_text())
    assert state["step"] == STEPS
    assert state["position"]["samples"] == 2 * 1437
    assert state["position"]["best"] == pieces[-1].result["best"]
