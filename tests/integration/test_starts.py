"""Starting is reliable: four processes over gloo, many times in a row.

``FLEET_RECIPES_STARTS=30 python -m pytest tests/integration/test_starts.py -s`` is the long form.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest
from running import Running, ended

pytestmark = pytest.mark.launch

STARTS = int(os.environ.get("FLEET_RECIPES_STARTS", "4"))
RANKS = 4
DEADLINE = 90.0  # a start that hangs, as opposed to a slow machine


@pytest.mark.timeout(60 + STARTS * DEADLINE)
def test_every_start_succeeds(tmp_path: Path) -> None:
    seconds = [start(tmp_path / str(number)) for number in range(STARTS)]
    print(
        f"\n{STARTS} starts of {RANKS} processes: median {statistics.median(seconds):.1f} s, "
        f"{min(seconds):.1f} to {max(seconds):.1f} s"
    )


def start(folder: Path) -> float:
    """One start, from the launcher's to the end of an all-reduce; its seconds."""
    command = [
        *(sys.executable, "-m", "paddle.distributed.launch"),
        *("--nproc_per_node", str(RANKS), "--log_dir", str(folder)),
        str(Path(__file__).with_name("start_only.py")),
    ]
    with ended(Running(folder, command)) as running:
        done = running.finish(DEADLINE)
        running.wait_for_nobody(1.0)
    logs = {path.name: path.read_text() for path in folder.glob("workerlog.*")}
    assert done.status == 0, f"{done.said}\n{logs}"
    for rank in range(RANKS):
        assert f"rank {rank} of {RANKS}: {2**RANKS - 1}" in logs[f"workerlog.{rank}"]
    return done.seconds
