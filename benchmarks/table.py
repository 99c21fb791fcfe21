"""The table of `make bench`: what was measured, beside what, and whether the target is met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Literal

from recipes import telemetry
from recipes.benchmark import record

SCHEMA = 1  # of bench-DATE.json
HEADINGS = ("what", "against", "ours", "theirs", "unit", "ratio", "target", "verdict")


@dataclass(frozen=True)
class Row:
    """One target, and what both sides measured in one run.

    Attributes:
        name: what is measured.
        against: what it is compared with.
        target: in words, such as "40x or more".
        limit: the target as a ratio of ours to theirs.
        better: whether a "higher" or a "lower" ratio is.
        unit: of the samples.
        ours, peer: raw samples.
        paired: whether the samples of one number were taken one after the other. Then the ratio is
            the median of the pairs' ratios, in which what changes slowly on the machine cancels;
            else it is the ratio of the medians.
        note: what a reader should know besides.
    """

    name: str
    against: str
    target: str
    limit: float
    better: Literal["higher", "lower"]
    unit: str
    ours: list[float]
    peer: list[float]
    paired: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if not self.ours or not self.peer:
            raise ValueError(f"{self.name}: no samples")
        if self.paired and len(self.ours) != len(self.peer):
            raise ValueError(f"{self.name}: {len(self.ours)} samples have {len(self.peer)} pairs")

    @property
    def ratio(self) -> float:
        """Ours to theirs."""
        if self.paired:
            return median(a / b for a, b in zip(self.ours, self.peer, strict=True))
        return median(self.ours) / median(self.peer)

    @property
    def met(self) -> bool:
        """Whether the ratio reaches the limit; a ratio that is no number does not."""
        return self.ratio >= self.limit if self.better == "higher" else self.ratio <= self.limit


def cells(row: Row) -> list[str]:
    """A row in words, in the order of `HEADINGS`."""
    return [
        row.name,
        row.against,
        spread(row.ours),
        spread(row.peer),
        row.unit,
        f"{row.ratio:.3f}" if 0.9 < row.ratio < 1.1 else f"{row.ratio:.3g}",
        row.target,
        "met" if row.met else "missed",
    ]


def spread(samples: Sequence[float]) -> str:
    """The median, and the range where there is one."""
    middle = number(median(samples))
    if len(samples) == 1:
        return middle
    return f"{middle} ({number(min(samples))} to {number(max(samples))})"


def number(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first row is the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    safe = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in safe]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal, notes below it."""
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([aligned([HEADINGS, *map(cells, rows)]), *notes])


def write(rows: Sequence[Row], folder: Path, today: date | None = None) -> tuple[Path, Path]:
    """Write ``bench-DATE.json`` and ``.md`` with the facts of this machine.

    Returns:
        Both paths. Files of the same day are replaced.

    Raises:
        UserError: a file cannot be written, or it cannot be told which commit this is.
    """
    name = f"bench-{(today or date.today()).isoformat()}"
    facts = facts_of(telemetry.environment())
    content = {
        "schema": SCHEMA,
        **facts,
        "rows": [
            {**asdict(row), "ratio": row.ratio, "verdict": "met" if row.met else "missed"}
            for row in rows
        ],
    }
    machine = facts["machine"]
    code = facts["code"]
    page = "\n".join(
        [
            f"# Benchmarks of {name.removeprefix('bench-')}",
            "",
            f"{machine['usable_cores']} of {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; "
            f"Paddle {facts['software']['paddle']['version']}; commit `{code['commit']}`"
            f"{'' if code['clean'] else ', with changes'}.",
            "",
            markdown([HEADINGS, *map(cells, rows)]),
            "",
            *[f"- {row.name}: {row.note}" for row in rows if row.note],
        ]
    )
    paths = folder / f"{name}.json", folder / f"{name}.md"
    telemetry.write_text(paths[0], json.dumps(content, indent=1, allow_nan=False) + "\n")
    telemetry.write_text(paths[1], page.rstrip() + "\n")
    return paths


def facts_of(environment: dict[str, Any]) -> dict[str, Any]:
    """Which code ran on which machine with which software, without the machine's name."""
    return {
        "code": asdict(record.code_of(environment)),
        "machine": asdict(record.machine_of(environment)),
        "software": asdict(record.software_of(environment)),
    }
