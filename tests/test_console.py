"""A process outlives its standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Writes more than any buffer holds, through every way that leads to the streams, and what is left
# in the buffers when Python ends.
SAY = """
import logging, os, sys
from recipes.console import outlive_console
outlive_console()
logging.basicConfig(stream=sys.stdout)
for number in range(3000):
    print("x" * 100)
    print("x" * 100, file=sys.stderr)
    logging.warning("\\udce9 %d", number)
sys.stdout.write("left in the buffer")
opened = os.open(os.devnull, os.O_RDWR)
with open(sys.argv[1], "w") as done:
    done.write(f"{opened}")
sys.exit(7)
"""


def say(tmp_path: Path, redirect: str) -> tuple[subprocess.CompletedProcess[str], str]:
    done = tmp_path / "done"
    command = f'"$@" {redirect}'
    ended = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-c", SAY, str(done)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended, done.read_text()


@pytest.mark.parametrize(
    "redirect",
    [
        "",
        "| head -1; exit ${PIPESTATUS[0]}",
        "2>&1 | head -1; exit ${PIPESTATUS[0]}",
        "> /dev/full",
        "> /dev/full 2>&1",
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        "| true; exit ${PIPESTATUS[0]}",
    ],
)
def test_a_console_that_fails_changes_nothing(tmp_path: Path, redirect: str) -> None:
    ended, opened = say(tmp_path, redirect)
    assert ended.returncode == 7, ended.stderr[-2000:]
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "Error" not in ended.stdout + ended.stderr
    assert int(opened) > 2  # no file takes the number of a stream


def test_the_list_of_backbones_may_be_cut() -> None:
    command = f"{sys.executable} -m recipes.backbones | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == 1


def test_what_is_said_arrives(tmp_path: Path) -> None:
    ended, _ = say(tmp_path, "")
    assert ended.stdout.count("x" * 100) == 3000
    assert ended.stdout.endswith("left in the buffer")
    assert "\\udce9 2999" in ended.stdout
    assert ended.stderr.count("x" * 100) == 3000


def test_a_terminal_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    leader, terminal = os.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", SAY, str(tmp_path / "done")],
        cwd=ROOT,
        stdout=terminal,
        stderr=terminal,
        stdin=terminal,
    )
    os.close(terminal)
    assert os.read(leader, 100)
    os.close(leader)
    assert running.wait(60) == 7
