"""NODESxDEVICES, and where a process stands in it. Pure functions, no I/O."""

from __future__ import annotations

import re
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
        ValueError: a variable of the launcher is missing or not a number.
    """
    if "PADDLE_TRAINER_ID" not in environment or "PADDLE_LOCAL_RANK" not in environment:
        return None

    def number(name: str) -> int:
        try:
            return int(environment[name])
        except (KeyError, ValueError):
            raise ValueError(
                f"the environment variable {name} should be a number, and is "
                f"{environment.get(name, 'missing')}: paddle.distributed.launch sets it, and "
                "another program must not"
            ) from None

    rank, local_rank = number("PADDLE_TRAINER_ID"), number("PADDLE_LOCAL_RANK")
    local_size, world_size = number("PADDLE_LOCAL_SIZE"), number("PADDLE_TRAINERS_NUM")
    # Every node of a topology runs equally many processes, so the node follows from the rank.
    return Place(rank, world_size, local_rank, rank // local_size)


def threads_per_rank(cores: int, devices: int) -> int:
    """CPU threads for each of a node's processes, so that together they fit its cores."""
    return max(1, cores // devices)


@dataclass(frozen=True)
class NodeIdentity:
    """Which node of a job this machine is, and where node 0 is to be found."""

    node: int
    master: str  # a name or an address
    port: int | None  # None: the default


# The variables that tell a node's number and node 0's place, by who sets them, in the order in
# which they are asked: Paddle's launcher, torchrun, a Kubernetes indexed Job, Slurm.
NODE_VARIABLES = ("PADDLE_RANK", "GROUP_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID")
MASTER_VARIABLES = ("PADDLE_MASTER", "MASTER_ADDR")
SLURM_HOSTS_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


def find_node(
    master: str | None, node_rank: int | None, environment: Mapping[str, str]
) -> NodeIdentity | None:
    """Who this node is, from the configuration or else from the environment.

    Args:
        master: ``topology.master``, HOST or HOST:PORT.
        node_rank: ``topology.node_rank``.

    Returns:
        None where the number or node 0's place is not to be found.

    Raises:
        ValueError: a variable or the port is not a number.
    """
    if node_rank is None:
        told = [environment[name] for name in NODE_VARIABLES if environment.get(name)]
        node_rank = int(told[0]) if told else None
    if master is None:
        told = [environment[name] for name in MASTER_VARIABLES if environment.get(name)]
        hosts = [environment[name] for name in SLURM_HOSTS_VARIABLES if environment.get(name)]
        master = told[0] if told else first_host(hosts[0]) if hosts else None
        if master and ":" not in master and environment.get("MASTER_PORT"):
            master = f"{master}:{environment['MASTER_PORT']}"
    if master is None or node_rank is None:
        return None
    host, _, port = master.partition(":")
    return NodeIdentity(node_rank, host, int(port) if port else None)


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as ``gpu[07-09,12],login``: ``gpu07``."""
    entry = re.findall(r"(?:\[[^]]*\]|[^,\[])+", hosts)[0]  # a comma in brackets does not end it
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", entry)
