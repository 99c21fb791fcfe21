"""`docker/cluster.sh` against a real SSH server, whose two addresses are the two hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_server import (
    HOSTS,
    ROOT,
    SshServer,
    find_ssh_fault,
    free_port,
    running_ssh_server,
    wait_until_gone,
)

SCRIPT = ROOT / "docker" / "cluster.sh"
FAULT = find_ssh_fault()
pytestmark = [
    pytest.mark.skipif(FAULT is not None, reason=f"needs an SSH server: {FAULT}"),
    pytest.mark.clusters,
]

# A docker command whose answers follow from the address by which a host is reached.
FAKE_DOCKER = """#!/bin/bash
set -- "$*" ${SSH_CONNECTION}
case "$1" in
    version*) echo 28.0 ;;
    'image inspect'*' other') echo "sha256:$4-0123456789abcdef" ;;
    'image inspect'*) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    folder = tmp_path_factory.mktemp("ssh")
    programs = folder / "programs"
    programs.mkdir()
    (programs / "docker").write_text(FAKE_DOCKER)
    (programs / "docker").chmod(0o755)
    with running_ssh_server(folder / "server", f"SetEnv PATH={programs}:/usr/bin:/bin") as running:
        yield running


def start(
    folder: Path, server: SshServer, *arguments: str, hosts: str = "\n".join(HOSTS), **more: str
) -> subprocess.Popen[str]:
    """Start cluster.sh in a folder and a process group of its own, its output in files there."""
    (folder / "hosts.txt").write_text(hosts)
    settings = {
        "SSH": server.command,
        "RUNTIME": "local",
        "CLUSTER_DIR": str(ROOT),
        "PYTHON": sys.executable,
        **more,
    }
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "USER")}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(
            [str(SCRIPT), "hosts.txt", *arguments],
            cwd=folder,
            env=kept | settings,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )


def train(folder: Path, *overrides: str) -> list[str]:
    """A training of two nodes of one rank whose run folder, and whose port, no other test has."""
    return [
        *("train.py", "topology=2x1", "recipe=digits_resnet18"),
        *("device=cpu", "threads=1", "log.every=1", "deadlines.start=200"),
        *(f"topology.master=127.0.0.1:{free_port()}", f"hydra.run.dir={folder / 'run'}"),
        *overrides,
    ]


def read(folder: Path) -> tuple[str, str]:
    return (folder / "out").read_text(), (folder / "err").read_text()


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not re.search(pattern, read(folder)[0]):
        assert process.poll() is None, read(folder)
        assert time.monotonic() < ends, read(folder)
        time.sleep(0.1)


def refuse(folder: Path, server: SshServer, *arguments: str, **more: str) -> str:
    """What cluster.sh says when it refuses to start anything."""
    process = start(folder, server, *(arguments or ("train.py",)), **more)
    assert process.wait(60) == 2, read(folder)
    out, err = read(folder)
    assert out == ""
    assert not (folder / "outputs").exists()  # nothing was started
    return err


@pytest.mark.launch
def test_two_hosts_train_one_model(tmp_path: Path, server: SshServer) -> None:
    process = start(tmp_path, server, *train(tmp_path, "max_steps=2"))
    assert process.wait(200) == 0, read(tmp_path)
    out, _ = read(tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["world_size"], result["topology"]) == ("completed", 2, "2x1")
    # The console is node 0's, with the host's name where a line has no tag.
    assert "[node0 rank0]" in out
    assert "127.0.0.1: Training completed" in out
    assert "node1" not in out
    (logs,) = (tmp_path / "outputs").iterdir()
    assert "Training completed" in (logs / "127.0.0.1.log").read_text()
    assert "[node1] completed" in (logs / "127.0.0.2.log").read_text()
    wait_until_gone(tmp_path / "run", 10)


@pytest.mark.launch
def test_ctrl_c_ends_the_run_on_every_host(tmp_path: Path, server: SshServer) -> None:
    process = start(tmp_path, server, *train(tmp_path))
    wait_for(process, tmp_path, r"step +1/", 150)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    assert process.wait(40) == 128 + signal.SIGINT
    assert "interrupted: ending the run on every host" in read(tmp_path)[1]
    wait_until_gone(tmp_path / "run", 5)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.launch
def test_the_run_ends_when_the_connections_break(tmp_path: Path, server: SshServer) -> None:
    process = start(tmp_path, server, *train(tmp_path, "preflight=false"))
    ends = time.monotonic() + 60
    while not (tmp_path / "run" / "logs").exists():
        assert time.monotonic() < ends, read(tmp_path)
        time.sleep(0.1)
    process.kill()
    process.wait()
    wait_until_gone(tmp_path / "run", 30)


def test_the_exit_status_and_the_message_are_the_runs(tmp_path: Path, server: SshServer) -> None:
    process = start(tmp_path, server, *train(tmp_path, "model=nonsense"))
    assert process.wait(60) == 2
    _, err = read(tmp_path)
    assert err.count("model=nonsense is not one of") == 1  # both say it; a person reads it once
    assert "127.0.0.1 (node 0) ended with exit status 2" in err
    assert "127.0.0.2 (node 1) ended with exit status 2" in err


def test_settings_for_the_libraries_reach_the_hosts(tmp_path: Path, server: SshServer) -> None:
    code = "import os, sys; print(os.environ['NCCL_DEBUG'], *sys.argv[1:])"
    arguments = ("-c", code, "a b", "$HOME 'x'", "topology.master=here")
    process = start(tmp_path, server, *arguments, NCCL_DEBUG="IN FO", hosts=HOSTS[1])
    assert process.wait(60) == 0, read(tmp_path)
    assert read(tmp_path)[0] == "127.0.0.2: IN FO a b $HOME 'x' topology.master=here\n"


def test_node_0_is_where_the_others_reach_it(tmp_path: Path, server: SshServer) -> None:
    code = "import sys; print('said error: ', *sys.argv[1:])"
    process = start(tmp_path, server, "-c", code)
    assert process.wait(60) == 0, read(tmp_path)
    # Without "error: " node 1 would not be heard on the console.
    assert sorted(read(tmp_path)[0].splitlines()) == [
        "127.0.0.1: said error:  topology.master=127.0.0.1 topology.node_rank=0",
        "127.0.0.2: said error:  topology.master=127.0.0.1 topology.node_rank=1",
    ]


LOOK = """
import hashlib, os, pathlib
secret = os.environ["FLEET_RECIPES_SECRET"]
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
seen = sum(secret.encode() in line for line in lines)
print("said error: ", len(secret), seen, hashlib.sha256(secret.encode()).hexdigest(), secret[:0])
"""


def test_the_hosts_get_one_fresh_secret_that_ps_does_not_show(
    tmp_path: Path, server: SshServer
) -> None:
    found = []
    for name, settings in (("a", {}), ("b", {}), ("c", {"FLEET_RECIPES_SECRET": "x" * 20})):
        (tmp_path / name).mkdir()
        process = start(tmp_path / name, server, "-c", LOOK, **settings)
        assert process.wait(60) == 0, read(tmp_path / name)
        lines = [line.split()[3:6] for line in read(tmp_path / name)[0].splitlines()]
        assert lines[0] == lines[1]
        found.append(lines[0])
    assert [(length, seen) for length, seen, _ in found] == [("32", "0")] * 2 + [("20", "0")]
    assert len({digest for _, _, digest in found}) == 3


def test_a_host_that_goes_on_alone_is_ended(tmp_path: Path, server: SshServer) -> None:
    code = "import sys, time; time.sleep(0 if sys.argv[-1].endswith('0') else 300)"
    marker = f"topology.master={tmp_path}"
    process = start(tmp_path, server, "-c", code, marker, LINGER_SECONDS="2")
    assert process.wait(60) == 1
    assert "2 s after the first host's end others still run" in read(tmp_path)[1]
    wait_until_gone(tmp_path, 5)


class TestRefusals:
    def test_no_server(self, tmp_path: Path, server: SshServer) -> None:
        hosts = f"127.0.0.1\n127.0.0.2:{free_port()}\n"
        said = refuse(tmp_path, server, hosts=hosts)
        assert re.search(
            r"127.0.0.2:\d+ \(node 1\) cannot be reached: .*refused. See that sshd", said
        )

    def test_a_machine_that_does_not_answer(self, tmp_path: Path, server: SshServer) -> None:
        silent = "ProxyCommand sleep 60"
        client = server.write_client("silent", f"  {silent}")
        began = time.monotonic()
        said = refuse(tmp_path, server, SSH=client, CONNECT_SECONDS="1")
        assert "127.0.0.1 (node 0) cannot be reached: " in said
        assert "127.0.0.2 (node 1) cannot be reached: " in said
        assert time.monotonic() - began < 30

    def test_a_key_that_is_not_known(self, tmp_path: Path, server: SshServer) -> None:
        client = server.write_client(
            "strange",
            f"  Port {server.port}",
            f"  IdentityFile {server.folder}/stranger",
            "  IdentitiesOnly yes",
        )
        said = refuse(tmp_path, server, SSH=client)
        assert "Permission denied" in said
        assert "ssh-copy-id 127.0.0.1" in said

    def test_a_host_that_is_not_known(self, tmp_path: Path, server: SshServer) -> None:
        said = refuse(tmp_path, server, SSH=f"{server.command} -o UserKnownHostsFile=/dev/null")
        assert "Host key verification failed" in said
        assert "Connect once by hand and look at its key: ssh 127.0.0.1" in said

    def test_a_name_that_does_not_resolve(self, tmp_path: Path, server: SshServer) -> None:
        said = refuse(tmp_path, server, hosts="no-such-host.invalid")
        assert "no-such-host.invalid (node 0) cannot be reached" in said
        assert "Mend the name in hosts.txt" in said

    def test_a_missing_folder_and_environment(self, tmp_path: Path, server: SshServer) -> None:
        said = refuse(tmp_path, server, CLUSTER_DIR=str(tmp_path / "nowhere"))
        assert f"127.0.0.2 (node 1) has no folder {tmp_path}/nowhere. Clone the repository" in said
        said = refuse(tmp_path, server, CLUSTER_DIR=str(tmp_path))
        assert f"has no train.py in {tmp_path}" in said
        said = refuse(tmp_path, server, PYTHON="no/python")
        assert f"has no working no/python in {ROOT}. Run 'make setup' there" in said

    def test_a_missing_image(self, tmp_path: Path, server: SshServer) -> None:
        said = refuse(tmp_path, server, RUNTIME="docker", IMAGE="none:such")
        assert "127.0.0.1 (node 0) has no image none:such. Make it on one host" in said
        assert "docker save none:such | ssh 127.0.0.2 docker load" in said

    def test_different_images(self, tmp_path: Path, server: SshServer) -> None:
        said = refuse(tmp_path, server, RUNTIME="docker", IMAGE="other")
        assert (
            "127.0.0.2 (node 1) has another image than 127.0.0.1: other sha256:127.0.0.2-" in said
        )
        assert "ssh 127.0.0.1 docker save other | ssh 127.0.0.2 docker load" in said

    def test_no_docker(self, tmp_path: Path, server: SshServer) -> None:
        fake = next((server.folder.parent / "programs").iterdir())
        away = fake.with_name("away")
        fake.rename(away)
        try:
            if shutil.which("docker", path="/usr/bin:/bin") is None:
                said = refuse(tmp_path, server, RUNTIME="docker")
                assert "127.0.0.1 (node 0) has no docker command. Install Docker there" in said
            fake.write_text("#!/bin/sh\necho 'Cannot connect to the daemon'\nexit 1\n")
            fake.chmod(0o755)
            said = refuse(tmp_path, server, RUNTIME="docker")
            assert "a Docker engine that does not answer: Cannot connect to the daemon." in said
        finally:
            away.replace(fake)

    @pytest.mark.parametrize(
        ("hosts", "arguments", "message"),
        [
            ("# none\n", ("train.py",), "hosts.txt names no host"),
            ("a\nb c\n", ("train.py",), "'b c' is not one host"),
            ("a\nb\na\n", ("train.py",), "hosts.txt names a twice"),
            ("a # first\n\nb", ("train.py", "topology=3x1"), "has 3 nodes, but hosts.txt names 2"),
            ("a\nb", ("train.py", "topology.nodes=4"), "has 4 nodes, but hosts.txt names 2 hosts"),
            ("a", ("train.py", "topology.node_rank=0"), "leave topology.node_rank=0 out"),
            ("a", (), "usage: docker/cluster.sh HOSTS"),
        ],
    )
    def test_a_wrong_command(
        self,
        hosts: str,
        arguments: tuple[str, ...],
        message: str,
        tmp_path: Path,
        server: SshServer,
    ) -> None:
        process = start(tmp_path, server, *arguments, hosts=hosts)
        assert process.wait(10) == 2
        assert message in read(tmp_path)[1]

    def test_a_missing_host_file(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [str(SCRIPT), "nowhere.txt", "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "there is no host file nowhere.txt" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
@pytest.mark.parametrize("name", ["cluster.sh", "node.sh", "slurm.sbatch"])
def test_shellcheck_finds_nothing(name: str) -> None:
    done = subprocess.run(
        ["shellcheck", str(ROOT / "docker" / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
