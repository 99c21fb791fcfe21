"""Which cores a rank runs on."""

from __future__ import annotations

import os

from recipes.config import Config, Machine, uses_gpu
from recipes.topology import Place

_WORD = 64  # bits of one number in NVML's masks


def bind(config: Config, place: Place) -> None:
    """Keep this process, and the threads and processes it starts from now on, to its cores."""
    usable = os.sched_getaffinity(0)
    cores = usable
    if config.affinity == "split":
        cores = share(usable, place.local_rank, config.topology.devices)
    elif config.affinity == "auto" and uses_gpu(config):
        cores = near_gpu(place.local_rank) & usable or usable
    if cores != usable:
        os.sched_setaffinity(0, cores)


def share(cores: set[int], local_rank: int, devices: int) -> set[int]:
    """A rank's part of a node's cores, by number, so that neighbours stay together.

    Returns:
        Equally many for each rank, none of them another rank's; all where there are fewer cores
        than ranks.
    """
    each = len(cores) // devices
    return set(sorted(cores)[local_rank * each : (local_rank + 1) * each]) or cores


def near_gpu(local_rank: int) -> set[int]:
    """The cores of the NUMA node that a rank's GPU is attached to, as NVML tells them."""
    import pynvml

    visible = Machine.this().visible
    name = visible[local_rank] if visible is not None else str(local_rank)
    pynvml.nvmlInit()
    try:
        if name.isdigit():
            device = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            device = pynvml.nvmlDeviceGetHandleByUUID(name)
        words = pynvml.nvmlDeviceGetCpuAffinity(device, -(-(os.cpu_count() or 1) // _WORD))
    finally:
        pynvml.nvmlShutdown()
    return cores_in(list(words))


def cores_in(words: list[int]) -> set[int]:
    """The numbers of the bits that are set in a mask of 64-bit words, lowest first."""
    return {
        index * _WORD + bit
        for index, word in enumerate(words)
        for bit in range(_WORD)
        if word >> bit & 1
    }
