"""``task=benchmark`` as a user runs it, and where its record goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import config, telemetry
from recipes.benchmark import record, task
from recipes.config import BenchmarkConfig, Config, DatasetConfig, ModelConfig, UserError

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("task=benchmark", "model=paddleclas", "model.name=MobileNetV1_x0_25", "device=cpu"),
    *("batch_size=null", "global_batch_size=16", "benchmark.warmup=1", "benchmark.steps=2"),
    *("benchmark.repeats=3", "benchmark.split_steps=3", "optimizer.base_lr=0.01"),
)


def run(folder: Path, *overrides: str, environment: dict[str, str] | None = None) -> Any:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLEET_", "PADDLE_"))}
    return subprocess.run(
        [sys.executable, "train.py", *SMALL, *overrides, f"hydra.run.dir={folder / 'run'}"],
        cwd=ROOT,
        env=clean | (environment or {}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.launch
@pytest.mark.parametrize("devices", [1, 2])
def test_a_benchmark_leaves_a_record(devices: int, tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        f"topology.devices={devices}",
        "benchmark.name=mine",
        f"benchmark.output={tmp_path / 'out'}",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = telemetry.RunFolder(tmp_path / "run")
    found = record.read(tmp_path / "out" / "mine.json")
    assert record.read(folder.benchmark) == found
    assert record.summary(found) in ended.stdout

    # The samples are those of the loop that wrote the metrics.
    events = telemetry.read_metrics(folder.metrics)
    assert [event["step"] for event in events] == [1, 3, 5, 7]
    assert found.throughput.samples == [event["images_per_second"] for event in events[1:]]
    assert found.throughput.data_wait == [event["data_wait"] for event in events[1:]]
    result = telemetry.read_result(folder)
    assert result.status == "completed"
    assert result.images_per_second == found.throughput.median
    assert (result.final, result.best) == (None, None)
    assert not folder.checkpoints.exists()

    assert found.split is not None
    assert (found.split.phases["communication"] > 0) <= (devices > 1)
    assert len(found.split.steps) == devices
    assert all(2**27 < rank.peak_memory_bytes < 2**33 for rank in found.usage.ranks)
    assert all(0 < (rank.load or 0) <= (os.cpu_count() or 1) for rank in found.usage.ranks)
    assert found.config["max_steps"] == 7
    assert found.config["topology"]["devices"] == devices
    expected = [*SMALL, f"topology.devices={devices}", "benchmark.name=mine"]
    assert found.command == " ".join(["python train.py", *expected])
    assert len(found.code.commit) == 40
    text = (tmp_path / "out" / "mine.json").read_text()
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    # The configuration that it leaves behind is one that runs.
    config.register_schema()
    assert config.load(folder.config).benchmark.repeats == 3


def test_a_record_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    made = Config(benchmark=BenchmarkConfig(name="mine", output=str(tmp_path)))
    with pytest.raises(UserError, match=r"mine\.json exists") as caught:
        task.target_of(made)
    assert "benchmark.name" in caught.value.remedy


def named(**asked: Any) -> Config:
    return Config(
        model=ModelConfig("ResNet50"),
        dataset=DatasetConfig("imagenet", image_size=224),
        benchmark=BenchmarkConfig(**asked),
        device="cpu",
    )


def test_the_name_says_what_it_is_of(tmp_path: Path) -> None:
    found = task.target_of(named(output=str(tmp_path / "new")))
    assert found is not None
    assert found.parent == tmp_path / "new"
    assert found.name.startswith("resnet50-imagenet-224-1x1-cpu-")
    assert found.suffix == ".json"


def test_the_checkout_is_left_alone_unless_a_folder_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task.target_of(named()) is None
    assert task.target_of(named(name="a")) is None
    assert task.target_of(named(name="a", output=str(tmp_path))) == tmp_path / "a.json"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"benchmark\.output=\S+ cannot hold .* not writable"):
        task.target_of(named(name="a", output=str(tmp_path)))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"benchmark\.output=\S+file/x cannot hold the record"):
        task.target_of(named(output=str(tmp_path / "file" / "x")))


def test_the_command_is_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "a=1", "b=x y"])
    monkeypatch.delenv(telemetry.COMMAND_VARIABLE, raising=False)
    assert task.command() == ["a=1", "b=x y"]
    monkeypatch.setenv(telemetry.COMMAND_VARIABLE, "c=2 'd=x y'")
    assert task.command() == ["c=2", "d=x y"]


def test_a_training_in_the_run_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    kept = json.dumps({"kept": 1})
    (tmp_path / "run" / "checkpoints" / "x").write_text(kept)
    ended = run(tmp_path, "resume=auto", f"benchmark.output={tmp_path}")
    assert ended.returncode == 1
    assert "holds a training, which task=benchmark would continue" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "x").read_text() == kept
