"""Two nodes as real containers train as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import parity

pytest_plugins = ["container_fixtures"]


def test_two_containers_agree_with_one_process(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = parity.main(
        [
            *("--a", "topology=1x1", "--b", "topology=2x2"),
            *("--image", image, "--steps", "2", "--output", str(tmp_path)),
            *("model=paddleclas", "model.name=MobileNetV1_x0_25", "optimizer.base_lr=0.002"),
            *("batch_size=null", "global_batch_size=48", "deadlines.start=120"),
        ]
    )
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    assert f"2 containers of {image}" in said.out
    (found,) = json.loads((tmp_path / "comparison.json").read_text())
    assert (found["steps"], found["agree"]) == ([1, 2], True)
    # Each node's ranks have listed their samples on that node.
    for rank, folder in enumerate(["run", "run", "run-node1", "run-node1"]):
        lines = (tmp_path / f"b/{folder}/logs/samples-rank-{rank}.jsonl").read_text().splitlines()
        assert [len(json.loads(line)["indices"][0]) for line in lines] == [12, 12]
