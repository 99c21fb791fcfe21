"""`task=smoke`: that it passes on real ranks, and that a wrong collective fails it by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipes.config import compose, register_schema

ROOT = Path(__file__).resolve().parents[1]

# In a process of its own, as Fleet's state is the process's: one rank, whose collectives are
# changed. Prints what the task raises.
ONE_RANK = """
import sys
from pathlib import Path
import numpy as np
from recipes import config, worker
config.register_schema()
composed, folder = config.compose(Path(sys.argv[1]) / "conf", ["recipe=smoke", "device=cpu"])
worker.import_paddle()
import paddle
from recipes import distributed, smoke
from recipes.pulse import NoPulse
from recipes.topology import Place
place = Place(rank=0, world_size=1, local_rank=0, node=0)
distributed.start(composed, place)
originals = distributed.sum_over_ranks, distributed.broadcast_arrays, smoke.convert_sync_batch_norm

def restore():
    distributed.sum_over_ranks, distributed.broadcast_arrays = originals[:2]
    smoke.convert_sync_batch_norm = originals[2]

def attempt(name):
    try:
        smoke.smoke(composed, place, NoPulse())
        print(name, "passed")
    except smoke.WrongResult as error:
        print(name, error.message)
    restore()

attempt("unchanged")
distributed.sum_over_ranks = lambda tensor: tensor * (2 if "int" in str(tensor.dtype) else 1)
attempt("doubled")
distributed.sum_over_ranks = lambda tensor: tensor * float("nan")
attempt("nan")
distributed.broadcast_arrays = lambda arrays: {"x": arrays["x"][:-1]}
attempt("short")
distributed.broadcast_arrays = lambda arrays: {"x": np.where(np.arange(1000) == 7, 0, arrays["x"])}
attempt("flipped")
smoke.convert_sync_batch_norm = lambda model: paddle.nn.Sequential(
    paddle.nn.BatchNorm2D(3), paddle.nn.Hardtanh())
attempt("clamped")
"""


def test_the_recipe_composes_for_any_topology() -> None:
    register_schema()
    for topology in ("1x1", "2x4", "4x8"):
        config, _ = compose(ROOT / "conf", ["recipe=smoke", f"topology={topology}", "device=cpu"])
        assert config.task.name == "smoke"
        assert config.deadlines.start + config.deadlines.step <= 60


def test_a_wrong_result_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK, str(ROOT)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told.pop("unchanged", done.stderr) == "passed"
    for name, what in {
        "doubled": "all-reduce, int64: 989 of 1000 numbers are wrong, the first is 2 instead of 1",
        "nan": "all-reduce, float32: 1000 of 1000 numbers are wrong, the first is nan instead of 0",
        "short": "broadcast, uint8: its shape is [999] instead of [1000]",
        "flipped": "broadcast, uint8: 1 of 1000 numbers are wrong, the first is 0 instead of 49",
        "clamped": "synchronised batch norm: forward: ",
    }.items():
        assert told.pop(name).startswith(f"smoke: rank 0 of 1, {what}")
    assert not told


@pytest.mark.launch
def test_two_ranks_pass(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "train.py",
            "recipe=smoke",
            "topology=1x2",
            "device=cpu",
            f"hydra.run.dir={tmp_path / 'run'}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^\[node0 rank0\] \S+ smoke: (.*)$", done.stdout, re.MULTILINE)
    assert len(lines) == 11
    assert all(re.search(r" ok +[\d.]+ ms$", line) for line in lines[:-1])
    assert lines[-1] == "all 10 checks passed on 2 ranks"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["final"], result["world_size"]) == ("completed", None, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_comparison_lets_rounding_pass_and_nothing_else(dtype: str) -> None:
    from recipes.smoke import WrongResult, verify
    from recipes.topology import Place

    place = Place(rank=3, world_size=8, local_rank=3, node=0)
    wanted = np.array([1, 100], dtype=dtype)
    verify("x", wanted.copy(), wanted, place)
    if dtype.startswith("float"):
        verify("x", wanted * (1 + np.finfo(dtype).eps), wanted, place)
    wrong = wanted + np.array([0, 1], dtype) / (1 if "int" in dtype else 1000)
    with pytest.raises(WrongResult, match="rank 3 of 8, x: 1 of 2 numbers are wrong") as caught:
        verify("x", wrong.astype(dtype), wanted, place)
    assert "task=preflight" in caught.value.remedy
