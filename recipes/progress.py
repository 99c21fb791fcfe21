"""How far a run is, shown on a terminal, or told to the parent that owns the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol

# Lines that begin with it are for the parent's display and not for the log (RFC 7464).
RECORD = "\x1e"
_SECONDS_BETWEEN = 0.2


class StepDisplay(Protocol):
    """Shows optimizer steps."""

    def start(self, total: int, done: int) -> None:
        """Begin with `done` of `total` steps."""

    def advance(self, done: int) -> None:
        """`done` steps have been taken."""

    def stop(self) -> None:
        """Leave the terminal as it was."""


class NoDisplay:
    """Where nobody looks."""

    def start(self, total: int, done: int) -> None:
        """Show nothing."""

    def advance(self, done: int) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


class TellingDisplay:
    """Another display, with a word where it begins.

    Args:
        other: what shows the steps.
        begun: called before the first of them.
    """

    def __init__(self, other: StepDisplay, begun: Callable[[], None]) -> None:
        self._other = other
        self._begun = begun

    def start(self, total: int, done: int) -> None:
        """Tell, and show."""
        self._begun()
        self._other.start(total, done)

    def advance(self, done: int) -> None:
        """Show it."""
        self._other.advance(done)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._other.stop()


class TerminalDisplay:
    """A progress bar below the log lines.

    Args:
        unit: what is counted.
    """

    def __init__(self, unit: str = "step") -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        # No thread of its own: it redraws when a step or a line comes.
        self._bars = Progress(
            TextColumn(unit),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bars.add_task("", total=None, visible=False)

    def start(self, total: int, done: int) -> None:
        """Draw the bar."""
        self._bars.update(self._task, total=total, completed=done, visible=True)
        self._bars.start()

    def advance(self, done: int) -> None:
        """Move the bar."""
        self._bars.update(self._task, completed=done, refresh=True)

    def stop(self) -> None:
        """Remove the bar."""
        self._bars.stop()

    def apply(self, record: str) -> None:
        """Show what a rank's `ReportingDisplay` told."""
        told = json.loads(record.removeprefix(RECORD))
        if told["call"] == "start":
            self.start(told["total"], told["done"])
        elif told["call"] == "advance":
            self.advance(told["done"])
        else:
            self.stop()


class ReportingDisplay:
    """Tells the parent process, through standard output."""

    def __init__(self) -> None:
        self._told = 0.0

    def start(self, total: int, done: int) -> None:
        """Tell the size of the run."""
        self._tell(call="start", total=total, done=done)

    def advance(self, done: int) -> None:
        """Tell the steps done, at most five times a second."""
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN:
            self._told = now
            self._tell(call="advance", done=done)

    def stop(self) -> None:
        """Tell the end."""
        self._tell(call="stop")

    def _tell(self, **content: object) -> None:
        sys.stdout.write(f"{RECORD}{json.dumps(content)}\n")
        sys.stdout.flush()
