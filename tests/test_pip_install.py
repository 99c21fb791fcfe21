"""How pip's output becomes a line of progress. tests/test_setup.py runs the real pip."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docker"))

import pip_install

# What pip 23 and 25 print, the addresses changed.
PIP_23 = """\
Collecting aa==1.0 (from -r docker/some.lock (line 1))
  Using cached aa-1.0-py3-none-any.whl (512 bytes)
Collecting big-one==2.0 (from -r docker/some.lock (line 3))
  Downloading big_one-2.0-cp311-cp311-manylinux_2_28_x86_64.whl (189.5 MB)
Requirement already satisfied: there==3.0 in ./.venv/lib/python3.11/site-packages (some.lock)
Collecting source==1 (from -r docker/some.lock (line 9))
  Downloading https://index.invalid/packages/source-1.tar.gz (500.0 kB)
  Preparing metadata (pyproject.toml): started
Building wheels for collected packages: source
  Building wheel for source (pyproject.toml): started
Installing collected packages: aa, big-one, source
Successfully installed aa-1.0 big-one-2.0 source-1
"""
PIP_25 = """\
Collecting aa==1.0 (from -r docker/some.lock (line 1))
  Downloading aa-1.0-py3-none-any.whl.metadata (1.5 kB)
Collecting big-one==2.0 (from -r docker/some.lock (line 3))
  Downloading big_one-2.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (2.0 kB)
Downloading aa-1.0-py3-none-any.whl (250 kB)
Downloading big_one-2.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.5 GB)
Installing collected packages: aa, big-one
"""


def follow(output: str, total: int, monkeypatch: pytest.MonkeyPatch) -> pip_install.Progress:
    monkeypatch.setattr(pip_install, "SECONDS_BETWEEN_LINES", 0.0)
    progress = pip_install.Progress("setup", total)
    for line in output.splitlines(keepends=True):
        progress.read(line)
    return progress


def test_packages_and_sizes_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(PIP_23, 4, monkeypatch).end(completed=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "setup: 1 of 4 packages, 0 MB: aa (512 bytes)",
        "setup: 2 of 4 packages, 190 MB: big_one (189.5 MB)",
    ]
    assert lines[-2:] == [
        "setup: 4 of 4 packages, 190 MB: unpacking",
        "setup: 4 packages, 190 MB fetched, 0:00 min",
    ]


def test_what_only_describes_a_package_is_not_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(PIP_25, 2, monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1].startswith("setup: 2 of 2 packages, 1500 MB")


def test_elsewhere_than_on_a_terminal_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    progress = pip_install.Progress("setup", 100)
    for number in range(100):
        progress.read(f"  Downloading p{number}-1-py3-none-any.whl (1.0 MB)")
    progress.end(completed=True)
    assert capsys.readouterr().out.splitlines() == ["setup: 100 packages, 100 MB fetched, 0:00 min"]


def test_an_error_is_shown_from_its_first_line_on(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    log.write_text("Collecting aa\n" * 90 + "ERROR: No matching distribution\n   for aa==1\n")
    told = pip_install.explain(log).splitlines()
    assert told == [
        "ERROR: No matching distribution",
        "   for aa==1",
        f"All that pip said is in {log}.",
    ]
