"""Which values the numbers and texts of the configuration may have.

A number past its bound would not train: it would overflow somewhere in a rank, fill the memory, or
abort the process. The upper bounds are far above what anybody has use for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.config import Config

MOST_WORKERS = 256  # loader threads or processes of a rank: more than any machine has use for
MOST_CLASSES = 1_000_000
_MANY = 10**15  # of steps and the like, where only the arithmetic has to hold
_LARGE = 1e30  # within float32, also times the size of a batch
_YEAR = 365 * 86400.0  # seconds

# Greater than 0 (or null, where the schema has it), and at most this.
POSITIVE: dict[str, float] = {
    "topology.nodes": 10_000,
    "topology.devices": 256,
    "epochs": 10**9,
    "max_steps": _MANY,
    "batch_size": 2**16,
    "global_batch_size": 2**31 - 1,
    "accumulate": 2**16,
    "eval_batch_size": 2**16,
    "log.every": _MANY,
    "save.every_epochs": _MANY,
    "save.every_steps": _MANY,
    "save.keep": _MANY,
    "save.keep_finished": _MANY,
    "threads": 1024,
    "dataset.image_size": 2**13,
    "dataset.num_classes": MOST_CLASSES,
    "dataset.prefetch": 1024,
    "dataset.max_pixels": 65535.0**2,  # of the largest JPEG
    "dataset.train_size": 10**8,
    "dataset.eval_size": 10**8,
    "prepare.quality": 100,
    "prepare.shard_mib": 2.0**20,
    "prepare.workers": MOST_WORKERS,
    "model.num_classes": MOST_CLASSES,
    "optimizer.clip_norm": _LARGE,
    "optimizer.epsilon": _LARGE,
    "schedule.gamma": _LARGE,
    "amp.initial_loss_scale": _LARGE,
    "gradients.bucket_mib": 2**16,
    "deadlines.start": _YEAR,
    "deadlines.prepare": _YEAR,
    "deadlines.step": _YEAR,
    "deadlines.silence": _YEAR,
    "deadlines.grace": _YEAR,
    "deadlines.read": _YEAR,
    "benchmark.steps": 100_000,
    "benchmark.repeats": 1_000,
}
NOT_NEGATIVE: dict[str, float] = {
    "seed": 2**63 - 1,  # Paddle's generator takes a signed number of 64 bits
    "dataset.workers": MOST_WORKERS,
    "dataset.cutout": 2**13,
    "dataset.max_skipped": _MANY,
    "prepare.short_side": 2**16 - 1,  # the largest side of a JPEG
    "log.images": 1024,
    "restarts": 10_000,
    "optimizer.base_lr": _LARGE,
    "optimizer.weight_decay": _LARGE,
    "schedule.warmup_epochs": 1e9,
    "benchmark.warmup": 100_000,
    "benchmark.split_steps": 100_000,
}
AT_MOST_ONE = ("schedule.final_lr_factor",)
BELOW_ONE = ("label_smoothing", "optimizer.momentum", "optimizer.beta1", "optimizer.beta2")
# Numbers whose bounds depend on others, and are checked with them.
ELSEWHERE = ("topology.node_rank",)

LONGEST_TEXT = 3584  # bytes: a path has up to 4095, and names of files are put below it
_LONGEST_NAME = 255  # bytes of one name in a path
_SHOWN = 80  # characters of a value in a message
# Controls would reach a terminal; half of a surrogate pair is a byte that is not UTF-8.
_NOT_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def problems(config: Config) -> Iterator[str]:
    """What is wrong with the numbers and texts, one line each."""
    for key, most in POSITIVE.items():
        if (number := _value(config, key)) is not None:
            yield from _positive(key, number, most)
    for index, epoch in enumerate(config.schedule.milestones):
        where = f"schedule.milestones[{index}]"
        if isinstance(epoch, int | float):
            yield from _positive(where, epoch, 1e9)
        else:  # a list in the list, which the schema lets pass
            yield f"{where}={short(str(epoch))} must be a number greater than 0"
    for key, most in NOT_NEGATIVE.items():
        number = _value(config, key)
        if not 0 <= number < math.inf:
            yield f"{key}={short(number)} must be a number that is not negative"
        elif number > most:
            yield f"{key}={short(number)} must be at most {most:,}"
    for key in AT_MOST_ONE:
        if not 0 <= _value(config, key) <= 1:
            yield f"{key}={short(_value(config, key))} must be in [0, 1]"
    for key in BELOW_ONE:
        if not 0 <= _value(config, key) < 1:
            yield f"{key}={short(_value(config, key))} must be in [0, 1)"
    for key, text in texts(config):
        yield from text_problems(key, text)
    sha256 = config.model.pretrained_sha256
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        yield f"model.pretrained_sha256={short(sha256)} must be 64 hexadecimal digits"


def texts(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text of the configuration with its key."""
    if isinstance(node, str):
        yield prefix, node
    elif is_dataclass(node):
        for field in fields(node):
            yield from texts(getattr(node, field.name), _below(prefix, field.name))
    elif isinstance(node, dict):  # model.arguments, whose keys are the user's too
        for name, value in node.items():
            yield f"a key of {prefix}", str(name)
            yield from texts(value, _below(prefix, str(name)))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from texts(value, f"{prefix}[{number}]")


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _positive(key: str, number: float, most: float) -> Iterator[str]:
    if not 0 < number < math.inf:
        yield f"{key}={short(number)} must be a number greater than 0"
    elif number > most:
        yield f"{key}={short(number)} must be at most {most:,}"


def text_problems(key: str, text: str) -> Iterator[str]:
    """What is wrong with the text of a key, in one line."""
    if _NOT_TEXT.search(text):
        yield f"{short(key)}={short(text)} has characters that are no text: controls, or not UTF-8"
    elif (size := len(text.encode())) > LONGEST_TEXT:
        yield f"{key}={short(text)} has {size} bytes; at most {LONGEST_TEXT} are taken"
    elif any(len(name.encode()) > _LONGEST_NAME for name in text.split("/")):
        yield f"{key}={short(text)} has a name of more than {_LONGEST_NAME} bytes"


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return node


def short(value: float | str) -> str:
    """A value for a message, whatever it holds."""
    text = str(value) if isinstance(value, str | float) else _digits(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _digits(number: int) -> str:
    """Python writes no number of more than 4,300 digits."""
    return str(number) if abs(number) < 10**_SHOWN else f"{'-' if number < 0 else ''}10^{_SHOWN}…"
