"""The image started by Compose, and by `docker/cluster.sh` over SSH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import ROOT, docker
from ssh_server import HOSTS, SshServer, find_ssh_fault, free_port, running_ssh_server

pytest_plugins = ["container_fixtures"]
pytestmark = pytest.mark.clusters


def find_compose() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is not None:
            done = subprocess.run([*command, "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return command
    return None


COMPOSE = find_compose()
SSH_FAULT = find_ssh_fault()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the code and the compose file, where outputs/ is made."""
    folder = tmp_path / "checkout"
    (folder / "docker").mkdir(parents=True)
    shutil.copy(ROOT / "docker" / "compose.2x4.yaml", folder / "docker")
    shutil.copy(ROOT / "train.py", folder)
    for name in ("conf", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.skipif(COMPOSE is None, reason="there is no Docker Compose")
def test_compose_trains_on_two_containers_of_four_processes(image: str, checkout: Path) -> None:
    assert COMPOSE is not None
    command = [*COMPOSE, "-p", f"fleet-recipes-{uuid.uuid4().hex[:8]}"]
    command += ["-f", "docker/compose.2x4.yaml"]
    user = f"{os.getuid()}:{os.getgid()}"
    settings = os.environ | {"IMAGE": image, "RUN_AS": user, "ARGS": "max_steps=2"}
    try:
        done = subprocess.run(
            [*command, "up", "--exit-code-from", "node0"],
            cwd=checkout,
            env=settings,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        subprocess.run(
            [*command, "down", "--timeout", "5"],
            cwd=checkout,
            env=settings,
            capture_output=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training completed" in done.stdout
    (run,) = (each for each in (checkout / "outputs").iterdir() if each.is_dir())
    secret = checkout / "outputs" / ".compose-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text().strip() not in done.stdout + done.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["world_size"], result["topology"]) == ("completed", 8, "2x4")
    assert run.stat().st_uid == os.getuid()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with running_ssh_server(tmp_path / "ssh", f"SetEnv PATH={os.environ['PATH']}") as running:
        yield running


def start(tmp_path: Path, server: SshServer, image: str, *overrides: str) -> subprocess.Popen[str]:
    (tmp_path / "hosts.txt").write_text("\n".join(HOSTS))
    settings = {"SSH": server.command, "IMAGE": image, "CLUSTER_DIR": str(tmp_path / "there")}
    return subprocess.Popen(
        [
            *(str(ROOT / "docker" / "cluster.sh"), "hosts.txt", "train.py"),
            *("topology.nodes=2", "topology.devices=1", "recipe=digits_resnet18", "threads=1"),
            *("log.every=1", "deadlines.start=200", "hydra.run.dir=outputs/run"),
            f"topology.master=127.0.0.1:{free_port()}",
            *overrides,
        ],
        cwd=tmp_path,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def find_containers(run: str) -> str:
    return docker("ps", "--all", "--filter", f"name=fleet-recipes-{run}", "-q").stdout


@pytest.mark.skipif(SSH_FAULT is not None, reason=f"needs an SSH server: {SSH_FAULT}")
def test_the_image_over_ssh(tmp_path: Path, server: SshServer, image: str) -> None:
    process = start(tmp_path, server, image, "max_steps=2")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert f"image {image} sha256:" in said
    result = json.loads((tmp_path / "there" / "outputs" / "run" / "result.json").read_text())
    assert (result["status"], result["topology"]) == ("completed", "2x1")
    assert (tmp_path / "there" / "outputs" / "run").stat().st_uid == os.getuid()


@pytest.mark.skipif(SSH_FAULT is not None, reason=f"needs an SSH server: {SSH_FAULT}")
def test_ctrl_c_leaves_no_container(tmp_path: Path, server: SshServer, image: str) -> None:
    process = start(tmp_path, server, image)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "epoch 1/5" in line:
            break
    (logs,) = (tmp_path / "outputs").iterdir()
    run = logs.name.removeprefix("cluster-")
    assert len(find_containers(run).split()) == 2, said
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    said += process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGINT, said
    assert time.monotonic() - began < 30
    assert find_containers(run) == ""
    result = json.loads((tmp_path / "there" / "outputs" / "run" / "result.json").read_text())
    assert result["status"] == "interrupted"
