"""What a checkpoint of ResNet-50 costs the steps around it.

    python -m benchmarks.checkpoint_stall

A training logs every step and saves after each few. A checkpoint is copied between two steps and
written behind those that follow, and takes processor time from them, so all steps from one
checkpoint to the next are looked at: what they took in all beyond as many steps that nothing
disturbed is the time that the checkpoint cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks import table
from benchmarks.runs import Runner, Setting, told
from benchmarks.table import Row
from recipes import pointers
from recipes.telemetry import RunFolder, read_metrics

EVERY = 6  # steps between two checkpoints
SAVES = 3
TAIL = 3  # steps before a checkpoint, by which the one before has been written
OVERRIDES = (
    *("model=resnet50", "dataset=synthetic", "dataset.train_size=100000", "dataset.eval_size=4"),
    *("dataset.image_size=64", "batch_size=8", "eval_batch_size=4", "device=cpu", "log.every=1"),
    *(f"save.every_steps={EVERY}", "save.keep=1", "optimizer.base_lr=0.001"),
    f"max_steps={EVERY * (SAVES + 1) + 1}",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row; the exit status is 1 where the target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_stall",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("overrides", nargs="*", help="changes to the training")
    options = parser.parse_args(arguments)
    with told():
        row = measure(options.overrides)
    print(table.text([row]))
    return 0 if row.met else 1


def measure(overrides: Sequence[str] = ()) -> Row:
    """The row of the table.

    Raises:
        UserError: the training failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting("stall", (*OVERRIDES, *overrides))
        with Runner(Path(scratch), 1, say=lambda _: None) as runner:
            job = runner.run([setting])["stall"]
        run = RunFolder(job.folder / "run")
        times = [event["time"] for event in read_metrics(run.metrics) if event["event"] == "train"]
        checkpoint = sum(
            path.stat().st_size for path in pointers.follow(run.checkpoints / "last").iterdir()
        )
    durations = [after - before for before, after in pairwise(times)]
    lost, undisturbed = stalls(durations, EVERY, TAIL)
    return Row(
        name="a checkpoint of ResNet-50 during training",
        against="one step",
        target="at most one step's time lost",
        limit=1.0,
        better="lower",
        unit="s",
        ours=lost,
        peer=undisturbed,
        note=f"{checkpoint / 2**20:,.0f} MiB each; time lost in the {EVERY} steps after each",
    )


def stalls(durations: Sequence[float], every: int, tail: int) -> tuple[list[float], list[float]]:
    """The time that each checkpoint cost, and the steps that none disturbed.

    Args:
        durations: seconds from the end of step i + 1 to the end of step i + 2. A checkpoint of
            step `every`, made after it has ended, is so in durations[every - 1].
        every: steps between two checkpoints.
        tail: the last steps before a checkpoint, which the one before does not disturb.

    Returns:
        For each checkpoint that `every` steps follow, what these took beyond `every` times the
        median of the undisturbed steps; and the latter.
    """
    first = every - 1
    windows = [
        durations[start : start + every]
        for start in range(first, len(durations) - every + 1, every)
    ]
    undisturbed = [seconds for window in windows for seconds in window[-tail:]]
    usual = median(undisturbed)
    return [sum(window) - every * usual for window in windows], undisturbed


if __name__ == "__main__":
    sys.exit(main())
