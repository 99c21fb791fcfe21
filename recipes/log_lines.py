"""The lines of a training's events, which fit a terminal of 80 columns with their tag and time.

What does not fit is left out, the least important first; ``metrics.jsonl`` has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WIDTH = 80 - len("[node0 rank0] 14:03:59 ")


def train_line(
    event: Mapping[str, Any],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seconds_left: float | None = None,
) -> str:
    """The line of a train event.

    Args:
        event: as in ``metrics.jsonl``: `epoch` counts from 0 there, and from 1 here.
        epochs, steps: how many the run has, where known. Without `epochs`, no epoch is told.
        seconds_left: until the end of the run, where known.
    """
    core = [
        f"loss {_loss(event['loss']):<5}",
        f"lr {event['lr']:<7.2g}",
        f"{_speed(event['images_per_second']):>5} img/s",
    ]
    top1 = [] if event.get("top1") is None else [f"top1 {event['top1']:>5.1%}"]
    left = [] if seconds_left is None else [f"left {duration(seconds_left)}"]
    wait = [f"wait {event['data_wait']:.0%}"]
    return _fitting([*_position(event, epochs, steps, core), *core], [*top1, *left, *wait])


def eval_line(event: Mapping[str, Any], *, epochs: int | None = None) -> str:
    """The line of an eval event; arguments as for `train_line`."""
    scores = [f"eval loss {_loss(event['loss'])}", f"top1 {event['top1']:.2%}"]
    scores += [f"top5 {event['top5']:.2%}"] if "top5" in event else []
    where = [f"epoch {_of(event['epoch'] + 1, epochs)}", f"step {event['step']}"]
    if len(" ".join([*where, *scores])) > WIDTH:
        where = where[:1]
    return _fitting([*where, *scores], [f"of {event['samples']:,}"])


def duration(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on; ``?`` for a number that is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _position(
    event: Mapping[str, Any], epochs: int | None, steps: int | None, rest: list[str]
) -> list[str]:
    """Epoch and step, without the numbers of all steps and epochs where there is no room."""
    epoch, step = event["epoch"] + 1, event["step"]
    padded = f"step {step:>{len(str(steps or 0))}}"
    of_steps, of_epochs = f"step {_of(step, steps)}", f"epoch {_of(epoch, epochs)}"
    if epochs is None:
        ways = [[of_steps], [padded]]
    else:
        ways = [[of_epochs, of_steps], [of_epochs, padded], [f"epoch {epoch}", padded]]
    return next((way for way in ways if len(" ".join([*way, *rest])) <= WIDTH), ways[-1])


def _fitting(parts: list[str], optional: list[str]) -> str:
    """The parts on one line, with those of the optional ones for which there is room."""
    line = " ".join(parts)
    for each in optional:
        if len(line) + 1 + len(each) <= WIDTH:
            line += f" {each}"
    return line.rstrip()


def _loss(loss: float) -> str:
    return f"{loss:.3f}" if loss < 100 else f"{loss:.4g}"


def _speed(images_per_second: float) -> str:
    if images_per_second < 9999.5:
        return f"{images_per_second:,.0f}"
    thousands = images_per_second / 1000
    return f"{thousands:.1f}k" if thousands < 99.95 else f"{thousands:,.0f}k"


def _of(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number:>{len(str(total))}}/{total}"
