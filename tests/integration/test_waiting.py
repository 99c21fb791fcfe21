"""What a node says while it waits for the others, and what it says where it has no secret."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT

SECRET = "0123456789abcdef0123456789abcdef"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(folder: Path, *overrides: str, secret: str = SECRET) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "train.py", "device=cpu", *overrides, f"hydra.run.dir={folder}"],
        cwd=ROOT,
        env=kept | ({"FLEET_RECIPES_SECRET": secret} if secret else {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("node", "other"), [(0, 1), (1, 0)])
def test_each_node_says_once_whom_it_waits_for_and_where(
    node: int, other: int, tmp_path: Path
) -> None:
    port = free_port()
    ended = start(
        tmp_path / "run",
        *("topology=2x1", f"topology.master=127.0.0.1:{port}", f"topology.node_rank={node}"),
        "deadlines.start=1",
    )
    assert ended.returncode == 2, ended.stderr
    said = ended.stdout + ended.stderr
    waiting = f"waiting for node {other} at 127.0.0.1:{port}, 1 s at most (deadlines.start)"
    assert said.count(waiting) == 1, said
    assert "error: " in ended.stderr
    # The secret stays where it was.
    assert SECRET not in said
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(errors="replace"), path


def test_several_nodes_without_a_secret_are_told_how_to_give_one(tmp_path: Path) -> None:
    place = ("topology.master=127.0.0.1", "topology.node_rank=0")
    ended = start(tmp_path / "run", "topology=2x1", *place, secret="")
    assert ended.returncode == 2
    assert "error: FLEET_RECIPES_SECRET is not set" in ended.stderr
    assert re.search(r"^    export FLEET_RECIPES_SECRET=[0-9a-f]{32}$", ended.stderr, re.MULTILINE)
    assert not (tmp_path / "run").exists()


def test_the_commands_for_the_machines_carry_one_fresh_secret(tmp_path: Path) -> None:
    ended = start(tmp_path / "run", "topology=2x1", secret="")
    assert ended.returncode == 2
    found = re.findall(
        r"machine \d: FLEET_RECIPES_SECRET=([0-9a-f]{32}) python train.py .*node_rank=(\d)",
        ended.stderr,
    )
    assert [node for _, node in found] == ["0", "1"]
    assert len({secret for secret, _ in found}) == 1
    again = start(tmp_path / "run", "topology=2x1")  # who has one needs none
    assert "machine 0: python train.py" in again.stderr
