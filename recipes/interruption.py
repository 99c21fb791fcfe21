"""What an interrupted training has kept, what it has lost, and how it goes on."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from recipes.config import Config, UserError
from recipes.manifest import MANIFEST
from recipes.telemetry import RunFolder

_NAMED_AGAIN = re.compile(r"\+*(resume|hydra\.run\.dir|restarts)=")

# What a person started train.py with here, where it was not Python itself (docker/train.sh).
STARTED_WITH_VARIABLE = "FLEET_RECIPES_STARTED_WITH"


def last_saved(run_folder: RunFolder) -> int | None:
    """The optimizer steps of the most advanced checkpoint; None where there is none."""
    steps = [
        int(path.name.removeprefix("step-"))
        for path in run_folder.checkpoints.glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and (path / MANIFEST).exists()
    ]
    return max(steps, default=None)


def loss(config: Config, began: int, done: int, saved: int | None) -> UserError | None:
    """What is lost of a training that went on after step `began`, ended after step `done`, and has
    step `saved` in its last checkpoint (None: it has none); None where nothing is."""
    if max(saved or 0, began) >= done:
        return None
    first = max(saved or 0, began) + 1
    lost = f"step {done} is" if first == done else f"steps {first} to {done} are"
    kept = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint"
    return UserError(
        f"{lost} lost: no checkpoint could be taken before the end "
        f"(deadlines.grace={config.deadlines.grace:g}); {kept}",
        "deadlines.grace=… longer than a step and its checkpoint take, with as much notice from "
        "whoever sends the signal (docs/endings.md); save.every_steps=… takes more checkpoints",
    )


def command_to_go_on(settings: Sequence[str], folder: Path) -> str:
    """The command that continues the run of a folder.

    Args:
        settings: the overrides that it was started with; of one run of several, its own.
    """
    kept = [each for each in settings if not _NAMED_AGAIN.match(each)]
    started_with = os.environ.get(STARTED_WITH_VARIABLE)
    if started_with and folder.is_relative_to(Path.cwd()):  # it may run elsewhere the next time
        folder = folder.relative_to(Path.cwd())
    words = ["train.py", *kept, "resume=auto", f"hydra.run.dir={folder}"]
    return f"{started_with or 'python'} {shlex.join(words)}"
