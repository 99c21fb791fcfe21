"""The records of this machine's CPU: two models on one, two and four ranks, and the page of them.

    python -m benchmarks.record

The global batch is the same on every topology, so the work is. Each record replaces the one of its
name in ``benchmarks/results/``, once all have been made: a commit that is clean when this begins is
clean in all of them. Measure on a machine that does nothing else; about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.runs import ROOT, environment

TOPOLOGIES = ("1x1", "1x2", "1x4")


@dataclass(frozen=True)
class Planned:
    """What is recorded on each topology.

    Attributes:
        name: of the records, before the topology.
        overrides: of ``train.py``, besides the task and the topology.
    """

    name: str
    overrides: tuple[str, ...]


PLANNED = (
    Planned(
        "digits-resnet18-cpu",
        (
            *("recipe=digits_resnet18", "benchmark.warmup=3", "benchmark.steps=4"),
            *("benchmark.repeats=5", "benchmark.split_steps=8"),
        ),
    ),
    Planned(
        "synthetic-resnet50-cpu",
        (
            *("model=resnet50", "dataset=synthetic", "batch_size=null", "global_batch_size=8"),
            *("benchmark.warmup=1", "benchmark.steps=2", "benchmark.repeats=5"),
            *("benchmark.split_steps=4", "deadlines.step=600"),
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the records and the page; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where they go")
    parser.add_argument("--page", type=Path, default=report.PAGE, help="the page to write")
    parser.add_argument("--only", default="", help="those whose name holds this")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        made = []
        for planned in PLANNED:
            for topology in TOPOLOGIES:
                name = f"{planned.name}-{topology}"
                if options.only in name:
                    made.append(measure(name, planned, topology, Path(scratch)))
        options.results.mkdir(parents=True, exist_ok=True)
        for path in made:
            (options.results / path.name).write_bytes(path.read_bytes())
    return report.main(["--results", str(options.results), "--page", str(options.page)])


def measure(name: str, planned: Planned, topology: str, scratch: Path) -> Path:
    """Make one record.

    Raises:
        SystemExit: the run failed, which it has told itself.
    """
    print(f"== {name}", flush=True)
    began = time.monotonic()
    ended = subprocess.run(
        [
            *(sys.executable, "train.py", "task=benchmark", *planned.overrides),
            *(f"topology={topology}", "device=cpu", f"benchmark.name={name}"),
            *(f"benchmark.output={scratch / 'records'}", f"hydra.run.dir={scratch / name}"),
        ],
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if ended.returncode != 0:
        raise SystemExit(f"{name}: ended with status {ended.returncode}")
    print(f"   {time.monotonic() - began:.0f} s", flush=True)
    return scratch / "records" / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main())
