"""NODESxDEVICES, and where a process stands in it. Pure functions, no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.launcher_environment import NEEDED, contradictions, of_parameter_servers


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
        ValueError: the launcher's variables are not the complete, consistent set of one launch.
    """
    fault = of_parameter_servers(environment)
    if fault is None:
        if "PADDLE_TRAINER_ID" not in environment or "PADDLE_LOCAL_RANK" not in environment:
            return None
        fault = contradictions(environment)
    if fault is not None:
        raise ValueError(
            f"the variables of paddle.distributed.launch in the environment are not those of one "
            f"launch: {fault}"
        )
    rank, world_size, local_rank, local_size = (int(environment[name]) for name in NEEDED[:4])
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
_LONGEST_HOST = 253  # characters of a name in the DNS
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
        ValueError: a setting or variable is no number, host or port; the message names it.
    """
    if node_rank is None:
        told = [name for name in NODE_VARIABLES if environment.get(name)]
        node_rank = _node_number(told[0], environment[told[0]]) if told else None
    where = "topology.master"
    if master is None:
        where, master = _told_master(environment)
    if master is None or node_rank is None:
        return None
    host, port = split_master(where, master)
    return NodeIdentity(node_rank, host, port)


def _node_number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(f"{name}={text} is not the number of a node, which count from 0")
    return int(text)


def _told_master(environment: Mapping[str, str]) -> tuple[str, str | None]:
    """The variable that says where node 0 is, and what it says, with the port if there is one."""
    names = [name for name in MASTER_VARIABLES if environment.get(name)]
    lists = [name for name in SLURM_HOSTS_VARIABLES if environment.get(name)]
    if not names and not lists:
        return "", None
    name = (names or lists)[0]
    try:
        master = environment[name] if names else first_host(environment[name])
    except ValueError as error:
        raise ValueError(f"{name}={environment[name]} {error}") from None
    if ":" not in master and environment.get("MASTER_PORT"):
        return f"{name} and MASTER_PORT", f"{master}:{environment['MASTER_PORT']}"
    return name, master


def split_master(where: str, master: str) -> tuple[str, int | None]:
    """HOST or HOST:PORT as its two parts.

    Args:
        where: the setting or variable that says it, for the message.

    Raises:
        ValueError: it is neither.
    """
    host, colon, text = master.partition(":")
    try:
        encoded = host.rstrip(".").encode("idna")
        usable = 0 < len(encoded) <= _LONGEST_HOST and not re.search(rb"[\s/\\@\[\]?#]", encoded)
    except UnicodeError:  # a part between dots that is empty, or too long
        usable = False
    if not usable:
        raise ValueError(f"{where}={master} names no host: write HOST or HOST:PORT")
    if not colon:
        return host, None
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) < 2**16:
        raise ValueError(f"{where}={master} has no port from 1 to 65535: write HOST or HOST:PORT")
    return host, int(text)


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as ``gpu[07-09,12],login``: ``gpu07``.

    Raises:
        ValueError: it names none.
    """
    # A comma in brackets does not end an entry.
    entry = re.match(r"(?:\[\d[^]\[]*\]|[^,\[\]])+(?=,|$)", hosts)
    if entry is None:
        raise ValueError("is not a list of hosts as Slurm writes it")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", entry[0])
