"""The record of a benchmark: one JSON file that says what was measured, on what, and with what.

A record is checked when it is written and when it is read, so that what is compared and drawn is
complete. It is meant to be published: machines are described and not named, and paths are cut down
to their last part. Nothing here imports Paddle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes import reading, telemetry
from recipes.config import UserError
from recipes.printable import printable

SCHEMA = 1
# Parts of a step, in the order in which they come; what they are is said in `split`.
PHASES = (
    "data_wait",
    "input",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "rest",
)
_COUNTS = (  # of the configuration, which everything that is shown relies on
    *("topology.nodes", "topology.devices", "global_batch_size", "dataset.image_size"),
    "benchmark.repeats",
)
_NAMES = ("model.name", "dataset.name", "amp.level", "amp.dtype", "dtype")
_MOST = 1_000_000
_LARGEST = 1e18  # of a whole number: what is less can be divided and shown
TOLERANCE = 0.05  # of the step's time, by which the sum of its parts may miss it
_KEYS = ("topology.master", "topology.node_rank", "benchmark.output")  # name machines or places


@dataclass
class Code:
    """Which recipes were run. `clean`: without changes to what that commit holds."""

    commit: str
    clean: bool


@dataclass
class Gpu:
    """One device, as the driver describes it."""

    name: str
    memory_bytes: int


@dataclass
class Machine:
    """Node 0. `usable_cores` are those that the run was allowed."""

    cpu: str
    cores: int
    usable_cores: int
    memory_bytes: int
    system: str  # kernel and C library
    driver: str | None
    gpus: list[Gpu]


@dataclass
class Software:
    """`image` is what the container image says of itself; None outside of one."""

    python: str
    paddle: dict[str, Any]
    packages: dict[str, str]
    image: Any


@dataclass
class Throughput:
    """Images per second over all ranks, one sample a repetition, through `trainer.train`."""

    samples: list[float]
    data_wait: list[float]  # the share of each repetition spent waiting for input, on rank 0
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float], data_wait: Sequence[float]) -> Throughput:
        """Summarise the samples."""
        return cls(
            list(samples), list(data_wait), float(median(samples)), min(samples), max(samples)
        )


@dataclass
class RankUsage:
    """What one rank needed in the measured part.

    Attributes:
        peak_memory_bytes: on the device; on CPU the resident memory of the process.
        load: on GPU the mean share of time in which kernels ran (NVML); on CPU the mean number of
            cores that the process kept busy. None where the driver does not tell.
    """

    rank: int
    peak_memory_bytes: int
    load: float | None


@dataclass
class Usage:
    """Memory and load.

    Attributes:
        kind: "gpu" or "cpu", which says what the ranks' figures are.
        machine_load: the share of node 0's cores that were busy, other programs' work included;
            None where the measured part was too short to tell.
    """

    kind: str
    machine_load: float | None
    ranks: list[RankUsage]


@dataclass
class Split:
    """Where the time of a step goes, in seconds, from the instrumented loop (`split`).

    Attributes:
        phases: the mean over the ranks, by the names in `PHASES`.
        step: the mean over the ranks of the time of a whole step, taken by another clock.
        steps: raw samples by rank: for each step its phases in the order of `PHASES`, with
            communication still in `backward`, and the whole step last.
        local_backward: raw samples by rank: the backward pass alone, without communication.
    """

    phases: dict[str, float]
    step: float
    steps: list[list[list[float]]]
    local_backward: list[list[float]]


@dataclass
class Record:
    """One benchmark. Times are in seconds, `made` in UTC as ISO 8601."""

    schema: int
    made: str
    command: str
    config: dict[str, Any]
    code: Code
    software: Software
    machine: Machine
    throughput: Throughput
    usage: Usage
    split: Split | None

    @property
    def topology(self) -> str:
        """Such as 2x4."""
        return f"{self.config['topology']['nodes']}x{self.config['topology']['devices']}"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.config["topology"]["nodes"] * self.config["topology"]["devices"])

    @property
    def loop_step(self) -> float:
        """Seconds that a step takes in the loop that users run, from the median speed."""
        return float(self.config["global_batch_size"]) / self.throughput.median


def write(path: Path, record: Record) -> None:
    """Check a record and write it.

    Raises:
        UserError: it is incomplete, or cannot be written.
    """
    content = asdict(record)
    parse(json.loads(json.dumps(content)), path)
    telemetry.write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Record:
    """Read a record and check it.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    return parse(reading.json_of(path), path)


def parse(content: Any, path: Path) -> Record:
    """A record from its JSON.

    Raises:
        UserError: another schema, a field that is missing, unknown or of another type, or figures
            that contradict each other; naming `path` and the field.
    """
    schema = content.get("schema") if isinstance(content, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise UserError(
            f"{path}: schema {printable(repr(schema))} is not one that this version reads "
            f"({SCHEMA})",
            "use the version of the recipes that wrote it, or measure again",
        )
    if any(sign in json.dumps(content) for sign in ("${", "???")):
        # OmegaConf would look them up: in the environment of this machine, too.
        raise UserError(f"{path}: refers to other values, which no record does", "measure again")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Record), content)
        assert isinstance(merged, DictConfig)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{path}: incomplete, {', '.join(missing)} missing", "measure again")
        record = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, RecursionError) as error:
        key, reason = getattr(error, "full_key", None), str(error).partition("\n")[0]
        why = f"{printable(key)}: {printable(reason, 200)}"
        raise UserError(f"{path}: {why}", "measure again") from None
    assert isinstance(record, Record)
    problems = list(_contradictions(record))
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}", "measure again")
    return record


def _contradictions(record: Record) -> Iterator[str]:
    """What is wrong with a record whose fields are all there."""
    for key in (
        *("model.name", "dataset.name", "dataset.image_size", "topology.nodes"),
        *("topology.devices", "global_batch_size", "amp.level", "benchmark.repeats"),
    ):
        if _select(record.config, key) is None:
            yield f"incomplete, config.{key} missing"
            return
    for key in _COUNTS:
        value = _select(record.config, key)
        if type(value) is not int or not 0 < value < _MOST:
            yield f"config.{key} is no count"
            return
    for key in _NAMES:
        if not isinstance(_select(record.config, key, absent=""), str):
            yield f"config.{key} is no name"
            return
    threads = record.config.get("threads")
    if threads is not None and not (type(threads) is int and 0 < threads < _MOST):
        yield "config.threads is no count"
        return
    if record.config["amp"]["level"] != "off" and not _select(record.config, "amp.dtype"):
        yield "incomplete, config.amp.dtype missing"
    if not isinstance(record.software.paddle.get("version"), str):
        yield "software.paddle.version is no name"
    if record.machine.usable_cores < 1:
        yield "machine.usable_cores is no count"
    for key, value in _measured(record):
        if not _is_of_numbers(value):
            yield f"{key} is not of numbers"
            return
    samples = record.throughput.samples
    if len(samples) != record.config["benchmark"]["repeats"]:
        yield f"throughput.samples has {len(samples)} of {record.config['benchmark']['repeats']}"
    elif not all(0 < sample < math.inf for sample in samples):
        yield "throughput.samples must be greater than 0"
    elif record.throughput != Throughput.of(samples, record.throughput.data_wait):
        yield "throughput's median, lowest and highest are not those of its samples"
    if len(record.throughput.data_wait) != len(samples):
        yield "throughput.data_wait must be as many as throughput.samples"
    ranks = record.world_size
    if [each.rank for each in record.usage.ranks] != list(range(min(ranks, _MOST))):
        yield f"usage.ranks must be those of {record.topology}: 0 to {ranks - 1}"
    if record.usage.kind not in ("gpu", "cpu"):
        yield f"usage.kind={record.usage.kind} is not one of gpu, cpu"
    if record.split is not None:
        yield from _split_contradictions(record.split, ranks)


def _measured(record: Record) -> Iterator[tuple[str, Any]]:
    """What was measured, which OmegaConf lets be of anything within its lists."""
    yield "throughput", [list(asdict(record.throughput).values())]
    yield "usage.machine_load", [record.usage.machine_load or 0]
    yield "usage.ranks", [[each.peak_memory_bytes, each.load or 0] for each in record.usage.ranks]
    if record.split is not None:
        yield "split.phases", list(record.split.phases.values())
        yield "split.step", [record.split.step]
        yield "split.steps", record.split.steps
        yield "split.local_backward", record.split.local_backward


def _is_of_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_of_numbers, value))
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _split_contradictions(split: Split, ranks: int) -> Iterator[str]:
    if tuple(split.phases) != PHASES:
        yield f"split.phases must be {', '.join(PHASES)}"
        return
    if len(split.steps) != ranks:
        yield f"split.steps must be of {ranks} ranks"
    sum_of_parts = sum(split.phases.values())
    if not abs(sum_of_parts - split.step) <= TOLERANCE * split.step:
        yield (
            f"split: the parts add up to {sum_of_parts:.4g} s, and the step took {split.step:.4g} s"
        )
    if split.step <= 0:
        yield "split.step must be greater than 0"
    if min(split.phases.values()) < 0:
        yield "split.phases must not be negative"


def _select(config: Any, key: str, absent: Any = None) -> Any:
    for part in key.split("."):
        config = config.get(part, absent) if isinstance(config, dict) else absent
    return config


# --- what may be published ----------------------------------------------------------------------


def published(value: Any, key: str = "") -> Any:
    """A configuration without the names of machines and without paths of this machine."""
    if isinstance(value, Mapping):
        return {k: published(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [published(each, key) for each in value]
    if key in _KEYS:
        return None
    return last_part(value) if isinstance(value, str) else value


def last_part(text: str) -> str:
    """An absolute path, a path from the home folder or a URL, cut down to its last part."""
    if re.match(r"/|~|\.\./|[a-z][a-z0-9+]*://", text):
        return f"…/{text.rstrip('/').rpartition('/')[2]}"
    return text


def published_command(arguments: Sequence[str]) -> str:
    """The command that made a record, as it would be typed in a checkout.

    Args:
        arguments: of ``train.py``.
    """
    kept = []
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if key.lstrip("+") in _KEYS or key.startswith("hydra."):
            continue
        kept.append(f"{key}{sign}{last_part(value)}" if sign else last_part(argument))
    return " ".join(["python train.py", *kept])


def software_of(environment: Mapping[str, Any]) -> Software:
    """From ``environment.json``."""
    return Software(
        python=environment["python"],
        paddle=dict(environment["paddle"]),
        packages=dict(environment["packages"]),
        image=_image_of(environment["image"]),
    )


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """From ``environment.json``."""
    gpu = environment["gpu"]
    return Machine(
        cpu=environment["cpu"]["model"],
        cores=environment["cpu"]["cores"],
        usable_cores=environment["cpu"]["usable_cores"],
        memory_bytes=environment["memory_bytes"],
        system=environment["os"],
        driver=gpu["driver"] if gpu else None,
        gpus=[Gpu(**device) for device in gpu["devices"]] if gpu else [],
    )


def code_of(environment: Mapping[str, Any]) -> Code:
    """From ``environment.json``: what git says, or else the image.

    Raises:
        UserError: neither knows.
    """
    if environment["git"] is not None:
        return Code(environment["git"]["commit"], not environment["git"]["dirty"])
    image = environment["image"]
    revision = image.get("image", {}).get("revision") if isinstance(image, Mapping) else None
    if revision and revision != "unknown":
        commit = str(revision)
        return Code(commit.partition("-")[0], "-" not in commit)
    raise UserError(
        "a record must say which commit it measured, and neither git nor the image tells",
        "run it in a git checkout (with git installed), or in an image that `make image` built",
    )


def _image_of(image: Any) -> Any:
    """What identifies an image: its name without the registry, or its description's head."""
    if isinstance(image, Mapping):
        return {key: _without_host(str(each)) for key, each in image["image"].items()}
    return _without_host(image) if isinstance(image, str) else None


def _without_host(name: str) -> str:
    return name.rpartition("/")[2]


# --- for people ---------------------------------------------------------------------------------


def load_of(usage: Usage) -> str:
    """The mean over the ranks, with its unit."""
    loads = [each.load for each in usage.ranks if each.load is not None]
    if not loads:
        return "not known"
    mean = fmean(loads)
    return f"{mean:.0%} of a device" if usage.kind == "gpu" else f"{mean:.2f} cores a rank"


def summary(record: Record) -> str:
    """A record in a few lines."""
    speed, usage = record.throughput, record.usage
    config = record.config
    ranks = f"{record.world_size} rank{'s' if record.world_size > 1 else ''}"
    machine = ""
    if usage.machine_load is not None:
        machine = f", {usage.machine_load:.0%} of the machine's cores"
    lines = [
        f"{config['model']['name']} on {config['dataset']['name']}, {record.topology} ({ranks}), "
        f"{config['global_batch_size']} images a step",
        f"  speed    {speed.median:,.1f} images/s (median of {len(speed.samples)}, "
        f"{speed.lowest:,.1f} to {speed.highest:,.1f})",
        f"  memory   {max(each.peak_memory_bytes for each in usage.ranks) / 2**20:,.0f} MiB "
        "on the rank that needs most",
        f"  load     {load_of(usage)}{machine}",
    ]
    if record.split is not None:
        whole = record.split.step
        lines.append(
            f"  step     {whole * 1000:,.1f} ms, {whole / record.loop_step:.2f} of the loop's"
        )
        lines += [
            f"    {name.replace('_', ' '):<14}{seconds * 1000:>10,.1f} ms  {seconds / whole:>4.0%}"
            for name, seconds in record.split.phases.items()
        ]
    return "\n".join(lines)
