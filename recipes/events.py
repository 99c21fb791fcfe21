"""What ``metrics.jsonl`` and ``result.json`` may hold, checked before anything relies on it.

Both are read again when a run is continued, and by whoever is given a run folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recipes.position import LARGEST

_COUNTS = ("step", "epoch", "samples", "skipped_steps")
_NUMBERS = ("lr", "loss", "top1", "top5", "images_per_second", "data_wait")
_LATEST = 2.0**40  # seconds since 1970
_OF_EVALUATION = ("step", "epoch", "samples", "top1", "loss")
_OF_SAMPLES = ("indices", "crc32")  # of the micro-batches of a step, in the log of samples
_SHOWN = ("step", "epoch", "top1", "loss")  # of an evaluation, in the table at the end
_NEEDED = {"train": ("step", "samples", "images_per_second"), "eval": _OF_EVALUATION}
_RESULT = ("status", "final", "best", "images_per_second", "wall_seconds", "topology", "world_size")
_ERROR = {"node": int, "rank": int | None, "type": str, "message": str, "remedy": str}


def check_event(event: Any) -> None:
    """Check one event of ``metrics.jsonl``; of an unknown kind, what is known of any.

    Raises:
        ValueError: naming the key that is missing or of another kind than it is written as.
    """
    if not isinstance(event, dict):
        raise ValueError("no keys")
    kind = event.get("event", "")
    for key, value in event.items():
        if kind == "samples" and key in _OF_SAMPLES:
            _check_micro_batches(key, value)
        elif isinstance(value, dict | list):
            raise ValueError(f"{key} is no number or text")
    if not isinstance(kind, str):
        raise ValueError("event is no name")
    _check_values(event, _NEEDED.get(kind, ()))
    time = event.get("time", 0)
    if not (_is_number(time) and 0 <= time < _LATEST):
        raise ValueError("time is no time")


def _check_micro_batches(key: str, value: Any) -> None:
    if not (isinstance(value, list) and all(isinstance(part, list) for part in value)):
        raise ValueError(f"{key} is no list of micro-batches")
    if not all(_is_count(number) for part in value for number in part):
        raise ValueError(f"{key} holds what is no count")


def check_result(content: Any) -> None:
    """Check what ``result.json`` holds.

    Raises:
        ValueError: as `check_event`.
    """
    if not isinstance(content, dict):
        raise ValueError("no keys")
    if missing := [key for key in _RESULT if key not in content]:
        raise ValueError(f"{missing[0]} is missing")
    if unknown := content.keys() - {*_RESULT, "error"}:
        raise ValueError(f"{sorted(unknown)[0]!r} is not known")
    for key in ("status", "topology"):
        if not isinstance(content[key], str):
            raise ValueError(f"{key} is no name")
    for key in ("final", "best"):
        if content[key] is not None:
            if not isinstance(content[key], dict):
                raise ValueError(f"{key} is no evaluation")
            _check_values(content[key], _SHOWN)
    if not _is_number(content["wall_seconds"]):
        raise ValueError("wall_seconds is no number")
    if not (content["images_per_second"] is None or _is_number(content["images_per_second"])):
        raise ValueError("images_per_second is no number")
    if not _is_count(content["world_size"]):
        raise ValueError("world_size is no count")
    _check_error(content.get("error"))


def _check_error(error: Any) -> None:
    if error is None:
        return
    if not isinstance(error, dict) or error.keys() != _ERROR.keys():
        raise ValueError("error is not of node, rank, type, message and remedy")
    for key, kind in _ERROR.items():
        if not isinstance(error[key], kind) or isinstance(error[key], bool):
            raise ValueError(f"error.{key} is not of its kind")


def _check_values(held: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    for key in needed:
        if key not in held:
            raise ValueError(f"{key} is missing")
    for key in _COUNTS:
        if key in held and not _is_count(held[key]):
            raise ValueError(f"{key} is no count")
    for key in _NUMBERS:
        # What was not finite is null in result.json; what scores are compared by never is.
        unknown = held.get(key) is None and not (key.startswith("top") and "top1" in needed)
        if key in held and not (unknown or _is_number(held[key])):
            raise ValueError(f"{key} is no number")
    if "images_per_second" in needed and not _is_speed(held["images_per_second"]):
        raise ValueError("images_per_second is no speed")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; NaN and infinities are."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1000)


def _is_speed(value: Any) -> bool:
    return _is_number(value) and value > 0 and math.isfinite(value)
