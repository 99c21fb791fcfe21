"""NODESxDEVICES, and where a process stands in it. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """How many machines, and how many processes (one per device) on each."""

    nodes: int
    devices: int

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}"


@dataclass(frozen=True)
class Place:
    """One process of a job: its rank among all, on its node, and its node's number."""

    rank: int
    world_size: int
    local_rank: int
    node: int

    @property
    def tag(self) -> str:
        """How log lines name the process: ``[node rank]``."""
        return f"[node{self.node} rank{self.rank}]"


def place_from_environment(environment: Mapping[str, str]) -> Place | None:
    """Where `paddle.distributed.launch` put this process; None outside of a launch.

    Raises:
        ValueError: a variable of the launcher is there but not a number.
    """
    if "PADDLE_TRAINER_ID" not in environment or "PADDLE_LOCAL_RANK" not in environment:
        return None
    rank = int(environment["PADDLE_TRAINER_ID"])
    local_rank = int(environment["PADDLE_LOCAL_RANK"])
    local_size = int(environment.get("PADDLE_LOCAL_SIZE", "1"))
    world_size = int(environment["PADDLE_TRAINERS_NUM"])
    # Every node of a topology runs equally many processes, so the node follows from the rank.
    return Place(rank, world_size, local_rank, rank // local_size)


def threads_per_rank(cores: int, devices: int) -> int:
    """CPU threads for each of a node's processes, so that together they fit its cores."""
    return max(1, cores // devices)
