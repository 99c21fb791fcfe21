"""Whether the memory of a rank stays as it is over 2,000 steps.

    python -m benchmarks.memory

A small training runs with all that a run does: logging, an evaluation and a checkpoint after each
epoch, the first of which ends before step 100. Its resident memory is looked at several times a
second. Flat means that the mean over the last tenth of the steps is less than 1 % above the mean
over steps 100 to 300: such a mean does not see single allocations that come and go, and a leak of
4 KiB a step would be 1.5 % of 500 MiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks import table
from benchmarks.runs import ROOT, environment, told
from benchmarks.table import Row
from recipes.config import UserError
from recipes.telemetry import RunFolder, read_metrics

STEPS = 2000
FIRST = 100  # the step from which on memory must stay
WINDOW = 200
SECONDS_BETWEEN = 0.1
OVERRIDES = (
    *("model=paddleclas", "model.name=MobileNetV1_x0_25", "dataset=synthetic", "batch_size=4"),
    *("dataset.image_size=16", "dataset.num_classes=10", "dataset.train_size=360"),
    *("dataset.eval_size=100", "device=cpu", "epochs=1000", "log.every=10", "threads=1"),
    "optimizer.base_lr=0.001",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row; the exit status is 1 where the target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="changes to the training")
    options = parser.parse_args(arguments)
    with told():
        row = measure(options.steps, options.overrides)
    print(table.text([row]))
    return 0 if row.met else 1


def measure(steps: int = STEPS, overrides: Sequence[str] = ()) -> Row:
    """The row of the table.

    Raises:
        UserError: the training failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        samples = watch(steps, overrides, Path(scratch))
    before = [size for step, size in samples if FIRST <= step < FIRST + WINDOW]
    after = [size for step, size in samples if step >= steps - WINDOW]
    return Row(
        name=f"memory of a rank over {steps:,} steps",
        against=f"after step {FIRST}",
        target="flat: less than 1 % more",
        limit=1.01,
        better="lower",
        unit="MiB",
        ours=[fmean(after) / 2**20],
        peer=[fmean(before) / 2**20],
        note=f"means of {len(after)} and {len(before)} looks at the resident memory",
    )


def watch(steps: int, overrides: Sequence[str], scratch: Path) -> list[tuple[int, int]]:
    """The resident memory of a training's only rank: the last step that is logged, and bytes.

    Raises:
        UserError: the training failed.
    """
    run = RunFolder(scratch / "run")
    given = (*OVERRIDES, f"max_steps={steps}", *overrides, f"hydra.run.dir={run.path}")
    samples = []
    with (scratch / "console").open("w+") as console:
        process = subprocess.Popen(
            [sys.executable, "train.py", *given],
            cwd=ROOT,
            env=environment(),
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            seen = psutil.Process(process.pid)
            while process.poll() is None:
                events = read_metrics(run.metrics)
                step = events[-1]["step"] if events else 0
                size = resident(seen)
                if size is not None and step < steps:  # what follows is the end, not training
                    samples.append((step, size))
                time.sleep(SECONDS_BETWEEN)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            console.seek(0)
            raise UserError(f"the training failed:\n{console.read()[-2000:]}")
    return samples


def resident(process: psutil.Process) -> int | None:
    """Bytes; None where the process is ending."""
    try:
        size = process.memory_info().rss
    except psutil.NoSuchProcess:
        return None
    return int(size) or None


if __name__ == "__main__":
    sys.exit(main())
