"""Every speed that this project claims, measured beside its peer on this machine.

    make bench
    python -m benchmarks.bench --rows memory "start time"

Each row is a program of its own besides. The table goes to ``benchmarks/results``, as
``bench-DATE.json`` and ``.md``, with the machine's facts. The exit status is 0 where every target
is met, 1 where one is missed, 2 where a row could not be measured; the others are measured and
written all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import checkpoint_stall, loaders, loop_cost, memory, prepared, start_time, table
from benchmarks.loaders import Measuring
from benchmarks.runs import told
from benchmarks.table import Row
from recipes.config import UserError

RESULTS = Path(__file__).resolve().parent / "results"

ROWS: dict[str, Callable[[Measuring], Row]] = {
    "cifar10": loaders.cifar10_row,
    "paddleclas": loaders.paddleclas_row,
    "dali": loaders.dali_row,
    "prepared": prepared.prepared_row,
    "loop cost": lambda _: loop_cost.measure(),
    "start time": lambda _: start_time.measure(),
    "checkpoint": lambda _: checkpoint_stall.measure(),
    "memory": lambda _: memory.measure(),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: benchmarks/results")
    options = parser.parse_args(arguments)
    with told():
        rows, failed = measured(options.rows)
        if rows:
            print(table.text(rows))
            for path in table.write(rows, options.output):
                print(f"written: {os.path.relpath(path)}")
    for name, error in failed.items():
        print(f"error: {name} could not be measured: {error}", file=sys.stderr)
    return 2 if failed else int(not all(row.met for row in rows))


def measured(names: Sequence[str]) -> tuple[list[Row], dict[str, Exception]]:
    """The rows of these names, one after the other, and why others have failed."""
    rows: list[Row] = []
    failed: dict[str, Exception] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        measuring = Measuring(Path(scratch))
        for number, name in enumerate(names, 1):
            started = time.monotonic()
            try:
                rows.append(ROWS[name](measuring))
            except Exception as error:  # the other rows must not be lost for it
                failed[name] = error
                if not isinstance(error, UserError):
                    traceback.print_exc()
            seconds = time.monotonic() - started
            print(f"bench: {number}/{len(names)} {name}: {seconds:.0f} s", file=sys.stderr)
    return rows, failed


if __name__ == "__main__":
    sys.exit(main())
