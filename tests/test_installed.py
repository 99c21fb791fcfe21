"""A Python without the packages is told so in one message, whichever program it was to run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = [
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
]


@pytest.mark.parametrize(
    "program",
    [["train.py"], ["train.py", "--help"], *(["-m", f"benchmarks.{b}"] for b in BENCHMARKS)],
)
def test_a_python_without_the_packages_is_told_in_one_message(program: list[str]) -> None:
    # -S: without site-packages, as the system's Python is beside .venv.
    done = subprocess.run(
        [sys.executable, "-S", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: this Python, ")
    assert "does not have hydra, omegaconf, numpy" in done.stderr
    assert "make setup" in done.stderr
    assert "source .venv/bin/activate" in done.stderr
    assert "Traceback" not in done.stderr
