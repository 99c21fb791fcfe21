"""Two nodes, both on this machine, of which one is halted for longer than the other waits."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from running import Running, started
from test_endings import ENDLESS, PATIENCE

pytestmark = [pytest.mark.launch, pytest.mark.clusters]

SILENCE = 5.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("halted", [0, 1])
def test_both_nodes_name_the_one_that_was_halted(tmp_path: Path, halted: int) -> None:
    settings = (
        *(*ENDLESS, "topology=2x1", f"topology.master=127.0.0.1:{free_port()}", "threads=1"),
        f"deadlines.silence={SILENCE}",
    )
    with (
        started(tmp_path / "0" / "run", *settings, "topology.node_rank=0") as first,
        started(tmp_path / "1" / "run", *settings, "topology.node_rank=1") as second,
    ):
        first.wait_for_step(5)
        nodes: tuple[Running, Running] = (first, second)
        os.kill(nodes[halted].process.pid, signal.SIGSTOP)
        time.sleep(SILENCE + 4)
        os.kill(nodes[halted].process.pid, signal.SIGCONT)
        ended = [node.finish(SILENCE + PATIENCE) for node in nodes]
        for node in nodes:
            node.wait_for_nobody(1.0)
    for number, run in enumerate(ended):
        assert run.status == 1
        assert "Traceback" not in run.said
        assert run.said.count("error:") == 1, run.said
        assert f"[node{number}] error: " in run.errors
        assert f"node {halted}" in run.errors
    assert f"node {halted} was halted for" in ended[halted].errors
