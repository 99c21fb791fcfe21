"""`docker/node.sh`, as cluster.sh and Slurm start it: the end of one node's part."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Takes three seconds to save.
RUN = """#!/bin/bash
trap 'sleep 3; touch saved; exit 143' TERM
touch started
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("grace", "saves"), [("deadlines.grace=7.5", True), ("+deadlines.grace=1", False)]
)
def test_the_grace_of_the_run_is_that_of_its_node(tmp_path: Path, grace: str, saves: bool) -> None:
    (tmp_path / "run").write_text(RUN)
    (tmp_path / "run").chmod(0o755)
    arguments = ["train.py", grace, "epochs=1"]
    node = subprocess.Popen(
        ["bash", ROOT / "docker" / "node.sh", *arguments],
        env={**os.environ, "RUNTIME": "local", "CLUSTER_DIR": str(tmp_path), "PYTHON": "./run"},
        start_new_session=True,
    )
    try:
        ends = time.monotonic() + 20
        while not (tmp_path / "started").exists():
            assert time.monotonic() < ends
            time.sleep(0.05)
        node.send_signal(signal.SIGTERM)
        status = node.wait(20)
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
    assert (tmp_path / "saved").exists() == saves
    assert status == (143 if saves else 128 + signal.SIGKILL)
