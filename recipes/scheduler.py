"""One parent a node: what a scheduler says of how many processes it has started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from recipes.config import Config, UserError

# How many processes of a job's step are on this node, by what tells it, with what starts one only.
# A batch script and the shell of an allocation have none of these: they are of the step alone.
_COUNTS = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "mpirun --map-by ppr:1:node",
    "MPI_LOCALNRANKS": "mpirun -ppn 1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "mpirun -ppn 1",
    "PALS_LOCAL_SIZE": "mpiexec --ppn 1",
    "JSM_NAMESPACE_LOCAL_SIZE": "jsrun --tasks_per_rs 1 --rs_per_host 1",
    "LOCAL_WORLD_SIZE": "python train.py without torchrun, or torchrun --nproc_per_node 1",
    "HOROVOD_LOCAL_SIZE": "python train.py without horovodrun",
}
_SLURM = "SLURM_STEP_TASKS_PER_NODE"


def processes_here(environment: Mapping[str, str]) -> tuple[str, int, str] | None:
    """How many processes a scheduler has started on this node.

    Returns:
        The variable that tells it, the number, and what starts one; None where nothing tells it.
    """
    tasks = _tasks_of_node(environment.get(_SLURM, ""), environment.get("SLURM_NODEID", ""))
    if tasks is not None:
        return _SLURM, tasks, "srun --ntasks-per-node=1"
    for name, remedy in _COUNTS.items():
        text = environment.get(name, "")
        if re.fullmatch(r"\d{1,6}", text, re.ASCII):
            return name, int(text), remedy
    return None


def refuse_several_processes(config: Config, environment: Mapping[str, str]) -> None:
    """See that a scheduler has started one process on this node: it starts all ranks itself.

    Who numbers the nodes by hand may have several on one machine.

    Raises:
        UserError: it has started several, which would each train the whole.
    """
    found = processes_here(environment)
    if found is None or found[1] < 2 or config.topology.node_rank is not None:
        return
    name, count, remedy = found
    raise UserError(
        f"{name}={environment[name]} says that this is one of {count} processes on this node; "
        f"one is needed, which starts the node's {config.topology.devices} itself, and each of "
        f"{count} would do all the work",
        f"{remedy}; where the others do something else, `env -u {name} python train.py …`",
    )


def _tasks_of_node(counts: str, node: str) -> int | None:
    """The tasks of a node from Slurm's counts of all nodes, such as ``4(x2),1``."""
    if not re.fullmatch(r"\d{1,6}", node, re.ASCII):
        return None
    before = 0
    for part in counts.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if found is None:
            return None
        before += int(found[2] or 1)
        if int(node) < before:
            return int(found[1])
    return None
