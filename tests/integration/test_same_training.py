"""The parity program on real launches: an agreement, and disagreements with their cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launches import SMALL

from benchmarks import parity

pytestmark = pytest.mark.launch

SHORT = (*SMALL, "dataset.augment=false")


def run(folder: Path, *arguments: str, steps: int = 3) -> int:
    """The program's exit status; its files are in `folder`."""
    return parity.main([*arguments, "--steps", str(steps), "--output", str(folder), *SHORT])


def test_two_topologies_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--a", "topology=1x1", "--b", "topology=1x2") == 0
    assert "a and b     3 steps" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "comparison.json").read_text())
    assert (found["agree"], found["cause"], found["steps"]) == (True, None, [1, 2, 3])
    assert 0 < found["largest"] < 1e-9
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    for rank in (0, 1):
        lines = (tmp_path / f"b/run/logs/samples-rank-{rank}.jsonl").read_text().splitlines()
        assert [len(json.loads(line)["indices"][0]) for line in lines] == [24] * 3


def test_statistics_of_shares_are_found_in_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second layer's: the first one's mean is the same, its variance is not."""
    sides = ("--a", "topology=1x1", "--b", "topology=1x2 sync_bn=false")
    assert run(tmp_path, *sides) == 1
    said = capsys.readouterr().out
    assert "DIFFER from step 1" in said
    assert "likely cause: model" in said
    assert "sync_bn is on in a only: b normalises each of 2 shares" in said
    # MobileNetV1's first layer: the mean over the shares is that of the batch, the variance not.
    assert "first running statistic that differs is conv.bn._variance, 1 before it agree" in said


def test_other_seeds_are_found_in_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--a", "seed=0", "--b", "seed=1", steps=1) == 1
    said = capsys.readouterr().out
    assert "likely cause: data" in said
    assert "the global batches have different members" in said
    assert "(seed=0 and 1)" in said


def test_dropout_is_found_in_the_random_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "model.name=MobileNetV3_small_x1_0"
    assert run(tmp_path, "--a", f"{model}", "--b", f"{model} topology=1x2", steps=1) == 1
    said = capsys.readouterr().out
    assert "likely cause: random numbers" in said
    assert "1 layers draw random numbers" in said
    assert said.split("its own share: ")[1].startswith("dropout")


def test_two_nodes_agree_with_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parents on loopback; tests/container has real containers."""
    monkeypatch.setattr("benchmarks.runs.IMAGE", "fleet-recipes:no-such-image")
    two = "topology.nodes=2 topology.devices=1"
    assert run(tmp_path, "--a", "topology=1x1", "--b", two, steps=2) == 0
    assert "2 parents on loopback" in capsys.readouterr().out


def test_two_commits_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same one here: the code of a side is a worktree of its own, which is gone afterwards."""
    sides = ("--commit-a", "HEAD", "--commit-b", "HEAD", "--b", "topology=1x2")
    assert run(tmp_path, *sides, steps=1) == 0
    assert "agree" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        *("a", "b", "comparison.json", "parity.png")
    }


def test_in_float32_the_first_losses_agree(tmp_path: Path) -> None:
    """Of the recipe itself: its loss on a global batch is about 2.7."""
    recipe = ("recipe=digits_resnet18", "dtype=float32")
    sides = ("--a", "topology=1x1", "--b", "topology=1x3")
    arguments = ["--tolerance", "1e-6", "--steps", "1", "--output", str(tmp_path), *recipe]
    assert parity.main([*sides, *arguments]) == 0
    (found,) = json.loads((tmp_path / "comparison.json").read_text())
    assert "dtype=float32" in found["overrides"][1]
