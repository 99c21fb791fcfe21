"""`docker/slurm.sbatch` under a real Slurm: a controller and two node daemons on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ssh_server import ROOT, find_program, free_port, wait_until_gone

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")


def find_slurm_fault() -> str | None:
    """Why no Slurm can be run here, or None."""
    missing = [name for name in PROGRAMS if find_program(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "its daemons start jobs, and need root"
    return None


FAULT = find_slurm_fault()
pytestmark = [
    pytest.mark.skipif(FAULT is not None, reason=f"needs Slurm: {FAULT}"),
    pytest.mark.launch,
    pytest.mark.clusters,
]


class Slurm:
    """Two nodes, `na` and `nb`, whose names resolve to nothing, as their addresses do.

    Args:
        folder: for its state; nothing of it is anywhere else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "HOME": str(folder),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "RUNTIME": "local",
            "PYTHON": sys.executable,
        }

    def start(self) -> None:
        """Start the daemons, and return once both nodes are idle."""
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._write_configuration()
        munge = self.folder / "munge"
        self._daemon(
            *("munged", "--foreground", "--force", f"--socket={munge}/socket"),
            *(f"--key-file={key}", f"--pid-file={munge}/pid", f"--log-file={munge}/log"),
            f"--seed-file={munge}/seed",
        )
        self._wait(lambda: (munge / "socket").exists(), 20, "munged")
        self._daemon("slurmctld", "-D")
        for node in ("na", "nb"):
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", 60, "sinfo")

    def stop(self) -> None:
        """End every daemon; jobs have ended before."""
        if len(self._daemons) == len(("munged", "slurmctld", "na", "nb")):
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--user", "root")
                self.wait_for_jobs(40)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str) -> str:
        """What a command says."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    def submit(self, log: Path, *arguments: str) -> str:
        """Submit the batch file; the job's number."""
        said = self.run(
            "sbatch", "--parsable", f"--output={log}", "docker/slurm.sbatch", *arguments
        )
        return said.strip()

    def wait_for_jobs(self, seconds: float) -> None:
        """Return once no job is left."""
        self._wait(lambda: self.run("squeue", "-h") == "", seconds, "squeue")

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):
                if condition():
                    return
            logs = {log: log.read_text()[-2000:] for log in self.folder.glob("*.log")}
            assert time.monotonic() < ends, f"{what}: {logs}"
            assert all(each.poll() is None for each in self._daemons), logs
            time.sleep(0.2)

    def _daemon(self, *command: str) -> None:
        program = find_program(command[0])
        assert program is not None
        with (self.folder / f"{len(self._daemons)}-{command[0]}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, *command[1:]], env=self.environment, stdout=log, stderr=log
                )
            )

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        values = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": free_port(),
            "SlurmUser": "root",
            "AuthInfo": f"socket={self.folder}/munge/socket",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool" / "%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SelectType": "select/linear",
            "ReturnToService": 2,
            "KillWait": 30,
        }
        lines = [f"{name}={value}" for name, value in values.items()]
        for node in ("na", "nb"):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            )
        lines.append("PartitionName=all Nodes=na,nb Default=YES State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def train(folder: Path, *overrides: str) -> list[str]:
    return [
        *("train.py", "topology=2x1", "recipe=digits_resnet18"),
        *("device=cpu", "threads=1", "log.every=1", "deadlines.start=200"),
        *(f"hydra.run.dir={folder / 'run'}", *overrides),
    ]


def test_two_nodes_train_one_model(tmp_path: Path, slurm: Slurm) -> None:
    log = tmp_path / "log"
    job = slurm.submit(log, *train(tmp_path, "max_steps=2"))
    slurm.wait_for_jobs(200)
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", job), log.read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["world_size"], result["topology"]) == ("completed", 2, "2x1")
    assert f"job {job}, RUNTIME=local on na,nb, node 0 at 127.0.0.1:" in log.read_text()
    assert "Training completed" in log.read_text()
    assert "[node1] completed" in log.read_text()
    wait_until_gone(tmp_path / "run", 10)


def test_scancel_ends_the_run_in_good_order(tmp_path: Path, slurm: Slurm) -> None:
    log = tmp_path / "log"
    job = slurm.submit(log, *train(tmp_path))
    ends = time.monotonic() + 150
    while "epoch 1/5" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.2)
    slurm.run("scancel", job)
    slurm.wait_for_jobs(25)  # before Slurm would use force, after KillWait
    wait_until_gone(tmp_path / "run", 5)
    assert log.read_text().count("interrupted by SIGTERM") == 2
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


def test_the_exit_status_is_the_runs(tmp_path: Path, slurm: Slurm) -> None:
    log = tmp_path / "log"
    job = slurm.submit(log, *train(tmp_path, "model=nonsense"))
    slurm.wait_for_jobs(60)
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job)
    assert "model=nonsense is not one of" in log.read_text()


def test_a_job_without_a_command_says_how_to_give_one(tmp_path: Path, slurm: Slurm) -> None:
    log = tmp_path / "log"
    slurm.submit(log)
    slurm.wait_for_jobs(30)
    assert "slurm: what is to be run? sbatch docker/slurm.sbatch train.py" in log.read_text()


def test_two_tasks_on_a_node_are_refused_before_they_train(tmp_path: Path, slurm: Slurm) -> None:
    """As `srun` starts them, and as a batch script's own process and one task are not."""
    # Refused a little later, where it gets so far.
    command = [sys.executable, "train.py", "topology=1x2", "model.name=Nonsense"]
    ended = subprocess.run(
        ["srun", "-N1", "--ntasks-per-node=2", "--overcommit", *command],
        env=slurm.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("SLURM_STEP_TASKS_PER_NODE=2 says that this is one of 2") == 2
    assert ended.stderr.count("remedy: srun --ntasks-per-node=1") == 2
    log, script = tmp_path / "log", tmp_path / "script"
    words = " ".join(command)
    script.write_text(f"#!/bin/sh\ncd {ROOT}\n{words}\nsrun -N1 -n1 {words}\n")
    slurm.run(
        *("sbatch", "--parsable", f"--output={log}", "-N2", "--ntasks=8", "--overcommit"),
        str(script),
    )
    slurm.wait_for_jobs(60)
    assert log.read_text().count("error: model.name=Nonsense is not one of") == 2
    assert "SLURM_" not in log.read_text()
