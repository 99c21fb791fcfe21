"""Variables of Paddle's launcher: which a rank must have, and which must not reach one.

A shell, a pod or another job may have left any of them behind. Each alone makes Paddle wait for
processes that there are not, take another role, or fail in words of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, MutableMapping

# Every variable by which Paddle's launcher and its role makers find themselves in a job, also the
# older and the parameter-server ones; most begin alike. And what a parent here tells its ranks, and
# the secret that is none of their business.
_FOREIGN = re.compile(
    r"PADDLE_\w+|TRAINING_ROLE|POD_(IP|NAME)|MASTER_(ADDR|PORT)|COLLECTIVE_MASTER_IP|SYS_JOB_ID|"
    r"FLAGS_(selected_\w+|START_PORT|FIXED_PORT|LAUNCH_BARRIER)|PORT_RANGE|STAGE_(ID|NUM)|"
    r"DISTRIBUTED_TRAINER_ENDPOINTS|(TRAINER|PSERVER)_(IP_PORT_LIST|PORTS\w*)|HETER_\w+|"
    r"COORDINATOR_\w+|WITH_COVERAGE|FLEET_RECIPES_(RUN|REPORTS|PROGRESS|HOSTS|COMMAND|SECRET|SECRET_FILE)",
    re.ASCII,
)
# Those of them that are about how Paddle compiles and finds extensions, not about a job.
_KEPT = ("PADDLE_EXTENSION_DIR", "PADDLE_CUDA_ARCH_LIST")
# What the launcher gives a rank, and Paddle needs of it.
NEEDED = (
    *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE"),
    *("PADDLE_MASTER", "PADDLE_CURRENT_ENDPOINT"),
)
_GIVEN = (
    *NEEDED,
    *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_BACKUP_ENV_PATH", "PADDLE_GLOBAL_RANK"),
    *("PADDLE_GLOBAL_SIZE", "PADDLE_NNODES", "PADDLE_RANK_IN_NODE", "PADDLE_DISTRI_BACKEND"),
    *("FLAGS_selected_gpus", "FLEET_RECIPES_RUN", "FLEET_RECIPES_REPORTS"),
    *("FLEET_RECIPES_PROGRESS", "FLEET_RECIPES_HOSTS", "FLEET_RECIPES_COMMAND"),
)
# What only a job of parameter servers has, all together.
_SERVERS = ("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PORT", "POD_IP")


def is_foreign(name: str) -> bool:
    """Whether a variable belongs to a launch of Paddle's, this one or another."""
    return _FOREIGN.fullmatch(name) is not None and name not in _KEPT


def without_foreign(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which nothing of another launch is left."""
    return {name: value for name, value in environment.items() if not is_foreign(name)}


@contextlib.contextmanager
def cleared(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Have nothing of another launch in an environment for a while: the only rank runs in it."""
    foreign = {name: value for name, value in environment.items() if is_foreign(name)}
    for name in foreign:
        del environment[name]
    try:
        yield
    finally:
        environment.update(foreign)


def keep_own(environment: MutableMapping[str, str]) -> None:
    """In a rank, leave of Paddle's variables those that its launcher has given it."""
    for name in [*environment]:
        if is_foreign(name) and name not in _GIVEN:
            del environment[name]


def of_parameter_servers(environment: Mapping[str, str]) -> str | None:
    """What tells that this process is of a job with parameter servers; None where nothing does."""
    if not all(name in environment for name in _SERVERS):
        return None
    return (
        f"TRAINING_ROLE={environment['TRAINING_ROLE']} and {_SERVERS[1]} are those of a job with "
        "parameter servers (PADDLE_SERVER_NUM, PADDLE_TRAINER_NUM), which train.py does not have"
    )


def contradictions(environment: Mapping[str, str]) -> str | None:
    """What keeps the variables from being the complete, consistent set of one launch.

    Args:
        environment: of a process that has some of them.

    Returns:
        The variable and what is wrong with it; None where all is well.
    """
    missing = [name for name in NEEDED if name not in environment]
    # Of thousands of ranks it is in a file, being too long for a variable.
    if not environment.keys() & {"PADDLE_TRAINER_ENDPOINTS", "PADDLE_BACKUP_ENV_PATH"}:
        missing.append("PADDLE_TRAINER_ENDPOINTS")
    if missing:
        return f"{missing[0]} is missing"
    numbers: dict[str, int] = {}
    for name in (*NEEDED[:4], "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_NNODES"):
        text = environment.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            return f"{name}={text} should be a number"
        numbers[name] = int(text)
    return _disagreement(numbers) or _endpoint_fault(environment, numbers)


def _disagreement(numbers: Mapping[str, int]) -> str | None:
    rank, world, local_rank, local_size = (numbers[name] for name in NEEDED[:4])
    rules = {
        f"PADDLE_LOCAL_SIZE={local_size} must be 1 or more": local_size > 0,
        f"PADDLE_TRAINERS_NUM={world} must be 1 or more": world > 0,
        f"PADDLE_TRAINER_ID={rank} is not below PADDLE_TRAINERS_NUM={world}": rank < world,
        f"PADDLE_LOCAL_RANK={local_rank} is not below PADDLE_LOCAL_SIZE={local_size}": (
            local_rank < local_size
        ),
    }
    for text, holds in rules.items():
        if not holds:
            return text
    rules = {
        f"PADDLE_TRAINERS_NUM={world} does not divide by PADDLE_LOCAL_SIZE={local_size}": (
            world % local_size == 0
        ),
        f"PADDLE_TRAINER_ID={rank} is not PADDLE_LOCAL_RANK={local_rank} of a node of "
        f"PADDLE_LOCAL_SIZE={local_size}": rank % local_size == local_rank,
    }
    for name, other in (("PADDLE_GLOBAL_RANK", rank), ("PADDLE_GLOBAL_SIZE", world)):
        like = "PADDLE_TRAINER_ID" if other == rank else "PADDLE_TRAINERS_NUM"
        value = numbers.get(name, other)
        rules[f"{name}={value}, but {like}={other}"] = value == other
    nodes = numbers.get("PADDLE_NNODES", world // local_size)
    rules[f"PADDLE_NNODES={nodes} times PADDLE_LOCAL_SIZE={local_size} is not {world}"] = (
        nodes * local_size == world
    )
    return next((text for text, holds in rules.items() if not holds), None)


def _endpoint_fault(environment: Mapping[str, str], numbers: Mapping[str, int]) -> str | None:
    master = environment["PADDLE_MASTER"]
    host, _, port = master.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 0 < int(port) < 2**16:
        return f"PADDLE_MASTER={master} should be HOST:PORT"
    listed = environment.get("PADDLE_TRAINER_ENDPOINTS")
    if listed is None:
        return None
    endpoints, world = listed.split(","), numbers["PADDLE_TRAINERS_NUM"]
    if len(endpoints) != world:
        return f"PADDLE_TRAINER_ENDPOINTS has {len(endpoints)} of PADDLE_TRAINERS_NUM={world}"
    own = environment["PADDLE_CURRENT_ENDPOINT"]
    if endpoints[numbers["PADDLE_TRAINER_ID"]] != own:
        return f"PADDLE_CURRENT_ENDPOINT={own} is not this rank's in PADDLE_TRAINER_ENDPOINTS"
    return None
