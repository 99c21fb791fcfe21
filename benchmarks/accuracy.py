"""Final accuracy of several settings, each with several seeds: means, and how far they are apart.

    python -m benchmarks.accuracy --setting topology=1x1 --setting "topology=1x2 sync_bn=true" \\
        recipe=digits_resnet18

In float32 two trainings part after a few steps by rounding alone, whatever is right with them, so
what can be compared is where they arrive, over several seeds. The exit status is 0 where all means
lie within --tolerance of the first setting's. The output folder gets ``accuracy.json`` and a folder
for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.runs import Runner, Setting, told
from recipes.telemetry import RunFolder, read_metrics, read_result

TOLERANCE = 0.01
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Scores:
    """What the seeds of one setting ended with, in the order of the seeds.

    Attributes:
        top1: final accuracy, fractions.
        loss: final loss on the held-out images.
        first_losses: training loss of the first step.
    """

    setting: str
    top1: list[float]
    loss: list[float]
    first_losses: list[float]

    @property
    def mean(self) -> float:
        """Of the accuracies."""
        return fmean(self.top1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each setting; the exit status."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with told(), Runner(options.output, options.at_once, None, say) as runner:
        jobs = runner.run(settings_of(options))
        found = []
        for number, setting in enumerate(options.setting):
            folders = [RunFolder(jobs[f"{number}-seed-{s}"].folder / "run") for s in options.seeds]
            found.append(read_scores(setting, folders))
    (options.output / "accuracy.json").write_text(
        json.dumps([*map(asdict, found)], indent=1) + "\n"
    )
    for scores in found:
        print(line(scores, found[0]))
    return 0 if all(within(scores, found[0], options.tolerance) for scores in found) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=(__doc__ or "").partition("\n\n")[0]
    )
    add = parser.add_argument
    add("--setting", action="append", required=True, help="overrides in one word; give it twice")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="default: 0 1 2")
    add("--tolerance", type=float, default=TOLERANCE, help="of the means (default: %(default)s)")
    add("--at-once", type=int, default=2, help="runs side by side (default: %(default)s)")
    add("--output", type=Path, help="default: outputs/TIME-accuracy")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="what all have")
    options = parser.parse_intermixed_args(arguments)
    options.output = options.output or Path("outputs") / time.strftime("%Y%m%d-%H%M%S-accuracy")
    return options


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """One for each setting and seed, seeds outermost, so that a part of it compares as well."""
    shared = ("device=cpu", "threads=1", "log.every=1", "log.images=0", *options.overrides)
    return [
        Setting(f"{number}-seed-{seed}", (*shared, *shlex.split(setting), f"seed={seed}"))
        for seed in options.seeds
        for number, setting in enumerate(options.setting)
    ]


def read_scores(setting: str, runs: Sequence[RunFolder]) -> Scores:
    """From the run folders of one setting's seeds."""
    finals = [read_result(run).final or {} for run in runs]
    firsts = [next(e for e in read_metrics(run.metrics) if e["event"] == "train") for run in runs]
    return Scores(
        setting,
        [float(final["top1"]) for final in finals],
        [float(final["loss"]) for final in finals],
        [float(first["loss"]) for first in firsts],
    )


def within(scores: Scores, first: Scores, tolerance: float) -> bool:
    """Whether the mean accuracies of two settings are no further apart than `tolerance`."""
    return abs(scores.mean - first.mean) <= tolerance


def line(scores: Scores, first: Scores) -> str:
    """A setting in one line: mean, spread, each seed, and how far it is from the first setting."""
    spread = stdev(scores.top1) if len(scores.top1) > 1 else 0.0
    each = ", ".join(f"{top1:.2%}" for top1 in scores.top1)
    away = max(abs(a - b) / b for a, b in zip(scores.first_losses, first.first_losses, strict=True))
    return (
        f"{scores.setting:<30}  top-1 {scores.mean:.2%} +- {spread:.2%} ({each})  "
        f"{scores.mean - first.mean:+.2%} of the first; loss {fmean(scores.loss):.4f}; "
        f"first step's training loss {away:.1e} away"
    )


def say(text: str) -> None:
    """A line on how far it is."""
    print(f"accuracy: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
