"""What the variables of schedulers say of how many processes are on this node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import scheduler
from recipes.config import Config, TopologyConfig, UserError
from recipes.scheduler import processes_here, refuse_several_processes

ROOT = Path(__file__).parent.parent


def folded(tasks: list[int]) -> str:
    """Slurm's notation for the tasks of each node: equal neighbours as ``4(x2)``."""
    parts: list[tuple[int, int]] = []
    for count in tasks:
        if parts and parts[-1][0] == count:
            parts[-1] = (count, parts[-1][1] + 1)
        else:
            parts.append((count, 1))
    return ",".join(str(n) if times == 1 else f"{n}(x{times})" for n, times in parts)


@given(tasks=st.lists(st.integers(1, 3), min_size=1, max_size=9), data=st.data())
def test_slurm_tells_the_tasks_of_a_step_on_each_node(
    tasks: list[int], data: st.DataObject
) -> None:
    node = data.draw(st.integers(0, len(tasks) - 1))
    environment = {"SLURM_STEP_TASKS_PER_NODE": folded(tasks), "SLURM_NODEID": str(node)}
    found = processes_here(environment)
    assert found is not None
    assert found[:2] == ("SLURM_STEP_TASKS_PER_NODE", tasks[node])


# As Slurm 22.05 sets them.
BATCH = {
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
ALLOCATION = {"SLURM_NNODES": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
ONE_TASK = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
TWO_TASKS = ONE_TASK | {"SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({}, Config()),
        (BATCH, Config()),
        (ALLOCATION, Config()),
        (ONE_TASK, Config()),
        (ONE_TASK | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, Config()),
        (TWO_TASKS | {"SLURM_STEP_TASKS_PER_NODE": "torn("}, Config()),
        (TWO_TASKS | {"SLURM_NODEID": "5"}, Config()),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Config()),
        ({"LOCAL_WORLD_SIZE": "many"}, Config()),
        (TWO_TASKS, Config(topology=TopologyConfig(2, 1, node_rank=1))),
    ],
)
def test_no_false_alarm(environment: dict[str, str], config: Config) -> None:
    refuse_several_processes(config, environment)


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        (TWO_TASKS, "srun --ntasks-per-node=1"),
        (TWO_TASKS | {"SLURM_LOCALID": "1", "SLURM_PROCID": "1"}, "srun --ntasks-per-node=1"),
        *(({name: "2"}, remedy) for name, remedy in scheduler._COUNTS.items()),
    ],
)
def test_one_of_several_is_refused(environment: dict[str, str], remedy: str) -> None:
    with pytest.raises(UserError, match="one of 2 processes on this node") as caught:
        refuse_several_processes(Config(topology=TopologyConfig(1, 2)), environment)
    assert caught.value.remedy.startswith(remedy)
    # The other half of the remedy works as well.
    (name,) = [name for name in environment if f"env -u {name} " in caught.value.remedy]
    rest = {key: value for key, value in environment.items() if key != name}
    refuse_several_processes(Config(), rest)


def test_a_run_is_refused_before_it_makes_anything(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "train.py", f"hydra.run.dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=os.environ | TWO_TASKS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "SLURM_STEP_TASKS_PER_NODE=2 says that this is one of 2 processes" in ended.stderr
    assert "remedy: srun --ntasks-per-node=1" in ended.stderr
    assert list(tmp_path.iterdir()) == []
