"""`docker/slurm.sbatch` takes the image where it is, and else the environment of the checkout.

The scheduler and the engine are programs that answer as they do; test_slurm.py has a real Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {
    "image": 'case "$*" in *code-digest*) echo $CODE ;; image*) echo sha256:1 ;; *) echo 2 ;; esac',
    "no image": 'case "$1" in image) exit 1 ;; *) echo 28.0 ;; esac',
    "silent": "exit 1",
}


def submit(tmp_path: Path, engine: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the batch file as Slurm does on the first node, up to its srun."""
    for name, text in {
        "docker": ENGINES[engine],
        "scontrol": 'case "$*" in *hostnames*) echo na ;; *) echo " NodeAddr=192.0.2.1 " ;; esac',
        "srun": 'echo "srun with RUNTIME=$RUNTIME"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name not in ("RUNTIME", "IMAGE")}
    environment = {
        **own,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "VARIANT": "cpu",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[a-b]",
        "PYTHON": sys.executable,
        **settings,
    }
    return subprocess.run(
        ["bash", "docker/slurm.sbatch", "train.py", "topology=2x1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("engine", "runtime", "why"),
    [
        ("image", "docker", "fleet-recipes:cpu is on the first node"),
        ("no image", "local", "the first node has no image fleet-recipes:cpu"),
        ("silent", "local", "no Docker engine answers on the first node"),
    ],
)
def test_the_image_is_taken_where_it_is(
    engine: str, runtime: str, why: str, tmp_path: Path
) -> None:
    done = submit(tmp_path, engine)
    assert done.returncode == 0, done.stderr
    assert f"RUNTIME={runtime} ({why})" in done.stdout
    assert f"srun with RUNTIME={runtime}" in done.stdout


def test_code_of_the_image_that_is_not_the_checkout_s_is_told(tmp_path: Path) -> None:
    same = subprocess.run(["docker/content.sh", "code"], cwd=ROOT, capture_output=True, text=True)
    assert "differs" not in submit(tmp_path, "image", CODE=same.stdout.strip()).stdout
    assert "this checkout's differs" in submit(tmp_path, "image", CODE="other").stdout
    assert "differs" not in submit(tmp_path, "no image").stdout


def test_neither_image_nor_environment(tmp_path: Path) -> None:
    done = submit(tmp_path, "no image", PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "make image" in done.stderr
    assert "make setup" in done.stderr


def test_a_runtime_that_is_set_is_taken(tmp_path: Path) -> None:
    done = submit(tmp_path, "silent", RUNTIME="docker")
    assert "srun with RUNTIME=docker" in done.stdout
