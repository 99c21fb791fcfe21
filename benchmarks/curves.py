"""A picture of comparisons: the curves, and below them how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot

from benchmarks.comparison import Comparison

_SIZE_INCHES = (8, 6)
_DOTS_PER_INCH = 120
_DASHES = ("-", (0, (5, 5)), (5, (5, 5)), ":")
# On a logarithmic axis: equal numbers are drawn at the spacing of float64.
_EQUAL = 2.0**-53


def plot(comparisons: Sequence[Comparison], path: Path, title: str) -> None:
    """Write a PNG: losses of all sides by step, and each comparison's relative difference.

    A difference that is not finite is left out.
    """
    figure, (losses, differences) = pyplot.subplots(
        2, 1, sharex=True, figsize=_SIZE_INCHES, layout="constrained"
    )
    sides = {side.name: side for each in comparisons for side in (each.a, each.b)}
    for number, (name, side) in enumerate(sides.items()):
        steps = sorted(side.losses)
        dashes = _DASHES[number % len(_DASHES)]  # curves that agree lie on one another
        values = [side.losses[step] for step in steps]
        losses.plot(steps, values, label=name, linestyle=dashes, linewidth=1.5)
    losses.set_ylabel("training loss")
    losses.set_title(title)
    losses.legend()
    for each in comparisons:
        shown = [
            max(value, _EQUAL) if math.isfinite(value) else math.nan for value in each.differences
        ]
        label = f"{each.a.name} and {each.b.name}"
        differences.plot(each.steps, shown, ".-", label=label, linewidth=1, markersize=3)
    differences.axhline(comparisons[0].tolerance, color="grey", linestyle="--", label="tolerance")
    differences.set_yscale("log")
    differences.set_ylabel("relative difference")
    differences.set_xlabel("optimizer step")
    differences.xaxis.get_major_locator().set_params(integer=True)
    differences.legend()
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    pyplot.close(figure)
