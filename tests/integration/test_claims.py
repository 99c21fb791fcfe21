"""Two runs in one folder: the second is refused, whichever way it comes, and the first goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from running import launch, started
from test_endings import ENDLESS, PATIENCE

from recipes import claim

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("first_bare", [False, True])
def test_the_second_of_two_runs_is_refused(first_bare: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # A bare launcher's single process is no rank; two are.
    bare = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir"]
    launcher = [*bare, str(tmp_path / "log")] if first_bare else []
    with started(folder, *ENDLESS, "topology=1x2", launcher=launcher) as running:
        running.wait_for_step(1)
        holder = running.rank(0) if first_bare else running.process.pid
        for how in ([], ["resume=auto"]):
            second = launch(folder, *ENDLESS, "topology=1x1", *how)
            assert second.status == 2
            assert f"{folder} is in use by another run: process {holder} on " in second.errors
            assert (second.errors.count("error:"), second.output) == (1, "")
        if not first_bare:
            by_hand = launch(
                folder,
                *(*ENDLESS, "topology=1x2", "resume=auto"),
                launcher=[*bare, str(tmp_path / "log-2")],
            )
            assert by_hand.status != 0
            assert f"{folder} is in use by another run: process {holder} on " in by_hand.said
        assert running.process.poll() is None
        assert not (folder / "result.json").exists()
        running.process.send_signal(signal.SIGTERM)
        running.finish(PATIENCE)


def test_a_killed_run_is_continued_at_once(tmp_path: Path) -> None:
    """Its ranks end with it, halted ones too, so that nobody holds the folder any more."""
    with started(tmp_path / "run", *ENDLESS, "topology=1x2") as running:
        running.wait_for_step(5)
        os.kill(running.rank(0), signal.SIGSTOP)  # so that it cannot end itself
        running.process.kill()
        running.process.wait()
        with started(tmp_path / "run", *ENDLESS, "topology=1x1", "resume=auto") as again:
            running.wait_for_nobody(PATIENCE)
            events = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            again.wait_for_step(max(json.loads(line).get("step", 0) for line in events) + 1)
            assert claimed_by(tmp_path / "run") == again.process.pid


def claimed_by(folder: Path) -> int:
    return int(json.loads((folder / claim.FILE).read_text())["pid"])
