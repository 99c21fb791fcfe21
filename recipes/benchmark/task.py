"""The task: the speed of `trainer.train` as users run it, then the parts of its step, on record."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from omegaconf import OmegaConf

from recipes import distributed, telemetry, trainer
from recipes.benchmark import record, split
from recipes.benchmark.usage import Watch
from recipes.config import Config, UserError, uses_gpu
from recipes.progress import StepDisplay
from recipes.pulse import Phase, Pulse
from recipes.topology import Place

_log = logging.getLogger(__name__)


def benchmark(
    config: Config,
    run: telemetry.RunFolder,
    place: Place,
    display: StepDisplay,
    pulse: Pulse,
) -> telemetry.Result:
    """Measure; rank 0 leaves the record in the run folder, and where ``benchmark.output`` says.

    The speed is that of `trainer.train`, with all its logging; nothing is evaluated or saved.

    Args:
        config: checked, with its steps filled in.
        run: gets ``benchmark.json`` besides what a training leaves.
        place: this process in the job, which `distributed.start` has joined.
        display: shows a person how far the measured training is.
        pulse: shows the parent that this rank moves on.

    Returns:
        As of a training; `images_per_second` is the median on rank 0.

    Raises:
        UserError: what a training may raise; the record cannot be written, or it cannot be told
            which code it is of; or a checkpoint is in the run folder.
    """
    environment: dict[str, Any] = {}
    target = None
    if place.rank == 0:
        # All that could refuse the record, before the minutes that it takes.
        if run.checkpoints.exists():
            raise UserError(
                f"{run.checkpoints} holds a training, which task=benchmark would continue",
                "choose another hydra.run.dir",
            )
        environment = telemetry.environment()
        record.code_of(environment)
        target = target_of(config)
    watch = Watch(display, config, place)
    result = trainer.train(config, run, place, watch, pulse)
    if result.status != "completed":
        return result
    own = np.array([watch.peak_memory(), watch.load()])
    figures = distributed.gather(paddle.to_tensor(own, dtype="float64"))
    parts = None
    if config.benchmark.split_steps:
        pulse.mark(Phase.PREPARING)
        free_memory(config)
        parts = split.measure(config, place, pulse)
    if place.rank != 0:
        return result
    pulse.mark(Phase.SAVING)
    made = record.Record(
        schema=record.SCHEMA,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        command=record.published_command(command()),
        config=record.published(OmegaConf.to_container(OmegaConf.structured(config))),
        code=record.code_of(environment),
        software=record.software_of(environment),
        machine=record.machine_of(environment),
        throughput=throughput_of(telemetry.read_metrics(run.metrics), config),
        usage=watch.usage(figures),
        split=parts,
    )
    for path in (run.benchmark, *([target] if target is not None else [])):
        record.write(path, made)
        _log.info("record: %s", path)
    return replace(result, images_per_second=made.throughput.median)


def throughput_of(events: list[dict[str, Any]], config: Config) -> record.Throughput:
    """From the events of the run: each interval after the warm-up is a repetition."""
    measured = [
        event
        for event in events
        if event["event"] == "train" and event["step"] > config.benchmark.warmup
    ]
    return record.Throughput.of(
        [event["images_per_second"] for event in measured],
        [event["data_wait"] for event in measured],
    )


def target_of(config: Config) -> Path | None:
    """The file of the record besides the run folder's; None where none is asked for.

    Raises:
        UserError: there is a record of that name, or the folder that ``benchmark.output`` names
            cannot be written.
    """
    if config.benchmark.output is None:
        return None
    folder = Path(config.benchmark.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise UserError(
            f"benchmark.output={folder} cannot hold the record: {problem}",
            "name a folder that can be written; in a container, one that is mounted",
        )
    path = folder / f"{config.benchmark.name or default_name(config)}.json"
    if path.exists():
        raise UserError(f"{path} exists", "choose another benchmark.name, or remove the file")
    return path


def default_name(config: Config) -> str:
    """Such as ``resnet50-imagenet-224-1x4-gpu-20260101-120000``."""
    device = "gpu" if uses_gpu(config) else "cpu"
    parts = [config.model.name, config.dataset.name, str(config.dataset.image_size)]
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return "-".join([*parts, str(config.shape), device, now]).lower()


def command() -> list[str]:
    """The arguments that the run was started with, which a rank knows from its parent."""
    told = os.environ.get(telemetry.COMMAND_VARIABLE)
    return sys.argv[1:] if told is None else shlex.split(told)


def free_memory(config: Config) -> None:
    """Let go of the model that was trained, before there is another."""
    gc.collect()
    if uses_gpu(config):
        paddle.device.cuda.empty_cache()
