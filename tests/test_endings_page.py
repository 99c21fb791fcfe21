"""docs/endings.md tells what the code does: its exit statuses and its signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import ending
from recipes.config import DeadlinesConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "endings.md").read_text()
RUN = """
import signal, sys, time
from recipes.console import outlive_console
from recipes.ending import Interrupted, Watch, status_of
outlive_console()
watch = Watch().start()
try:
    with watch.run(9, "ending", lambda: None):
        print("ready", flush=True)
        time.sleep(1.5)
except Interrupted as interrupt:
    sys.exit(status_of(interrupt.number))
"""


def table(title: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_statuses_are_those_of_the_code() -> None:
    rows = {row[0]: row for row in table("Exit statuses")}
    assert list(rows) == ["0", "1", "2", "128 + N", "137"]
    assert rows[str(ending.COMPLETED)][1] == "completed"
    assert rows[str(ending.FAILED)][1].startswith("failed after it had begun")
    assert rows[str(ending.REFUSED)][1].startswith("refused before it began")
    told = dict(re.findall(r"(\d{3}) (SIG\w+)", rows["128 + N"][1]))
    assert told == {str(ending.status_of(number)): number.name for number in ending.POLITE}
    assert str(ending.status_of(signal.SIGKILL)) in rows


def test_the_statuses_in_the_source_are_the_named_ones() -> None:
    """Nobody exits with a number of their own."""
    for path in [ROOT / "train.py", *(ROOT / "recipes").glob("*.py")]:
        for found in re.findall(r"sys\.exit\((\d+)\)|os\._exit\((\d+)\)", path.read_text()):
            assert int("".join(found)) in (ending.FAILED, ending.REFUSED), path


def test_every_signal_that_asks_for_the_end_is_told() -> None:
    asks = {row[0] for row in table("Signals") if row[2].startswith("asks the run to end")}
    assert asks == {number.name for number in ending.POLITE}


@pytest.mark.parametrize("row", table("Signals"), ids=lambda row: row[0])
def test_a_signal_does_what_the_page_says(row: list[str]) -> None:
    number = signal.Signals[row[0]]
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    if row[2].startswith(("halts", "as SIGSTOP")):
        time.sleep(0.2)
        run.send_signal(signal.SIGCONT)
    status = run.wait(20)
    if row[2].startswith("asks the run to end"):
        assert status == 128 + number
    elif row[2].startswith("ends it at once"):
        assert status == -number
    else:
        assert status == 0


def test_the_grace_is_the_one_told() -> None:
    assert f"`deadlines.grace` ({DeadlinesConfig.grace:g} s)" in PAGE
    assert ending.saving_seconds(100.0) == 96.5  # 3.5 s for the ends of the processes
