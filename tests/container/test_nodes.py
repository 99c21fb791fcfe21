"""Several nodes as real containers: two and four processes on each, one result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers import docker
from nodes import Cluster

pytest_plugins = ["container_fixtures", "fault_table"]

# Not the short deadlines of runs that are to fail: nothing is wrong with these, however slow the
# machine is that builds images and runs other tests meanwhile.
RUN = ("hydra.run.dir=outputs/run", "deadlines.start=120", "deadlines.silence=60")


@pytest.mark.parametrize("topology", ["2x2", "2x4"])
def test_two_nodes_train_together(cluster: Cluster, topology: str, tmp_path: Path) -> None:
    for number in (0, 1):
        cluster.node(number, *RUN, "max_steps=2", topology=topology)
    ended = cluster.ends("node0", "node1", seconds=280)
    assert {label: each.status for label, each in ended.items()} == {"node0": 0, "node1": 0}, ended
    cluster.copy("node0", "/workspace/outputs/run", tmp_path / "run0")
    cluster.copy("node1", "/workspace/outputs/run", tmp_path / "run1")
    result = json.loads((tmp_path / "run0" / "result.json").read_text())
    devices = int(topology[2:])
    assert (result["status"], result["topology"]) == ("completed", topology)
    assert result["world_size"] == 2 * devices
    metrics = [json.loads(line) for line in (tmp_path / "run0/metrics.jsonl").open()]
    assert [m["step"] for m in metrics if m["event"] == "train"] == [1, 2]
    assert metrics[-1]["samples"] == 360
    # Rank 0's node holds checkpoints and VisualDL; each node its own ranks' logs.
    assert (tmp_path / "run0/checkpoints/last/manifest.json").exists()
    assert not (tmp_path / "run1/checkpoints").exists()
    assert not (tmp_path / "run1/visualdl").exists()
    for node in (0, 1):
        logs = {path.name for path in (tmp_path / f"run{node}" / "logs").iterdir()}
        assert logs == {f"rank-{node * devices + each}.log" for each in range(devices)}
    assert "results are on node 0" in ended["node1"].output
    assert "preflight" in ended["node0"].output


def test_docker_stop_on_one_node_saves_and_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    for number in (0, 1):
        cluster.node(number, *RUN, "epochs=50")
    cluster.wait_for("node0", r"step +3[ /]")
    stopped = docker("stop", "--time", "10", cluster.names["node1"])
    assert stopped.returncode == 0, stopped.stderr
    ended = cluster.ends("node0", "node1", seconds=60)
    assert ended["node1"].status == 143, ended["node1"].output  # and not 137: it took under 10 s
    assert ended["node0"].status == 143
    assert "node 1 was asked to end by SIGTERM" in ended["node0"].output
    cluster.copy("node0", "/workspace/outputs/run", tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    last = max(event["step"] for event in metrics)
    assert (tmp_path / "run/checkpoints/last").resolve().name == f"step-{last:08d}"
