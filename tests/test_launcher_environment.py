"""Variables of other launches: none reaches a rank, and a rank's own set has to be whole."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import launcher_environment, ranks, telemetry
from recipes.config import Config, TopologyConfig
from recipes.launcher_environment import NEEDED, cleared, contradictions, is_foreign, keep_own
from recipes.topology import place_from_environment

ROOT = Path(__file__).parent.parent
# How Paddle's Python code reads a variable of the environment.
READ = re.compile(
    r"""(?:environ(?:\.get|\.pop|\.setdefault)?[\[(]|getenv(?:_or_backup)?\()\s*f?["']([A-Za-z]\w+)["']"""
)
# What it reads that is not about who is who in a job: devices, profiling, the user's tuning.
UNRELATED = re.compile(
    r"(?!FLAGS_(selected_|START_PORT|FIXED_PORT|LAUNCH_BARRIER))FLAGS_\w+|\w*VISIBLE_DEVICES|CUDA_\w+|"
    r"https?_proxy|XPU_\w+|NVIDIA_\w+|CPU_NUM|POPART_\w+|TEST_MODE|RUN_STATIC|PSERVER_DEBUG|"
    r"PARALLEL_CROSS_ENTROPY|PATH|HOME|LD_LIBRARY_PATH|skip_\w+"
)


def launcher_sources() -> list[Path]:
    spec = importlib.util.find_spec("paddle")
    assert spec is not None
    assert spec.origin is not None
    return sorted((Path(spec.origin).parent / "distributed").rglob("*.py"))


def variables_that_paddle_reads() -> list[str]:
    """By the wheel's own text, the launcher's table of arguments included."""
    found = set()
    for path in launcher_sources():
        text = path.read_text(errors="replace")
        found |= set(READ.findall(text))
        if path.name == "args_envs.py":
            found |= set(re.findall(r"""^\s+["'](\w+)["']: \(["']""", text, re.MULTILINE))
    return sorted(name for name in found if not UNRELATED.fullmatch(name))


NAMES = variables_that_paddle_reads()
# Those of the tracker, and of older and newer versions.
MORE = [
    *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_SERVER_NUM", "PADDLE_TRAINER_NUM", "PADDLE_TRAINER_ID"),
    *("PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", "PADDLE_LOCAL_RANK", "PADDLE_GLOBAL_RANK"),
    *("TRAINING_ROLE", "PADDLE_PORT", "FLAGS_selected_gpus", "PADDLE_WITH_GLOO", "POD_IP"),
    *("MASTER_ADDR", "MASTER_PORT", "PADDLE_LOCAL_SIZE", "PADDLE_BACKUP_ENV_PATH"),
    *("FLEET_RECIPES_RUN", "FLEET_RECIPES_REPORTS", "FLEET_RECIPES_HOSTS"),
]


def test_the_wheel_reads_many() -> None:
    assert len(NAMES) > 60
    assert {"PADDLE_SERVER_NUM", "PADDLE_TRAINER_ID", "TRAINING_ROLE", "MASTER_ADDR"} <= {*NAMES}


@pytest.mark.parametrize("name", sorted({*NAMES, *MORE}))
def test_no_variable_of_a_launch_reaches_the_only_rank(name: str) -> None:
    environment = {"HOME": "/root", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"}
    before = dict(environment)
    environment[name] = "stale"
    with cleared(environment):
        assert environment == before
    assert environment == {**before, name: "stale"}


def composed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The launcher's arguments and environment for 1x2, without starting it."""
    started: list[tuple[list[str], dict[str, str]]] = []

    class NoProcess:
        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            started.append((command, env))

    config = Config(topology=TopologyConfig(1, 2), device="cpu")
    of_ranks = ranks.Ranks(config, telemetry.RunFolder(folder / "run"))
    of_ranks._scratch = folder
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", NoProcess)
        of_ranks._launch()
    return started[0]


@pytest.mark.parametrize("name", sorted({*NAMES, *MORE}))
def test_no_variable_changes_how_several_ranks_are_launched(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = composed(monkeypatch, tmp_path)
    monkeypatch.setenv(name, "7")
    assert composed(monkeypatch, tmp_path) == before


@pytest.mark.parametrize("name", ["PADDLE_EXTENSION_DIR", "HTTP_PROXY", "NCCL_DEBUG", "PATH", "X"])
def test_what_is_of_no_launch_stays(name: str) -> None:
    assert not is_foreign(name)


# --- a rank's own set


def launched(nodes: int, devices: int, rank: int) -> dict[str, str]:
    """What Paddle's launcher gives a rank."""
    endpoints = [f"10.0.0.1:{5000 + number}" for number in range(nodes * devices)]
    return {
        "PADDLE_MASTER": "10.0.0.1:4999",
        "PADDLE_GLOBAL_SIZE": str(nodes * devices),
        "PADDLE_LOCAL_SIZE": str(devices),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(rank % devices),
        "PADDLE_NNODES": str(nodes),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(nodes * devices),
        "PADDLE_RANK_IN_NODE": str(rank % devices),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }


SMALL = st.integers(1, 4)


@given(data=st.data(), nodes=SMALL, devices=SMALL)
def test_a_whole_set_has_no_contradiction_and_half_of_one_has(
    data: st.DataObject, nodes: int, devices: int
) -> None:
    rank = data.draw(st.integers(0, nodes * devices - 1))
    whole = launched(nodes, devices, rank)
    assert contradictions(whole) is None
    kept = dict(whole) | {"HOME": "/", "FLEET_RECIPES_RUN": "/run"}
    keep_own(kept)
    assert kept == whole | {"HOME": "/", "FLEET_RECIPES_RUN": "/run"}
    gone = data.draw(st.sampled_from([*NEEDED, "PADDLE_TRAINER_ENDPOINTS"]))
    fault = contradictions({name: value for name, value in whole.items() if name != gone})
    assert fault == f"{gone} is missing"
    assert contradictions(whole | {gone: ""}) is not None


@given(data=st.data(), nodes=SMALL, devices=SMALL, others=st.tuples(SMALL, SMALL))
def test_a_variable_of_another_launch_is_found_or_says_the_same(
    data: st.DataObject, nodes: int, devices: int, others: tuple[int, int]
) -> None:
    """One variable from another job: named, or the rank's place is the one it had."""
    rank = data.draw(st.integers(0, nodes * devices - 1))
    whole = launched(nodes, devices, rank)
    foreign = launched(*others, data.draw(st.integers(0, others[0] * others[1] - 1)))
    name = data.draw(st.sampled_from(sorted(foreign)))
    mixed = whole | {name: foreign[name]}
    fault = contradictions(mixed)
    if fault is None:
        assert place_from_environment(mixed) == place_from_environment(whole)
    else:
        assert "PADDLE_" in fault
        with pytest.raises(ValueError, match="not those of one launch"):
            place_from_environment(mixed)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"PADDLE_LOCAL_SIZE": "0"}, "PADDLE_LOCAL_SIZE=0 must be 1 or more"),
        ({"PADDLE_LOCAL_SIZE": "-1"}, "PADDLE_LOCAL_SIZE=-1 should be a number"),
        ({"PADDLE_TRAINER_ID": "9"}, "PADDLE_TRAINER_ID=9 is not below PADDLE_TRAINERS_NUM=4"),
        ({"PADDLE_LOCAL_RANK": "0"}, "PADDLE_TRAINER_ID=3 is not PADDLE_LOCAL_RANK=0 of a node"),
        ({"PADDLE_GLOBAL_RANK": "0"}, "PADDLE_GLOBAL_RANK=0, but PADDLE_TRAINER_ID=3"),
        ({"PADDLE_GLOBAL_SIZE": "9"}, "PADDLE_GLOBAL_SIZE=9, but PADDLE_TRAINERS_NUM=4"),
        ({"PADDLE_NNODES": "3"}, "PADDLE_NNODES=3 times PADDLE_LOCAL_SIZE=2 is not 4"),
        ({"PADDLE_MASTER": "here"}, "PADDLE_MASTER=here should be HOST:PORT"),
        ({"PADDLE_MASTER": "a:99999"}, "PADDLE_MASTER=a:99999 should be HOST:PORT"),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1"}, "PADDLE_TRAINER_ENDPOINTS has 1 of"),
        ({"PADDLE_CURRENT_ENDPOINT": "a:1"}, "PADDLE_CURRENT_ENDPOINT=a:1 is not this rank's"),
        ({"PADDLE_TRAINERS_NUM": "\u0661"}, "PADDLE_TRAINERS_NUM=\u0661 should be a number"),
    ],
)
def test_contradictions_are_named(change: dict[str, str], fault: str) -> None:
    found = contradictions(launched(2, 2, 3) | change)
    assert found is not None
    assert found.startswith(fault)


def test_a_long_list_of_ranks_may_be_in_a_file() -> None:
    environment = launched(2, 2, 3) | {"PADDLE_BACKUP_ENV_PATH": "/tmp/file"}
    del environment["PADDLE_TRAINER_ENDPOINTS"]
    assert contradictions(environment) is None


def test_a_part_of_a_job_with_parameter_servers_is_refused() -> None:
    environment = {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:1",
        "PADDLE_PORT": "1",
        "POD_IP": "127.0.0.1",
    }
    with pytest.raises(ValueError, match=r"TRAINING_ROLE=PSERVER .* parameter servers"):
        place_from_environment(environment)
    for name in environment:
        assert place_from_environment({k: v for k, v in environment.items() if k != name}) is None


# --- for real

# All of it at once that does not make this process a rank or a server, which is refused in words.
STALE = {
    name: "7"
    for name in {*NAMES, *MORE}
    if launcher_environment.is_foreign(name)
    and name not in ("PADDLE_LOCAL_RANK", "PADDLE_PSERVERS_IP_PORT_LIST")
}


def train(folder: Path, *arguments: str, **stale: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, *arguments, "recipe=digits_resnet18", "max_steps=1"),
            *("model=MobileNetV1_x0_25", f"hydra.run.dir={folder / 'run'}"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | stale,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.launch
@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_a_shell_full_of_stale_variables_trains(topology: str, tmp_path: Path) -> None:
    ended = train(tmp_path, "train.py", f"topology={topology}", **STALE)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    ("stale", "message"),
    [
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_LOCAL_RANK": "0"}, "PADDLE_TRAINERS_NUM is missing"),
        (launched(1, 2, 0) | {"PADDLE_LOCAL_SIZE": "0"}, "PADDLE_LOCAL_SIZE=0 must be 1 or more"),
        (launched(1, 1, 0) | {"PADDLE_MASTER": ""}, "PADDLE_MASTER= should be HOST:PORT"),
    ],
)
def test_half_a_launch_is_named_at_once(
    stale: dict[str, str], message: str, tmp_path: Path
) -> None:
    ended = train(tmp_path, "train.py", **stale)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "remedy: unset the variables" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_rank_of_a_run_that_has_ended_is_named(tmp_path: Path) -> None:
    stale = {"FLEET_RECIPES_RUN": str(tmp_path), "FLEET_RECIPES_REPORTS": str(tmp_path / "gone")}
    ended = train(tmp_path, "train.py", **launched(1, 1, 0), **stale)
    assert ended.returncode == 2
    assert f"FLEET_RECIPES_RUN={tmp_path} and FLEET_RECIPES_REPORTS are of a run" in ended.stderr
