"""What an interrupted training says it has lost, and the command that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import interruption
from recipes.config import Config
from recipes.manifest import MANIFEST
from recipes.telemetry import RunFolder


@pytest.mark.parametrize(
    ("began", "done", "saved", "said"),
    [
        (0, 0, None, None),
        (5, 5, None, None),  # continued from elsewhere, and nothing done yet
        (0, 5, 5, None),
        (0, 5, 6, None),
        (0, 1, None, "step 1 is lost: "),
        (0, 5, None, "steps 1 to 5 are lost: "),
        (0, 5, 3, "steps 4 to 5 are lost: "),
        (3, 5, None, "steps 4 to 5 are lost: "),
        (3, 5, 4, "step 5 is lost: "),
    ],
)
def test_what_is_lost_is_named(began: int, done: int, saved: int | None, said: str | None) -> None:
    found = interruption.loss(Config(), began, done, saved)
    if said is None:
        assert found is None
        return
    assert found is not None
    assert found.message.startswith(said)
    assert "deadlines.grace" in found.remedy
    kept = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint"
    assert found.message.endswith(kept)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert interruption.last_saved(run) is None
    for name, complete in (("step-00000003", True), ("step-00000012", True), ("step-99", False)):
        (run.checkpoints / name).mkdir(parents=True)
        if complete:
            (run.checkpoints / name / MANIFEST).touch()
    (run.checkpoints / "step-odd").mkdir()
    assert interruption.last_saved(run) == 12


def test_the_command_goes_on_with_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interruption.STARTED_WITH_VARIABLE, raising=False)
    started = ["recipe=a", "resume=old/run", "hydra.run.dir=b", "+model.arguments={a: 1}"]
    command = interruption.command_to_go_on(started, Path("outputs/a b"))
    assert command == (
        "python train.py recipe=a '+model.arguments={a: 1}' resume=auto 'hydra.run.dir=outputs/a b'"
    )


def test_the_command_is_one_that_works_where_make_started_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There `python` has no packages, and a container's paths are not the host's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(interruption.STARTED_WITH_VARIABLE, "docker/train.sh --runtime auto")
    command = interruption.command_to_go_on(["recipe=a"], tmp_path / "outputs" / "run")
    assert command == (
        "docker/train.sh --runtime auto train.py recipe=a resume=auto hydra.run.dir=outputs/run"
    )
