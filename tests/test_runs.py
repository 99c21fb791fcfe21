"""The list of runs, and what a removal takes away and leaves alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from claims import held_elsewhere

from recipes import config, runs
from recipes.config import Config, RunsConfig, TaskConfig, UserError
from recipes.telemetry import RunFolder

ROOT = Path(__file__).parent.parent


def a_run(folder: Path, status: str | None = "completed", **changes: Any) -> Path:
    """A run folder as a training leaves it; without a result for None."""
    made = config.with_batch_sizes(Config(batch_size=8, **changes))
    made.recipe_name, made.task = "digits_resnet18", made.task or TaskConfig("train")
    made.task.name = "train"
    run = RunFolder(folder)
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    (run.checkpoints / "step-00000001" / "model.safetensors").write_bytes(bytes(300_000))
    (run.checkpoints / "last").symlink_to("step-00000001")
    run.logs.mkdir()
    (run.logs / "rank-0.log").write_text("said")
    run.config.write_text(config.dump(made))
    scores = {"epoch": 0, "step": 1, "top1": 0.5, "loss": 0.25, "samples": 9}
    run.metrics.write_text(json.dumps({"event": "eval", **scores}) + "\n")
    if status is not None:
        best = {**scores, "top1": 0.75}
        run.result.write_text(json.dumps({"status": status, "best": best}))
    (folder / ".claim").touch()
    return folder


def found(folder: Path) -> dict[str, tuple[str, float | None]]:
    return {run.name: (run.state, run.top1) for run in runs.find(folder)}


def asked(folder: Path, remove: str | None = None) -> int:
    return runs.show(Config(runs=RunsConfig(str(folder), remove)))


def test_runs_are_found_with_their_state_and_score(tmp_path: Path) -> None:
    for status in ("completed", "interrupted", "failed", None):
        a_run(tmp_path / str(status), status)
    a_run(tmp_path / "sweep" / "0")
    a_run(tmp_path / "sweep" / "0" / "within")
    a_run(tmp_path / "live", None)
    (tmp_path / "result.json").touch()
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "config.yaml").write_text("of: another program")
    (tmp_path / "other" / "result.json").write_text("{}")
    (tmp_path / "linked").symlink_to("completed")
    with held_elsewhere(tmp_path / "live"):
        assert found(tmp_path) == {
            **{status: (status, 0.75) for status in ("completed", "interrupted", "failed")},
            "None": ("killed", 0.5),
            "live": ("running", 0.5),
            "sweep/0": ("completed", 0.75),
            "sweep/0/within": ("completed", 0.75),
        }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", '{"status": 3, "best": {"top1": "x"}}'),
        ("metrics.jsonl", "torn\nlines\n"),
        ("metrics.jsonl", '{"event": "eval"}\n'),
    ],
)
def test_what_a_run_left_may_be_of_any_kind(tmp_path: Path, name: str, text: str) -> None:
    folder = a_run(tmp_path / "run", None)
    (folder / name).write_text(text)
    assert found(tmp_path)["run"][0] == "killed"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert found(tmp_path)["run"][0] == "killed"


def test_the_list_is_a_table_of_aligned_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "a")
    a_run(tmp_path / "much-longer", "failed")
    assert asked(tmp_path) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "recipe", "state", "top-1", "size", "written"]
    for line in lines[:2]:
        assert line[heading.index("recipe") :].startswith("digits_resnet18")
        assert re.search(r"75\.00% +3\d\d kB +\d+ s ago$", line)
    assert re.match(r"2 runs in .*, 6\d\d kB$", lines[2])
    assert asked(tmp_path / "a" / "logs") == 0
    assert capsys.readouterr().out.startswith("0 runs in")
    for folder, message in ((tmp_path / "a", "a run itself"), (tmp_path / "none", "No such file")):
        with pytest.raises(UserError, match=message):
            asked(folder)


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("failed", ["ended", "live", "other/1"]),
        ("completed", ["broken", "live", "other/1"]),
        ("killed", ["broken", "ended", "live"]),
        ("interrupted", ["broken", "ended", "live", "other/1"]),
        ("ended", ["broken", "live", "other/1"]),
        ("*/1", ["broken", "ended", "live"]),
        ("e*", ["broken", "live", "other/1"]),
    ],
)
def test_a_removal_takes_what_it_names(tmp_path: Path, wanted: str, left: list[str]) -> None:
    a_run(tmp_path / "broken", "failed")
    a_run(tmp_path / "ended", "completed")
    a_run(tmp_path / "other" / "1", None)
    a_run(tmp_path / "live", None)
    with held_elsewhere(tmp_path / "live"):
        assert asked(tmp_path, wanted) == 0
    assert sorted(found(tmp_path)) == left
    assert not (tmp_path / wanted).exists() or wanted == "interrupted"


def test_a_run_that_goes_on_is_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "live", "failed")
    a_run(tmp_path / "dead", "failed")
    with held_elsewhere(tmp_path / "live"):
        assert asked(tmp_path, "*") == 1
        assert (tmp_path / "live" / "checkpoints" / "last" / "model.safetensors").exists()
    assert "live is in use by another run" in capsys.readouterr().out
    assert sorted(found(tmp_path)) == ["live"]
    assert asked(tmp_path, "*") == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wanted", ["..", ".", "/", "../away", "away", "nobody", "linked", "", "/etc/*", "a/../../away"]
)
def test_nothing_outside_of_the_folder_is_named(tmp_path: Path, wanted: str) -> None:
    away = a_run(tmp_path / "away")
    outputs = tmp_path / "outputs"
    a_run(outputs / "a")
    (outputs / "linked").symlink_to(away)
    with pytest.raises(UserError, match="has no run of this name"):
        asked(outputs, wanted)
    assert sorted(found(tmp_path)) == ["away", "outputs/a"]


def test_what_links_lead_to_and_what_others_put_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    outputs = tmp_path / "outputs"
    run = a_run(outputs / "run")
    (run / "visualdl").symlink_to(elsewhere)
    (run / "logs" / "link").symlink_to(elsewhere)
    (run / "notes.txt").write_text("mine")
    assert asked(outputs, "run") == 0
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
    assert {path.name for path in run.iterdir()} == {"notes.txt", ".claim"}
    assert "run stays: it has notes.txt" in capsys.readouterr().out
    assert found(outputs) == {}


def test_what_cannot_be_removed_is_told_and_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / name)
    whole = runs._remove

    def remove(path: Path) -> None:
        if path.parent.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        whole(path)

    monkeypatch.setattr(runs, "_remove", remove)
    assert asked(tmp_path, "completed") == 1
    said = capsys.readouterr().out
    assert "a/checkpoints cannot be removed: Permission denied" in said
    assert list(found(tmp_path)) == ["a"]


def test_the_command_leaves_nothing_and_reads_no_dataset(tmp_path: Path) -> None:
    def say(*settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *settings],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    a_run(tmp_path / "outputs" / "mine", "failed")
    listed = say("task=runs")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.splitlines()[1].startswith("mine ")
    assert say("task=runs", "runs.remove=*x*").returncode == 2
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["mine"]
    assert say("task=runs", "runs.remove=failed").returncode == 0
    with contextlib.suppress(FileNotFoundError):
        assert list((tmp_path / "outputs").iterdir()) == []
