"""Two nodes, both on this machine, of which one is halted, or asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, started
from test_endings import ENDLESS, PATIENCE

pytestmark = [pytest.mark.launch, pytest.mark.clusters]

SILENCE = 5.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def two_nodes(folder: Path, *more: str) -> Iterator[tuple[Running, Running]]:
    settings = (
        *(*ENDLESS, "topology=2x1", f"topology.master=127.0.0.1:{free_port()}", "threads=1"),
        *(f"deadlines.silence={SILENCE}", "preflight=false", *more),
    )
    with (
        started(folder / "0" / "run", *settings, "topology.node_rank=0") as first,
        started(folder / "1" / "run", *settings, "topology.node_rank=1") as second,
    ):
        first.wait_for_step(5)
        yield first, second


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_node_saves_and_has_one_exit_status(tmp_path: Path, asked: int) -> None:
    with two_nodes(tmp_path, "save.every_epochs=1000") as nodes:
        nodes[asked].process.send_signal(signal.SIGTERM)
        first, second = [node.finish(PATIENCE) for node in nodes]
        for node in nodes:
            node.wait_for_nobody(1.0)
    for run in (first, second):
        assert run.status == 143, run.said
        assert run.errors == ""
        assert "interrupted" in run.output
    assert first.result["status"] == "interrupted"
    last = (first.folder / "checkpoints" / "last").resolve().name
    assert last == f"step-{max(event['step'] for event in first.events('train')):08d}"


@pytest.mark.parametrize("halted", [0, 1])
def test_both_nodes_name_the_one_that_was_halted(tmp_path: Path, halted: int) -> None:
    with two_nodes(tmp_path) as nodes:
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
