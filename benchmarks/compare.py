"""Two benchmark records: what differs in their set-up, and whether their speeds differ.

    python -m benchmarks.compare benchmarks/results/A.json benchmarks/results/B.json

Speeds differ where the two-sided Mann-Whitney U test of the repetitions gives a probability below
0.01. It ranks the samples and does not suppose that they are normally distributed, which times on
a computer are not: most are near the fastest possible, and some are much slower. With five
repetitions each, the default, that is the case exactly where the ranges do not overlap; more
repetitions let single outliers cross. Fewer than five a side cannot reach that probability, and are
not judged. The test speaks of these two runs: repetitions of one run share its luck with the
machine, so a small difference between two settings wants several runs of each.

The exit status: 0 the speeds do not differ beyond their spread, 1 they do, 3 there are too few
repetitions to tell, 2 a record cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu

from benchmarks.runs import flatten, told
from benchmarks.table import aligned
from recipes.benchmark import record
from recipes.benchmark.record import Record, Throughput

PROBABILITY = 0.01
FEWEST = 5  # repetitions a side, of which the test can tell anything at that probability
# Names that a user chose for the record itself.
_NO_SETTINGS = ("config.benchmark.name",)
WIDTH = 44  # of a value in the table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("a", type=Path, metavar="A", help="a record")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    options = parser.parse_args(arguments)
    with told():
        a, b = record.read(options.a), record.read(options.b)
    names = options.a.stem, options.b.stem
    print(describe_setup(a, b, names))
    print()
    print(describe_speeds(a, b, names))
    return {False: 0, True: 1, None: 3}[differ(a.throughput, b.throughput)]


def differences(a: Record, b: Record) -> list[tuple[str, Any, Any]]:
    """The settings, versions and facts that differ: name, A's value, B's value."""
    flat_a, flat_b = (_facts(each) for each in (a, b))
    keys = [*flat_a, *(key for key in flat_b if key not in flat_a)]
    return [
        (key, flat_a.get(key), flat_b.get(key))
        for key in keys
        if flat_a.get(key) != flat_b.get(key) and key not in _NO_SETTINGS
    ]


def differ(a: Throughput, b: Throughput) -> bool | None:
    """Whether the speeds differ beyond their spread; None where there are too few samples."""
    probability = probability_of(a.samples, b.samples)
    return None if probability is None else probability < PROBABILITY


def probability_of(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Of ranks as far apart as these, were both drawn from one distribution; None: too few."""
    if min(len(a), len(b)) < FEWEST:
        return None
    return float(mannwhitneyu(a, b, alternative="two-sided").pvalue)


def describe_setup(a: Record, b: Record, names: tuple[str, str]) -> str:
    """What differs, as a table."""
    found = differences(a, b)
    if not found:
        return "set-up: the same"
    rows = [(key, *(_short(value) for value in pair)) for key, *pair in found]
    return aligned([("set-up", *names), *rows])


def describe_speeds(a: Record, b: Record, names: tuple[str, str]) -> str:
    """Both speeds, and the verdict."""
    rows = [
        (
            name,
            f"{each.throughput.median:,.1f}",
            f"{each.throughput.lowest:,.1f} to {each.throughput.highest:,.1f}",
            str(len(each.throughput.samples)),
        )
        for name, each in zip(names, (a, b), strict=True)
    ]
    ratio = b.throughput.median / a.throughput.median
    probability = probability_of(a.throughput.samples, b.throughput.samples)
    if probability is None:
        verdict = f"too few repetitions to tell whether they differ: {FEWEST} a side are needed"
    else:
        beyond = "differ" if probability < PROBABILITY else "do not differ"
        verdict = f"the speeds {beyond} beyond their spread (p = {probability:.3g})"
    table = aligned([("images/s", "median", "range", "repetitions"), *rows])
    return f"{table}\n{names[1]} has {ratio:.3f} of the speed of {names[0]}; {verdict}"


def _facts(made: Record) -> dict[str, Any]:
    return flatten(
        {
            "config": made.config,
            "code": asdict(made.code),
            "software": asdict(made.software),
            "machine": asdict(made.machine),
        }
    )


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
