"""A file whose folder goes away under its writer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.config import UserError
from recipes.telemetry import MetricsLog


def remove_file(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def replace_file(run: Path) -> None:
    remove_file(run)
    (run / "metrics.jsonl").touch()


def move_folder(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def file_for_folder(run: Path) -> None:
    shutil.rmtree(run)
    run.touch()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (shutil.rmtree, "run"),
        (move_folder, "run"),
        (file_for_folder, "run"),
        (remove_file, "run/metrics.jsonl"),
        (replace_file, "run/metrics.jsonl"),
    ],
)
def test_who_writes_to_a_file_that_has_gone_is_told(
    tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    run = tmp_path / "run"
    with MetricsLog(run / "metrics.jsonl") as log:
        log.append({"event": "train", "step": 1})
        change(run)
        with pytest.raises(UserError) as caught:
            log.append({"event": "train", "step": 2})
    assert caught.value.message.startswith(f"{tmp_path / named} was removed")
