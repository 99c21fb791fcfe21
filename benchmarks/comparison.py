"""Are two trainings the same one? The comparison, and the likely cause where they are not.

The cause is looked for in the order in which the pieces of a step can go wrong: the samples, then
the model (batch-norm statistics), then random numbers. What comes first explains what comes after
it, so the first that differs is named. Pure functions; nothing here imports Paddle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHOWN = 5  # samples, layers or settings named in one message
# Settings that say where a run happens and what it writes, and not what is computed.
ELSEWHERE = ("topology.", "log.", "save.", "network.", "deadlines.", "threads", "batch_size")
# Settings that the order of the samples and their pixels depend on.
DATA = ("seed", "dataset.", "global_batch_size")
# Growth from a step to the next up to which a difference is an amplified rounding error; a change
# of the computation makes it jump from rounding to something visible at once.
JUMP = 1e6
# What rounding in float32 amounts to at most, in running statistics after a step and in a loss at
# the first steps.
FLOAT32_STATISTICS = 1e-4
FLOAT32_LOSS = 1e-3

Flat = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """What one rank read for one micro-batch.

    Attributes:
        pixels: CRC-32 of each sample as the model gets it, in the order of `indices`.
    """

    rank: int
    indices: tuple[int, ...]
    pixels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """What a run has left behind.

    Attributes:
        name: how messages call it.
        settings: its whole configuration, by dotted keys.
        losses: by optimizer step.
        rates: the learning rate by optimizer step.
        shares: the samples by optimizer step; empty where the run did not list them.
        statistics: running means and variances by the names of a checkpoint, in model order.
        statistics_step: the optimizer step of that checkpoint.
        dropouts: names of the model's layers that draw random numbers in training.
    """

    name: str
    settings: Flat
    losses: Mapping[int, float]
    rates: Mapping[int, float] = field(default_factory=dict)
    shares: Mapping[int, list[Share]] = field(default_factory=dict)
    statistics: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    statistics_step: int = 0
    dropouts: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Into how many shares a global batch is cut: ranks times accumulated micro-batches."""
        factors = ("topology.nodes", "topology.devices", "accumulate")
        return math.prod(int(self.settings.get(key, 1)) for key in factors)


@dataclass(frozen=True)
class Cause:
    """Why two trainings differ, as far as it can be told.

    Attributes:
        kind: data, model, random numbers, settings, rounding, or unknown.
    """

    kind: str
    explanation: str


@dataclass(frozen=True)
class Comparison:
    """Two trainings, step by step.

    Attributes:
        steps: those that both have logged, ascending.
        differences: relative, for each of `steps`.
        missing: steps that only one of them has.
        first_over: the first step whose difference is over the tolerance.
        cause: only where they do not agree.
    """

    a: Record
    b: Record
    tolerance: float
    steps: list[int]
    differences: list[float]
    missing: list[int]
    first_over: int | None
    cause: Cause | None

    @property
    def largest(self) -> float:
        """The largest relative difference; infinite without a step in common."""
        return max(self.differences, default=math.inf)

    @property
    def agree(self) -> bool:
        """Whether all steps are there twice and differ by no more than the tolerance."""
        return bool(self.steps) and not self.missing and self.first_over is None


def compare(a: Record, b: Record, tolerance: float) -> Comparison:
    """Align two trainings by step and compare their losses.

    The relative difference of two losses is |a - b| / max(|a|, |b|), and infinite where one of
    them is not finite.
    """
    steps = sorted(a.losses.keys() & b.losses.keys())
    differences = [relative_difference(a.losses[step], b.losses[step]) for step in steps]
    over = [step for step, each in zip(steps, differences, strict=True) if each > tolerance]
    found = Comparison(
        a,
        b,
        tolerance,
        steps,
        differences,
        sorted(a.losses.keys() ^ b.losses.keys()),
        over[0] if over else None,
        None,
    )
    if found.agree:
        return found
    return replace(found, cause=likely_cause(found))


def relative_difference(a: float, b: float) -> float:
    """|a - b| relative to the larger of both; infinite where one of them is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def likely_cause(found: Comparison) -> Cause:
    """The first thing that differs, in the order data, model, random numbers, other settings."""
    explanations = {
        "data": explain_data(found),
        "model": explain_model(found),
        "random numbers": explain_random_numbers(found),
        "settings": explain_settings(found),
        "steps": explain_steps(found),
        "rounding": explain_rounding(found),
    }
    for kind, explanation in explanations.items():
        if explanation:
            return Cause(kind, explanation)
    return Cause("unknown", "samples, model, random numbers and settings are the same")


# --- data ---------------------------------------------------------------------------------------


def explain_data(found: Comparison) -> str:
    """How the samples up to the first differing step are wrong; empty where they are right."""
    for step in up_to_difference(found):
        for side in (found.a, found.b):
            overlap = explain_overlap(side.shares.get(step, []))
            if overlap:
                return f"{side.name}, step {step}: {overlap}"
        if step in found.a.shares and step in found.b.shares:
            different = explain_members(found, step)
            if different:
                keys = [key for key in changed_settings(found) if key.startswith(DATA)]
                why = f" ({describe_settings(found, keys)})" if keys else ""
                return f"step {step}: {different}{why}"
    return ""


def explain_overlap(shares: list[Share]) -> str:
    """Which samples of one global batch were read more than once, and by which ranks."""
    readers: dict[int, list[int]] = {}
    for share in shares:
        for index in share.indices:
            readers.setdefault(index, []).append(share.rank)
    twice = {index: ranks for index, ranks in readers.items() if len(ranks) > 1}
    if not twice:
        return ""
    ranks = sorted({rank for each in twice.values() for rank in each})
    who = f"ranks {listed(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"{who} read {len(twice)} samples more than once: {listed(sorted(twice))}"


def explain_members(found: Comparison, step: int) -> str:
    """How the two global batches of a step differ: in members, in pixels, or in their shares."""
    ours, theirs = (samples_of(side.shares[step]) for side in (found.a, found.b))
    only = {
        side.name: sorted(mine.keys() - others.keys())
        for side, mine, others in ((found.a, ours, theirs), (found.b, theirs, ours))
    }
    if any(only.values()):
        parts = [f"only {name} has {listed(members)}" for name, members in only.items() if members]
        return f"the global batches have different members: {'; '.join(parts)}"
    changed = sorted(index for index in ours if ours[index] != theirs[index])
    if changed:
        return (
            f"the same samples with different pixels or labels (augmentation, reading): "
            f"{listed(changed)}"
        )
    if synchronised(found.a) and synchronised(found.b):
        return ""
    shares_a, shares_b = (
        Counter(frozenset(share.indices) for share in side.shares[step])
        for side in (found.a, found.b)
    )
    if found.a.parts == found.b.parts and shares_a != shares_b:
        return "the same global batch is cut into other shares, which sync_bn=false depends on"
    return ""


def samples_of(shares: list[Share]) -> dict[int, int | None]:
    """The checksum of each sample of a global batch, where there is one."""
    return {
        index: pixels
        for share in shares
        for index, pixels in zip(
            share.indices, share.pixels or (None,) * len(share.indices), strict=True
        )
    }


# --- model --------------------------------------------------------------------------------------


def explain_model(found: Comparison) -> str:
    """What makes the models compute differently; empty where nothing is known to."""
    a, b = found.a, found.b
    models = {key for key in changed_settings(found) if key.startswith("model.")}
    if models:
        return f"the models differ: {describe_settings(found, sorted(models))}"
    layers = explain_statistics(found)
    if synchronised(a) != synchronised(b):
        with_it, without = (a, b) if synchronised(a) else (b, a)
        if without.parts > 1:
            return (
                f"sync_bn is on in {with_it.name} only: {without.name} normalises each of "
                f"{without.parts} shares with statistics of its own{layers}"
            )
    elif not synchronised(a) and a.parts != b.parts:
        return (
            f"sync_bn is off: {a.name} normalises with the statistics of {a.parts} shares of the "
            f"global batch, {b.name} with those of {b.parts}{layers}"
        )
    elif layers and synchronised(a) and a.settings.get("seed") == b.settings.get("seed"):
        return f"sync_bn is on, but not every layer agrees{layers}"
    return ""


def explain_statistics(found: Comparison) -> str:
    """The first batch-norm layer whose running statistics differ, and what agrees before it.

    It says something only of checkpoints at the first step that differs: later the weights differ,
    and all layers with them.
    """
    a, b = found.a, found.b
    if a.statistics_step != b.statistics_step or a.statistics_step != found.first_over:
        return ""
    names = [name for name in a.statistics if name in b.statistics]
    for number, name in enumerate(names):
        if statistics_difference(a.statistics, b.statistics, name) > visible(found):
            before = f", {number} before it agree" if number else ", the model's first"
            return (
                f"; after step {found.first_over} the first running statistic that differs is "
                f"{name}{before}"
            )
    return ""


def statistics_difference(
    a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], name: str
) -> float:
    """The largest difference of a running mean or variance, relative to its scale.

    The scale of a mean is at least the layer's standard deviation: many a mean is zero but for
    rounding, since what goes into the layer has been normalised before.
    """
    if a[name].shape != b[name].shape:
        return math.inf
    sizes = [np.abs(each[name]).max(initial=0) for each in (a, b)]
    variance = name.removesuffix("_mean") + "_variance"
    if variance != name:
        sizes += [math.sqrt(each[variance].max(initial=0)) for each in (a, b) if variance in each]
    size = float(max(sizes))
    return float(np.abs(a[name] - b[name]).max(initial=0)) / size if size else 0.0


def visible(found: Comparison) -> float:
    """From where a difference of statistics is more than rounding."""
    return found.tolerance if in_float64(found) else max(found.tolerance, FLOAT32_STATISTICS)


def in_float64(found: Comparison) -> bool:
    """Whether both sides compute in float64."""
    return all(side.settings.get("dtype") == "float64" for side in (found.a, found.b))


def synchronised(record: Record) -> bool:
    """Whether batch statistics are those of the global batch."""
    return bool(record.settings.get("sync_bn", False))


# --- random numbers, settings, rounding ---------------------------------------------------------


def explain_random_numbers(found: Comparison) -> str:
    """Different seeds, or layers that draw random numbers of their own on each rank."""
    a, b = found.a, found.b
    if a.settings.get("seed") != b.settings.get("seed"):
        return f"the seeds differ: {a.settings.get('seed')} and {b.settings.get('seed')}"
    layers = a.dropouts or b.dropouts
    if layers and a.parts != b.parts:
        return (
            f"{len(layers)} layers draw random numbers, which each rank does for its own share: "
            f"{listed(layers)}"
        )
    return ""


def explain_settings(found: Comparison) -> str:
    """Any other settings that differ, or learning rates."""
    changed = [k for k in changed_settings(found) if not k.startswith(ELSEWHERE)]
    # Shares that add up in another way are what is compared, not a change of the training.
    changed = [key for key in changed if key not in ("accumulate", "sync_bn", "seed")]
    if changed:
        return f"other settings differ: {describe_settings(found, changed)}"
    for step in found.steps:
        ours, theirs = found.a.rates.get(step), found.b.rates.get(step)
        if ours != theirs:
            return f"the learning rates differ from step {step}: {ours} and {theirs}"
    return ""


def explain_steps(found: Comparison) -> str:
    """Steps that are not there twice."""
    if not found.missing:
        return ""
    sides = ((found.a, found.b), (found.b, found.a))
    parts = [
        f"only {one.name} has {len(extra)} steps: {listed(extra)}"
        for one, other in sides
        if (extra := sorted(one.losses.keys() - other.losses.keys()))
    ]
    return "; ".join(parts)


def explain_rounding(found: Comparison) -> str:
    """A difference that starts at rounding and grows without a jump."""
    if found.first_over is None:
        return ""
    before = found.differences[: found.steps.index(found.first_over)]
    after = found.differences[len(before)]
    if not in_float64(found) and max([*before, after]) < FLOAT32_LOSS:
        return (
            f"in float32 rounding alone makes such a difference ({after:.1e}), and a larger one at "
            "every step; dtype=float64 tells rounding from a mistake"
        )
    if not before or not after < max(before) * JUMP:
        return ""
    return (
        f"rounding that grew from step to step: {before[0]:.1e} at step {found.steps[0]}, "
        f"{max(before):.1e} at most before step {found.first_over}"
    )


def up_to_difference(found: Comparison) -> list[int]:
    """The steps that can explain the difference: up to the first one over the tolerance."""
    known = sorted(found.a.shares.keys() | found.b.shares.keys())
    last = found.first_over
    return [step for step in known if last is None or step <= last]


def changed_settings(found: Comparison) -> list[str]:
    """The keys whose values differ, or that one side does not have."""
    a, b = found.a.settings, found.b.settings
    return [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def describe_settings(found: Comparison, keys: list[str]) -> str:
    """``key=value`` of both sides, for up to `SHOWN` keys."""
    a, b = found.a.settings, found.b.settings
    each = [f"{key}={a.get(key)} and {b.get(key)}" for key in keys]
    return listed(each)


def listed(items: Any) -> str:
    """The first few, and how many more there are."""
    items = list(items)
    rest = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(map(str, items[:SHOWN])) + rest
