"""Where a training stands, and reading that from what a checkpoint says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

LARGEST = 2**53  # of a count: what any program reads from JSON exactly
LARGEST_SCALE = 2.0**127  # of a loss: it is a float32


@dataclass(frozen=True)
class Position:
    """Where a training stands: it goes on with step `step_in_epoch` of epoch `epoch`, from 0."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0  # images seen over all ranks
    final: dict[str, Any] | None = None  # the last evaluation
    best: dict[str, Any] | None = None  # the evaluation with the best top-1
    # Right answers and samples since the last train event, over all ranks.
    since_event: tuple[float, int] = (0.0, 0)


_COUNTS = ("step", "epoch", "step_in_epoch", "samples")
# What an evaluation holds: counts, and numbers that may be NaN.
_SCORES = {"epoch": int, "step": int, "samples": int, "top1": float, "loss": float}
_OF_SCALER = (
    *("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf"),
    *("incr_count", "decr_count", "use_dynamic_loss_scaling"),
)


def check_state(state: Mapping[str, Any]) -> None:
    """Check what a checkpoint says beside its tensors, before anything relies on it.

    Raises:
        ValueError: naming the key that is missing or of another kind than it is written as.
    """
    described = state.get("optimizer")
    if not isinstance(described, dict) or not isinstance(described.get("type"), str):
        raise ValueError("optimizer.type is no name")
    if not isinstance(state.get("identity"), dict):
        raise ValueError("identity is missing")
    _check_scaler(state.get("loss_scaler"))
    if read_position(state).step != state.get("step"):
        raise ValueError("step is not position.step")


def read_position(state: Mapping[str, Any]) -> Position:
    """The position that a checkpoint was taken at.

    Raises:
        ValueError: naming the key that is missing or of another kind than it is written as.
    """
    held = state.get("position")
    if not isinstance(held, dict):
        raise ValueError("position is missing")
    if unknown := held.keys() - {each.name for each in fields(Position)}:
        raise ValueError(f"position has {sorted(unknown)[0]}, which is not known")
    for key in _COUNTS:
        _check(held.get(key), int, f"position.{key}")
    for key in ("final", "best"):
        _check_scores(held.get(key), f"position.{key}")
    hits, count = _pair(held.get("since_event", (0.0, 0)))
    return Position(**{**held, "since_event": (hits, count)})


def check_within(position: Position, train_size: int, global_batch: int) -> None:
    """Check that a position is one that a training on so many images comes by.

    Raises:
        ValueError: it is none, and training on from it would not be what it says.
    """
    steps = math.ceil(train_size / global_batch)
    if position.step_in_epoch >= steps:
        raise ValueError(
            f"position.step_in_epoch is {position.step_in_epoch}, but an epoch has {steps} steps"
        )
    if position.step != position.epoch * steps + position.step_in_epoch:
        raise ValueError(
            f"position.step is {position.step}, but epoch {position.epoch} of {steps} steps, step "
            f"{position.step_in_epoch}, is {position.epoch * steps + position.step_in_epoch}"
        )


def _check(value: Any, kind: type, key: str) -> None:
    """Check for a count, or for a number that may be written without its point."""
    count = type(value) is int and 0 <= value < LARGEST
    if not (count or (kind is float and type(value) is float)):
        raise ValueError(f"{key} is no {'count' if kind is int else 'number'}")


def _check_scores(scores: Any, key: str) -> None:
    if scores is None:
        return
    if not isinstance(scores, dict):
        raise ValueError(f"{key} is no evaluation")
    for name, kind in _SCORES.items():
        _check(scores.get(name), kind, f"{key}.{name}")
    if "top5" in scores:  # not where there are few classes
        _check(scores["top5"], float, f"{key}.top5")


def _pair(value: Any) -> tuple[float, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("position.since_event is no pair of numbers")
    _check(value[0], float, "position.since_event")
    _check(value[1], int, "position.since_event")
    if not math.isfinite(value[0]):
        raise ValueError("position.since_event is not finite")
    return float(value[0]), int(value[1])


def _check_scaler(held: Any) -> None:
    """A dynamic loss scale's state; an empty one where there was none."""
    if not isinstance(held, dict):
        raise ValueError("loss_scaler is missing")
    if not held:
        return
    scale = held.get("scale")
    first = scale[0] if isinstance(scale, list) and len(scale) == 1 else scale
    if not isinstance(first, int | float) or not 0 < first < LARGEST_SCALE:
        raise ValueError("loss_scaler.scale is no positive number")
    for key in _OF_SCALER:
        value = held.get(key)
        if not isinstance(value, int | float) or not 0 <= value < LARGEST:
            raise ValueError(f"loss_scaler.{key} is no number")
