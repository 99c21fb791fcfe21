"""How far a run is: told by a rank, shown by its parent."""

from __future__ import annotations

import io
import json
import sys
import time

import pytest

from recipes.progress import RECORD, NoDisplay, ReportingDisplay, StepDisplay, TerminalDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    *lines, rest = capsys.readouterr().out.split("\n")  # `splitlines` would cut at RECORD too
    assert rest == ""
    assert all(line.startswith(RECORD) for line in lines)
    return [json.loads(line.removeprefix(RECORD)) for line in lines]


def test_a_rank_tells_start_steps_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    display: StepDisplay = ReportingDisplay()
    display.start(100, 40)
    display.advance(41)
    display.stop()
    assert told(capsys) == [
        {"call": "start", "total": 100, "done": 40},
        {"call": "advance", "done": 41},
        {"call": "stop"},
    ]


def test_steps_are_told_at_most_five_times_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    display, clock = ReportingDisplay(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for step in range(1, 101):
        clock += 0.01
        display.advance(step)
    steps = [each["done"] for each in told(capsys)]
    assert 5 <= len(steps) <= 6
    assert steps[0] == 1


def test_the_parent_shows_what_a_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    shown = TerminalDisplay()
    for record in (
        {"call": "start", "total": 100, "done": 40},
        {"call": "advance", "done": 57},
        {"call": "stop"},
    ):
        shown.apply(RECORD + json.dumps(record))
    assert "57/100" in terminal.getvalue()


def test_a_bar_stays_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    display = TerminalDisplay()
    display.start(10, 0)
    print("a log line")
    display.advance(3)
    display.stop()
    text = terminal.getvalue()
    assert "a log line\n" in text
    assert text.rindex("3/10") > text.index("a log line")
    assert text.endswith(("\x1b[2K", "\x1b[?25h"))  # the bar is gone, the cursor is back
    display.stop()  # a second time does no harm


def test_without_a_terminal_there_are_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = NoDisplay()
    display.start(10, 0)
    display.advance(3)
    display.stop()
    assert capsys.readouterr().out == ""
