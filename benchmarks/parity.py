"""Is it the same training? Runs two settings and compares their losses step by step.

    python -m benchmarks.parity --a topology=1x1 --b topology=1x4 recipe=digits_resnet18
    python -m benchmarks.parity --commit-a HEAD~1 --commit-b HEAD recipe=digits_resnet18
    python -m benchmarks.parity --matrix

The exit status is 0 where they agree, 1 where they do not, and 2 where a run could not be made.
``--matrix``, which `make parity` runs, compares every topology with one process. Unless an override
says otherwise, both sides compute in float64 on CPU with one thread a rank and sync_bn=true, and
take 100 steps, all of them logged. The output folder gets ``comparison.json``, ``parity.png`` and a
folder for each run.

Where they do not agree, the likely cause is named in the order data, model, random numbers (see
`comparison`); for that both are run once more, up to the first step that differs, unless they ended
there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.comparison import Comparison, compare
from benchmarks.runs import Job, Runner, Setting, read_record, told, with_model

TOLERANCE = 1e-9
STEPS = 100
DEFAULTS = (
    *("dtype=float64", "device=cpu", "sync_bn=true", "threads=1"),
    *("log.every=1", "log.images=0", "log.samples=true"),
)
# Its global batch of 64 makes unequal shares on three ranks: 22, 21 and 21.
DIGITS = ("recipe=digits_resnet18",)


@dataclass(frozen=True)
class Row:
    """Two settings to compare, by name."""

    a: str
    b: str


SETTINGS = {
    "1x1": ("topology=1x1",),
    "1x2": ("topology=1x2",),
    "1x3": ("topology=1x3",),
    "1x4": ("topology=1x4",),
    "2x2": ("topology=2x2",),
    "1x1-accumulate-4": ("topology=1x1", "accumulate=4", "sync_bn=false"),
    "1x2-accumulate-2": ("topology=1x2", "accumulate=2", "sync_bn=false"),
    "1x4-own-statistics": ("topology=1x4", "sync_bn=false"),
}
MATRIX = (
    Row("1x1", "1x2"),
    Row("1x1", "1x3"),
    Row("1x1", "1x4"),
    Row("1x1", "2x2"),
    Row("1x1-accumulate-4", "1x2-accumulate-2"),
    Row("1x1-accumulate-4", "1x4-own-statistics"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare, report; the exit status."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with told(), Runner(options.output, options.at_once, options.image, say) as runner:
        settings, rows = chosen(options)
        jobs = runner.run(settings)
        found = {(row.a, row.b): compared(runner, jobs, row, options.tolerance) for row in rows}
        report(found, jobs, options)
    return 0 if all(each.agree for each in found.values()) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; overrides may stand anywhere among the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Exit status: 0 they agree, 1 they differ, 2 a run could not be made.",
    )
    add = parser.add_argument
    add("--a", metavar="OVERRIDES", default="", help="what only side a has, in one word")
    add("--b", metavar="OVERRIDES", default="", help="what only side b has")
    add("--commit-a", metavar="REV", help="the code of side a (default: this checkout)")
    add("--commit-b", metavar="REV", help="the code of side b")
    add("--matrix", action="store_true", help="every topology of one and of two nodes")
    add("--rows", metavar="NAME,…", help=f"of the matrix, those with b in {','.join(SETTINGS)}")
    add("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    add("--tolerance", type=float, default=TOLERANCE, help="relative (default: %(default)s)")
    add("--at-once", type=int, default=2, help="runs side by side (default: %(default)s)")
    add("--image", help="for several nodes: an image of this code")
    add("--output", type=Path, help="default: outputs/TIME-parity")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="what both sides have")
    options = parser.parse_intermixed_args(arguments)
    pair = options.a or options.b or options.commit_a or options.commit_b
    if bool(pair) == options.matrix:
        parser.error("give --matrix, or how the sides differ: --a, --b, --commit-a, --commit-b")
    if options.rows and not options.matrix:
        parser.error("--rows is for --matrix")
    if options.steps < 1 or options.at_once < 1 or not 0 <= options.tolerance < math.inf:
        parser.error("--steps and --at-once are at least 1, --tolerance at least 0")
    options.output = options.output or Path("outputs") / time.strftime("%Y%m%d-%H%M%S-parity")
    return options


def chosen(options: argparse.Namespace) -> tuple[list[Setting], list[Row]]:
    """What to run and what to compare."""
    shared = (*DEFAULTS, f"max_steps={options.steps}")
    if not options.matrix:
        both = (*shared, *options.overrides)
        a = Setting("a", (*both, *shlex.split(options.a)), options.commit_a)
        b = Setting("b", (*both, *shlex.split(options.b)), options.commit_b)
        return [a, b], [Row("a", "b")]
    wanted = options.rows.split(",") if options.rows else [row.b for row in MATRIX]
    rows = [row for row in MATRIX if row.b in wanted]
    if len(rows) < len(wanted):
        known = ", ".join(row.b for row in MATRIX)
        raise SystemExit(f"error: --rows={options.rows}: the rows are {known}")
    names = dict.fromkeys(name for row in rows for name in (row.a, row.b))
    common = (*shared, *DIGITS, *options.overrides)
    return [Setting(name, (*common, *SETTINGS[name])) for name in names], rows


def compared(runner: Runner, jobs: dict[str, Job], row: Row, tolerance: float) -> Comparison:
    """The comparison of two runs, looked into where they do not agree."""
    pair = [jobs[row.a], jobs[row.b]]
    a, b = (read_record(job, job.setting.name) for job in pair)
    found = compare(a, b, tolerance)
    if found.agree:
        return found
    until = found.first_over
    if until is not None and not a.statistics_step == b.statistics_step == until:
        # Later the weights differ, and with them the statistics of all layers.
        again = runner.run(
            [
                replace(
                    job.setting,
                    name=f"{job.setting.name}-to-step-{until}",
                    overrides=(*job.setting.overrides, f"max_steps={until}"),
                )
                for job in pair
            ]
        )
        a, b = (
            replace(
                record,
                **{
                    key: getattr(read_record(job, record.name), key)
                    for key in ("statistics", "statistics_step")
                },
            )
            for record, job in zip((a, b), again.values(), strict=True)
        )
    return compare(with_model(a, pair[0]), with_model(b, pair[1]), tolerance)


def report(
    found: dict[tuple[str, str], Comparison], jobs: dict[str, Job], options: argparse.Namespace
) -> None:
    """Print a line for each comparison and its cause, and leave the files."""
    from benchmarks.curves import plot

    every = list(found.values())
    plot(every, options.output / "parity.png", "training loss, and how far the curves are apart")
    content = [as_json(each, jobs) for each in every]
    (options.output / "comparison.json").write_text(json.dumps(content, indent=1) + "\n")
    width = max(len(f"{each.a.name} and {each.b.name}") for each in every)
    for each in every:
        print(line(each, width, where(each, jobs)))
        if each.cause is not None:
            print(f"  likely cause: {each.cause.kind}\n    {each.cause.explanation}")
    print(f"curves and differences: {options.output / 'parity.png'}", flush=True)


def line(found: Comparison, width: int, where: str = "") -> str:
    """One comparison in one line."""
    names = f"{found.a.name} and {found.b.name}"
    verdict = "agree" if found.agree else "DIFFER"
    if found.first_over is not None:
        verdict += f" from step {found.first_over}"
    return (
        f"{names:<{width}}  {len(found.steps):4} steps  largest relative difference "
        f"{found.largest:8.1e}  {verdict} (tolerance {found.tolerance:.0e}){where}"
    )


def where(found: Comparison, jobs: dict[str, Job]) -> str:
    """How the nodes of a side were made, unless all ran on this machine as one node."""
    places = [jobs[side.name].where for side in (found.a, found.b)]
    return "".join(f"; {place}" for place in places if place != "this machine")


def as_json(found: Comparison, jobs: dict[str, Job]) -> dict[str, Any]:
    """A comparison as ``comparison.json`` holds it; infinite differences are null."""
    return {
        "a": found.a.name,
        "b": found.b.name,
        "overrides": [list(jobs[side.name].setting.overrides) for side in (found.a, found.b)],
        "commits": [jobs[side.name].setting.commit for side in (found.a, found.b)],
        "where": [jobs[side.name].where for side in (found.a, found.b)],
        "tolerance": found.tolerance,
        "agree": found.agree,
        "largest": found.largest if math.isfinite(found.largest) else None,
        "first_over": found.first_over,
        "missing": found.missing,
        "cause": found.cause and vars(found.cause),
        "steps": found.steps,
        "differences": [each if math.isfinite(each) else None for each in found.differences],
    }


def say(text: str) -> None:
    """A line on how far it is."""
    print(f"parity: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
