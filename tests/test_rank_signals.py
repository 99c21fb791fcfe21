"""A rank heeds its launcher's signal, and nobody else's."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import rank_signals
from recipes.ending import POLITE

ROOT = Path(__file__).resolve().parents[1]
RANK = """
import time
from recipes import rank_signals
rank_signals.heed_launcher()
print("ready", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def a_rank() -> Iterator[subprocess.Popen[str]]:
    """One whose launcher is this process."""
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=rank_signals.block,
    )
    try:
        yield rank
    finally:
        rank.kill()
        rank.wait()


def send_as_another(number: int, process: subprocess.Popen[str]) -> None:
    subprocess.run(["/bin/sh", "-c", f"kill -{number} {process.pid}"], check=True)


@pytest.mark.parametrize("early", [False, True])
def test_signals_of_others_are_the_parents_business(early: bool) -> None:
    with a_rank() as rank:
        assert rank.stdout is not None
        if not early:
            assert rank.stdout.readline() == "ready\n"
        for number in POLITE:
            send_as_another(number, rank)
        if early:  # before it could arrange for anything
            assert rank.stdout.readline() == "ready\n"
        time.sleep(0.3)
        assert rank.poll() is None
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(10) == -signal.SIGTERM
