"""Starting a run as a user does, and reading what it left behind. Nothing here imports Paddle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Every process of a run inherits it, so that a test finds its own processes and no others.
MARK = "FLEET_RECIPES_TEST_RUN"
DEADLINE = 240.0  # seconds for one run, on a machine that does other things too
_UNMARKED = ("FLEET_RECIPES_", "PADDLE_", "FLAGS_")


@dataclass(frozen=True)
class Finished:
    """A run that has ended, seen from outside."""

    folder: Path
    status: int
    output: str  # standard output
    errors: str  # standard error
    seconds: float

    @property
    def said(self) -> str:
        """Everything on the console."""
        return self.output + self.errors

    @property
    def result(self) -> dict[str, Any]:
        """``result.json``."""
        return dict(json.loads((self.folder / "result.json").read_text()))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind in ``metrics.jsonl``, in order."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def losses(self) -> list[float]:
        """The training loss of each logged step."""
        return [event["loss"] for event in self.events("train")]

    def log(self, rank: int) -> str:
        """A rank's log."""
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()


def timeless(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what depends on the clock."""
    clock = ("time", "images_per_second", "data_wait")
    return {key: value for key, value in event.items() if key not in clock}


class Running:
    """A run that is going on.

    Args:
        folder: its run folder.
        command: what to start, in the repository's root.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_UNMARKED)}
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **clean,
                "OMP_NUM_THREADS": "1",
                "FLEET_RECIPES_SECRET": "of the nodes of a test",
                MARK: self.mark,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, deadline: float = DEADLINE) -> Finished:
        """Wait for the end of the command.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        output, errors = self.process.communicate(timeout=deadline)
        seconds = time.monotonic() - self._started
        return Finished(self.folder, self.process.returncode, output, errors, seconds)

    def processes(self) -> dict[int, dict[str, str]]:
        """The living processes of this run by pid, with their environments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            # Another user's, gone by now, or a zombie.
            with contextlib.suppress(OSError):
                pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(pair.partition("=")[::2] for pair in pairs)
                if environment.get(MARK) == self.mark:
                    found[int(folder.name)] = environment
        return found

    def rank(self, number: int) -> int:
        """The pid of a rank: of its processes the one that started first."""
        return min(
            pid
            for pid, environment in self.processes().items()
            if environment.get("PADDLE_TRAINER_ID") == str(number)
        )

    def wait_until(self, condition: Callable[[], bool], deadline: float = DEADLINE) -> None:
        """Return once the condition holds while the run goes on.

        Raises:
            AssertionError: the run ended first, or the deadline passed.
        """
        end = time.monotonic() + deadline
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.finish().said}")
            if time.monotonic() > end:
                raise AssertionError(f"still waiting after {deadline:.0f} s")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Return once ``metrics.jsonl`` has the step."""
        file = self.folder / "metrics.jsonl"
        self.wait_until(lambda: file.exists() and f'"step": {step},' in file.read_text())

    def wait_for_nobody(self, deadline: float) -> None:
        """Return once no process of the run is left.

        Raises:
            AssertionError: naming those that are.
        """
        end = time.monotonic() + deadline
        while left := self.processes():
            if time.monotonic() > end:
                raise AssertionError(f"left behind: {sorted(map(_command_of, left))}")
            time.sleep(0.05)


@contextlib.contextmanager
def started(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> Iterator[Running]:
    """Start ``train.py`` on a run folder; on leaving, end whatever of it still runs.

    Args:
        launcher: arguments of the interpreter before ``train.py``.
    """
    command = [sys.executable, *launcher, "train.py", *overrides, f"hydra.run.dir={folder}"]
    with ended(Running(folder, command)) as running:
        yield running


@contextlib.contextmanager
def ended(running: Running) -> Iterator[Running]:
    """On leaving, end whatever of the run still runs."""
    try:
        yield running
    finally:
        for pid in running.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.kill()
        running.process.wait()


def launch(folder: Path, *overrides: str, launcher: Sequence[str] = ()) -> Finished:
    """Run to the end; arguments as for `started`."""
    with started(folder, *overrides, launcher=launcher) as running:
        return running.finish()


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"{pid}"
    return f"{pid} {' '.join(words)}"
