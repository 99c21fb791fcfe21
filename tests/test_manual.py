"""What `python train.py --help` and `--cfg job` say, and mistakes that Hydra finds by itself."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes.config import Config

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
FIELDS = dataclasses.fields(Config)


def say(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `train.py` from another folder, so that whatever it makes is found there."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("help")
    ended = say(folder, "--help")
    assert ended.returncode == 0
    assert list(folder.iterdir()) == []
    return ended.stdout


# A recipe's own note of its name is not the user's to set.
KEYS = [field.name for field in FIELDS if field.name != "recipe_name"]


@pytest.mark.parametrize("name", KEYS)
def test_the_manual_mentions_every_key_and_group(manual: str, name: str) -> None:
    assert re.search(rf"(?<![\w.]){name}(?!\w)", manual), f"{name} is not in --help"


def test_the_manual_mentions_every_choice(manual: str) -> None:
    for path in CONF.glob("*/*.yaml"):
        assert re.search(rf"^\s*{path.parent.name}: .*\b{path.stem}\b", manual, re.M), path


def test_every_key_that_the_manual_mentions_is_there(manual: str) -> None:
    schema = OmegaConf.structured(Config)
    for key in re.findall(r"(?<![\w/])([a-z_]+(?:\.[a-z_]+)*)=", manual):
        if key.startswith("hydra.") or key == "recipe":
            continue
        *sections, last = key.split(".")
        node = schema
        for section in sections:
            node = node[section]
        assert last in [str(name) for name in node], key


def test_the_manual_fits_a_terminal(manual: str) -> None:
    assert max(len(line) for line in manual.splitlines()) <= 100
    assert "$" not in manual  # no placeholder is left


def test_cfg_job_shows_the_whole_configuration(tmp_path: Path) -> None:
    ended = say(tmp_path, "recipe=digits_resnet18", "epochs=3", "--cfg", "job")
    assert ended.returncode == 0
    assert ended.stderr == ""
    shown = OmegaConf.create(ended.stdout)
    assert [str(key) for key in shown] == [field.name for field in FIELDS]
    for field in FIELDS:
        section = OmegaConf.structured(Config)[field.name]
        if OmegaConf.is_dict(section):
            assert set(OmegaConf.select(shown, field.name)) == set(section)
    assert (shown.epochs, shown.recipe_name) == (3, "digits_resnet18")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("recipe=digits_resnet", "recipe=digits_resnet is not one of cifar10_resnet18"),
        ("recipe=null", "recipe"),
        ("topology=4", "topology=4"),
        ("dataset=null", "dataset"),
        ("--resolve", "--cfg"),
        ("epochs=0 hydra.run.dir=/proc/none/run", "/proc/none"),
    ],
)
def test_hydras_own_findings_are_one_message(tmp_path: Path, arguments: str, message: str) -> None:
    # epochs=0 is refused in any case: where the other mistake is let through, nothing trains.
    ended = say(tmp_path, *arguments.split(), "epochs=0")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert message in ended.stderr


def test_a_rejected_run_leaves_no_folder_above_its_own(tmp_path: Path) -> None:
    assert say(tmp_path, "epochs=0").returncode == 2
    assert list(tmp_path.iterdir()) == []
