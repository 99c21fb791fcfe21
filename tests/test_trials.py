"""A sweep's trials: how many, what tells each one from the others, and where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.trials import Sweep, how_they_ended

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("settings", "keys", "trials"),
    [
        ("seed=1", (), 1),
        ("seed=1,2,3 recipe=digits_resnet18", ("seed",), 3),
        ("seed=range(1,5) +model.arguments.x=a,b", ("seed", "model.arguments.x"), 8),
        ("model=glob(*) seed=1,2", ("model", "seed"), None),
        ("optimizer.base_lr=interval(0,1)", ("optimizer.base_lr",), None),
        ("seed=1,2 epochs=1,2,3 seed=3", ("epochs",), 3),
        ("seed=[1", (), 1),
        (f"seed=1,{'1' * 5000}", (), 1),
    ],
)
def test_what_a_command_line_varies(
    settings: str, keys: tuple[str, ...], trials: int | None
) -> None:
    assert Sweep.of(settings.split()) == Sweep(keys, trials)


def test_a_trial_is_told_by_what_it_sets_alone() -> None:
    sweep = Sweep(("seed", "model.arguments.x"), 8)
    overrides = ["recipe=digits_resnet18", "seed=3", "+model.arguments.x=a", "epochs=1"]
    assert sweep.title(4, overrides) == "trial 5 of 8: seed=3 +model.arguments.x=a"
    assert sweep.folder(4, overrides) == "4-seed_3-+model.arguments.x_a"
    assert Sweep(("seed",), None).title(0, ["seed=3"]) == "trial 1: seed=3"
    assert Sweep().title(0, overrides) == "trial 1 of 1"
    assert Sweep().folder(0, overrides) == "0"


@settings(deadline=None)
@given(value=st.text(max_size=200))
def test_a_folder_s_name_can_be_typed_again(value: str) -> None:
    name = Sweep(("dataset.path",), 2).folder(1, [f"dataset.path={value}"])
    assert "/" not in name
    assert 1 <= len(name.encode()) <= 100
    again = OverridesParser.create().parse_override(f"resume=outputs/x/{name}")
    assert again.value() == f"outputs/x/{name}"


def test_each_refused_trial_says_which_one_it_is_and_the_end_names_them(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, str(ROOT / "train.py"), "--multirun", "seed=-1,-2", "epochs=2"),
            f"hydra.sweep.dir={tmp_path / 'runs'}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert ended.stdout.splitlines() == [
        *("trial 1 of 2: seed=-1", "trial 2 of 2: seed=-2", "0 of 2 trials completed"),
        "  trial 1 of 2: seed=-1: was refused (exit status 2)",
        "  trial 2 of 2: seed=-2: was refused (exit status 2)",
    ]
    assert "seed=-2 must be" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {path.name for path in (tmp_path / "runs").rglob("*")} <= {"multirun.yaml"}


def test_the_end_of_a_sweep_names_the_trials_that_did_not_complete() -> None:
    assert how_they_ended({"trial 1 of 2: seed=0": 0, "trial 2 of 2: seed=1": 0}, 2) == [
        "2 of 2 trials completed"
    ]
    statuses = {"trial 1 of 5: a": 0, "trial 2 of 5: b": 2, "trial 3 of 5: c": 1, "trial 4": 130}
    assert how_they_ended(statuses, 5) == [
        "1 of 5 trials completed",
        "  trial 2 of 5: b: was refused (exit status 2)",
        "  trial 3 of 5: c: failed (exit status 1)",
        "  trial 4: was interrupted (exit status 130)",
        "  not started: 1",
    ]
    assert how_they_ended({"trial 1": 0}, None) == ["1 of 1 trials completed"]
