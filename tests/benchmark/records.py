"""A complete record for tests, as its JSON."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from recipes.benchmark.record import PHASES
from recipes.config import Config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def a_record(
    devices: int = 1,
    samples: tuple[float, ...] = (100.0, 101.0, 99.0, 100.5, 99.5),
    *,
    gpu: bool = False,
    split: bool = True,
    **config: Any,
) -> dict[str, Any]:
    """The JSON of a record.

    Args:
        devices: of the topology.
        samples: images/s.
        config: keys with a double underscore for the dot, such as ``model__name="ResNet50"``.
    """
    composed = OmegaConf.structured(Config)
    changes = {
        "task.name": "benchmark",
        "model.name": "ResNet18",
        "dataset.name": "digits",
        "dataset.image_size": 8,
        "topology.devices": devices,
        "optimizer.name": "momentum",
        "optimizer.base_lr": 0.1,
        "schedule.name": "cosine",
        "batch_size": 64 // devices,
        "global_batch_size": 64,
        "benchmark.repeats": len(samples),
        **{key.replace("__", "."): value for key, value in config.items()},
    }
    for key, value in changes.items():
        OmegaConf.update(composed, key, value)
    phases = dict(zip(PHASES, (0.01, 0.01, 0.2, 0.35, 0.04, 0.02, 0.01), strict=True))
    ordered = sorted(samples)
    made: dict[str, Any] = {
        "schema": 1,
        "made": "2026-01-01T12:00:00+00:00",
        "command": f"python train.py task=benchmark topology=1x{devices}",
        "config": OmegaConf.to_container(composed),
        "code": {"commit": COMMIT, "clean": True},
        "software": {
            "python": "3.11.7",
            "paddle": {"version": "3.3.1", "commit": "abc", "cuda": None},
            "packages": {"numpy": "2.4.6", "hydra-core": "1.3.2"},
            "image": None,
        },
        "machine": {
            "cpu": "A CPU",
            "cores": 2,
            "usable_cores": 2,
            "memory_bytes": 2**34,
            "system": "Linux-6-x86_64",
            "driver": "570.1" if gpu else None,
            "gpus": [{"name": "A GPU", "memory_bytes": 2**36} for _ in range(4 if gpu else 0)],
        },
        "throughput": {
            "samples": list(samples),
            "data_wait": [0.01] * len(samples),
            "median": ordered[len(samples) // 2]
            if len(samples) % 2
            else (ordered[len(samples) // 2 - 1] + ordered[len(samples) // 2]) / 2,
            "lowest": min(samples),
            "highest": max(samples),
        },
        "usage": {
            "kind": "gpu" if gpu else "cpu",
            "machine_load": 0.97,
            "ranks": [
                {"rank": rank, "peak_memory_bytes": 2**29, "load": 0.9} for rank in range(devices)
            ],
        },
        "split": {
            "phases": phases,
            "step": 0.641,
            "steps": [[[*phases.values(), 0.641]] * 2 for _ in range(devices)],
            "local_backward": [[0.35, 0.35]] * devices if devices > 1 else [[]],
        },
    }
    if not split:
        made["split"] = None
    return made
