"""The documentation's commands: those marked so are run, every other one composes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from recipes import config
from recipes.config import Machine

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GPUS = Machine(visible=None, nvidia_driver=True, paddle_for_gpu=True)
# A fenced block of shell, with the mark before it if it is there.
BLOCK = re.compile(r"(<!-- test: run -->\n)?```(?:bash|sh)\n(.*?)```", re.DOTALL)


def commands(*, marked: bool) -> list[str]:
    """Every command that trains, of the blocks with or without the mark, and of tables."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for mark, block in BLOCK.findall(text):
            if bool(mark) == marked:
                joined = block.replace("\\\n", " ")
                found += [line.split("  #")[0].strip() for line in joined.splitlines()]
        if not marked:
            found += re.findall(r"\| `(python train\.py [^`]*)` \|", text)
    return [line for line in found if line.startswith(("python ", "docker run ", "docker/cluster"))]


def overrides_of(command: str) -> list[str]:
    """What stands after train.py, without flags of Hydra's."""
    words = shlex.split(command)
    after = words[words.index("train.py") + 1 :]
    return [word for word in after if not word.startswith("-") and "…" not in word]


def test_there_are_commands_of_both_kinds() -> None:
    assert len(commands(marked=True)) >= 4
    assert len(commands(marked=False)) >= 8


@pytest.mark.parametrize("command", [c for c in commands(marked=False) if "train.py" in c])
def test_every_command_composes(command: str) -> None:
    config.register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", overrides=overrides_of(command), return_hydra_config=False)
    config.from_hydra(composed, GPUS)


@pytest.mark.launch
@pytest.mark.parametrize("command", commands(marked=True))
def test_marked_commands_run(command: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, *shlex.split(command)[1:], f"hydra.run.dir={run}"]
    # The bare launcher would leave its logs beside the code.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PADDLE_LOG_DIR": str(tmp_path / "log")}
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert (run / "result.json").exists()


@pytest.mark.parametrize("target", ["image", "train", "test"])
def test_how_long_the_first_commands_take_is_said(target: str) -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(rf"^\| `make {target}` \| about \d+ minutes", text, re.MULTILINE)
    assert re.search(r"cores of an? .*\d+ GB of memory", text, re.DOTALL), "of which machine"
