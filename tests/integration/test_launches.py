"""Real launches: what each row of the table leaves behind, and what rows have in common."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched import Launches
from launches import DROPOUT, ROWS, TABLE, Row
from running import Finished, launch, timeless
from safetensors.numpy import load_file
from visualdl import LogReader

from recipes import config

pytestmark = pytest.mark.launch

TRAIN_KEYS = {
    "event": str,
    "epoch": int,
    "step": int,
    "samples": int,
    "loss": float,
    "top1": float,
    "lr": float,
    "skipped_steps": int,
    "images_per_second": float,
    "data_wait": float,
    "time": float,
}
SCORE_KEYS = {
    "epoch": int,
    "step": int,
    "top1": float,
    "top5": float,
    "loss": float,
    "samples": int,
}
EVAL_KEYS = {"event": str, "time": float} | SCORE_KEYS
RESULT_KEYS = {
    "status": str,
    "final": dict,
    "best": dict,
    "images_per_second": float,
    "wall_seconds": float,
    "topology": str,
    "world_size": int,
}
ENVIRONMENT_KEYS = {"hosts", "os", "python", "cpu", "memory_bytes", "packages", "paddle"} | {
    "gpu",
    "git",
    "image",
}


@pytest.fixture(scope="session")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launches]:
    """The table's launches; those of the tests that were collected begin at once."""
    launches = Launches(tmp_path_factory.mktemp("launches"))
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    rows = [spec.params.get("row") for spec in specs if spec]
    launches.expect([row.name for row in rows if isinstance(row, Row)])
    yield launches
    launches.close()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_launch_leaves_the_run_folder_of_the_design(row: Row, launched: Launches) -> None:
    run = launched[row.name]
    assert run.status == 0, run.said
    assert "Traceback" not in run.said
    check_files(run, row)
    check_logs(run, row)
    check_metrics(run, row)
    check_result(run, row)
    check_console(run, row)
    if row.task == "train":
        check_checkpoints(run)
        check_board(run)


def check_files(run: Finished, row: Row) -> None:
    names = {".claim", "config.yaml", "environment.json", "metrics.jsonl", "result.json", "logs"}
    if row.task == "train":
        names |= {"checkpoints", "visualdl"}
    assert {path.name for path in run.folder.iterdir()} == names
    assert [path.name for path in run.folder.rglob(".*")] == [".claim"]  # and nothing half-written

    saved = config.load(run.folder / "config.yaml")
    assert saved.shape.world_size == row.devices
    assert saved.task.name == row.task
    environment = json.loads((run.folder / "environment.json").read_text())
    assert set(environment) == ENVIRONMENT_KEYS
    assert environment["packages"]["paddlepaddle"] == environment["paddle"]["version"]


def check_logs(run: Finished, row: Row) -> None:
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log" for rank in range(row.devices)}
    for rank in range(row.devices):
        for line in run.log(rank).splitlines():
            assert line.startswith(f"[node0 rank{rank}]"), line
    everything = "".join(run.log(rank) for rank in range(row.devices))
    assert "eval loss" in run.log(0)
    for pattern in row.says:
        assert re.search(pattern, everything), pattern


def check_metrics(run: Finished, row: Row) -> None:
    text = (run.folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert len(text.splitlines()) == row.steps + row.epochs
    train, evaluations = run.events("train"), run.events("eval")
    assert [event["step"] for event in train] == list(range(1, row.steps + 1))
    for event in train:
        check_types(event, TRAIN_KEYS)
        assert 0 <= event["data_wait"] <= 1
        assert event["images_per_second"] > 0
        assert event["lr"] > 0
    if train:
        whole = config.load(run.folder / "config.yaml").global_batch_size
        assert whole is not None
        assert [e["samples"] for e in train] == [whole * e["step"] for e in train]
    for event in evaluations:
        check_types(event, {k: v for k, v in EVAL_KEYS.items() if k != "top5" or row.top5})
        assert event["samples"] == row.samples
        assert 0 <= event["top1"] <= event.get("top5", 1) <= 1
        hits = event["top1"] * row.samples
        assert hits == pytest.approx(round(hits), abs=1e-9)
    for event in [*train, *evaluations]:
        assert math.isfinite(event["loss"])
        assert 0 <= event["top1"] <= 1
    times = [json.loads(line)["time"] for line in text.splitlines()]
    assert times == sorted(times)


def check_result(run: Finished, row: Row) -> None:
    result = run.result
    if row.task == "evaluate":
        assert result.pop("images_per_second") is None
        result["images_per_second"] = 1.0
    check_types(result, RESULT_KEYS)
    assert result["status"] == "completed"
    assert result["topology"] == f"1x{row.devices}"
    assert result["world_size"] == row.devices
    assert 0 < result["wall_seconds"] < run.seconds
    scores = [{k: v for k, v in e.items() if k in SCORE_KEYS} for e in run.events("eval")]
    assert result["final"] == scores[-1]
    assert result["best"] == max(scores, key=lambda each: (each["top1"], -each["loss"]))


def check_console(run: Finished, row: Row) -> None:
    shown = [line for line in run.output.splitlines() if re.search(r"step +\d+/\d+ +loss", line)]
    expected = row.steps if not row.bare else 0  # the launcher keeps its ranks' output
    if not row.bare:
        assert len(shown) == expected
    assert all(line.startswith("[node0 rank0]") for line in shown)
    if row.task == "train" and not row.bare:
        assert f"Training completed: {run.result['images_per_second']:,.1f} images/s" in run.output
        assert f"results: {run.folder}" in run.output.replace("\n", "")
    assert run.errors == "" or row.bare


def check_checkpoints(run: Finished) -> None:
    folder = run.folder / "checkpoints"
    for link, score in (("last", "final"), ("best", "best")):
        path = folder / link
        assert not path.readlink().is_absolute()
        assert path.resolve().parent == folder.resolve()
        assert path.resolve().name == f"step-{run.result[score]['step']:08d}"
        check_checkpoint(path)
    kept = {run.result[score]["step"] for score in ("final", "best")}
    assert {path.name for path in folder.glob("step-*")} == {f"step-{step:08d}" for step in kept}


def check_checkpoint(path: Path) -> None:
    """Against its manifest, by means of its own."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {"model.safetensors", "optimizer.safetensors", "state.json"}
    if "ranks.safetensors" in manifest["files"]:  # where ranks have statistics of their own
        files.add("ranks.safetensors")
    assert {each.name for each in path.iterdir()} == {*files, "manifest.json"}
    assert set(manifest["files"]) == files
    for name, recorded in manifest["files"].items():
        data = (path / name).read_bytes()
        assert recorded == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    model, optimizer = (
        load_file(path / "model.safetensors"),
        load_file(path / "optimizer.safetensors"),
    )
    assert model
    assert {name.rpartition("/")[0] for name in optimizer} <= set(model)
    for name, array in {**model, **optimizer}.items():
        assert np.isfinite(array).all(), name


def check_board(run: Finished) -> None:
    """One record file, whose curves are those of ``metrics.jsonl``."""
    (file,) = (run.folder / "visualdl").iterdir()
    assert file.name.startswith("vdlrecords.")
    assert file.name.endswith(".log")
    curves = curves_of(file)
    for kind, keys in (("train", ("loss", "top1", "lr")), ("eval", ("top1", "top5", "loss"))):
        for key in keys:
            expected = {event["step"]: event[key] for event in run.events(kind) if key in event}
            assert curves.get(f"{kind}/{key}", {}) == pytest.approx(expected, rel=1e-6)
    reader = LogReader(file_path=str(file))
    assert reader.get_tags()["image"] == ["input/samples"]


def curves_of(file: Path) -> dict[str, dict[int, float]]:
    """Step to value for each curve, each step in it once."""
    reader = LogReader(file_path=str(file))
    curves = {}
    for tag in reader.get_tags()["scalar"]:
        points = [(point.id, point.value) for point in reader.get_data("scalar", tag)]
        assert len(dict(points)) == len(points), tag
        curves[tag] = dict(points)
    return curves


def check_types(content: dict[str, Any], keys: dict[str, type]) -> None:
    assert set(content) == set(keys)
    for key, kind in keys.items():
        assert type(content[key]) is kind, f"{key}={content[key]!r}"


@pytest.mark.parametrize("other", ["sync_1x2", "sync_1x3", "sync_1x4"])
def test_a_training_is_the_same_on_any_topology(other: str, launched: Launches) -> None:
    one, many = launched["sync_1x1"], launched[other]
    assert many.losses() == pytest.approx(one.losses(), rel=1e-9)
    assert [e["top1"] for e in many.events("train")] == [e["top1"] for e in one.events("train")]
    assert [e["lr"] for e in many.events("train")] == [e["lr"] for e in one.events("train")]
    ours, theirs = one.result["final"], many.result["final"]
    assert theirs.pop("loss") == pytest.approx(ours.pop("loss"), rel=1e-9)
    assert theirs == ours


def test_the_bare_launcher_ends_with_the_table_too(launched: Launches) -> None:
    said = launched["bare_1x2"].output
    assert "Training completed" in said
    assert "| final |" in said
    assert f"results: {launched.folder('bare_1x2')}" in said


def test_synchronised_statistics_matter(launched: Launches) -> None:
    """Else the equalities here could not tell whether they are synchronised."""
    different = launched["shares_1x4"].losses()[0] / launched["sync_1x4"].losses()[0] - 1
    assert abs(different) > 1e-3


@pytest.mark.parametrize("ranks", ["shares_1x2", "shares_1x4"])
def test_ranks_train_like_one_process_that_accumulates(ranks: str, launched: Launches) -> None:
    one, many = launched["shares_1x1"], launched[ranks]
    assert many.losses() == pytest.approx(one.losses(), rel=1e-9)
    assert [e["top1"] for e in many.events("train")] == [e["top1"] for e in one.events("train")]


def test_a_leaner_step_is_the_same_step(launched: Launches) -> None:
    """A static graph, other buckets, fewer cores."""
    assert launched["lean"].losses() == launched["shares_1x2"].losses()


def test_gradients_that_travel_rounded_train_nearly_the_same(launched: Launches) -> None:
    exact, rounded = launched["shares_1x4"].losses(), launched["rounded"].losses()
    assert rounded[0] == pytest.approx(exact[0], rel=1e-5)
    assert rounded == pytest.approx(exact, rel=0.1)  # float32 curves part early, too
    assert rounded[1:] != pytest.approx(exact[1:], rel=1e-6)  # they did travel rounded


def test_a_checkpoint_holds_the_running_means_of_all_ranks(launched: Launches) -> None:
    """Of the first layer: its input is the same with and without sync-BN, and after one step the
    mean of the ranks' means is that of the global batch."""
    ours, synchronised = (
        load_file(launched[name].folder / "checkpoints" / "last" / "model.safetensors")
        for name in ("averaged", "smoothing_clip")
    )
    first = "conv.bn._mean"  # of MobileNetV1
    assert np.abs(synchronised[first]).max() > 1e-3
    np.testing.assert_allclose(ours[first], synchronised[first], rtol=1e-9, atol=1e-12)


def test_a_run_is_bit_identical_to_itself(launched: Launches) -> None:
    """Once by ``train.py``, once by the launcher in the user's own hands."""
    ours, bare = launched["sync_1x2"], launched["bare_1x2"]
    for kind in ("train", "eval"):
        assert [timeless(e) for e in ours.events(kind)] == [timeless(e) for e in bare.events(kind)]
    for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
        path = Path("checkpoints") / "last" / file
        assert (ours.folder / path).read_bytes() == (bare.folder / path).read_bytes()


@pytest.mark.parametrize("name", ["score_1x1", "score_1x3", "score_1x4"])
def test_a_checkpoint_gives_the_scores_of_its_training(name: str, launched: Launches) -> None:
    trained = launched["sync_1x2"].result["best"]
    assert launched[name].result["final"] == trained
    assert launched[name].result["best"] == trained


def test_the_learning_rate_falls_at_the_milestone(launched: Launches) -> None:
    """0.1 epochs of 30 steps: after the third."""
    rates = [event["lr"] for event in launched["adamw_step"].events("train")]
    peak = 0.002 * 48 / 256
    assert rates == pytest.approx([peak] * 3 + [peak * 0.1] * 2, rel=1e-12)


def test_adamw_keeps_two_moments_of_each_trained_parameter(launched: Launches) -> None:
    held = load_file(
        launched["adamw_step"].folder / "checkpoints" / "last" / "optimizer.safetensors"
    )
    kinds = {name.rpartition("/")[2] for name in held}
    assert {"moment1", "moment2"} <= kinds
    assert "velocity" not in kinds


def test_clipping_bounds_the_gradient_of_the_global_batch(launched: Launches) -> None:
    """Without weight decay the first velocity is the clipped gradient itself."""
    path = launched["smoothing_clip"].folder / "checkpoints" / "last" / "optimizer.safetensors"
    velocities = [a for name, a in load_file(path).items() if name.endswith("/velocity")]
    norm = math.sqrt(sum(float((each**2).sum()) for each in velocities))
    assert norm == pytest.approx(0.01, rel=1e-6)


def test_label_smoothing_adds_the_mean_over_all_classes(launched: Launches) -> None:
    """The smoothed loss is 0.9 CE + 0.1 U, where U, over ten classes, is at least log 10."""
    plain = launched["sync_1x2"].losses()[0]
    (smoothed,) = launched["smoothing_clip"].losses()
    assert smoothed > 0.9 * plain + 0.1 * math.log(10)
    assert smoothed < 0.9 * plain + 0.1 * 3 * plain
    assert smoothed != pytest.approx(plain, rel=1e-6)


def test_the_layout_inside_the_backbone_does_not_matter(launched: Launches) -> None:
    one, many = launched["resnet_nchw"], launched["resnet_nhwc"]
    assert many.losses() == pytest.approx(one.losses(), rel=1e-9)
    assert many.result["final"]["loss"] == pytest.approx(one.result["final"]["loss"], rel=1e-9)


def test_every_mistake_of_two_epochs_of_photographs_is_told_once(launched: Launches) -> None:
    run = launched["photographs"]
    for path in ("train/newt/2.png", "val/toad/1.jpg"):
        for source in (run.output, run.log(0) + run.log(1)):
            assert source.count(f"{path}: cannot be read") == 1, path


def test_multirun_runs_one_after_the_other(launched: Launches, tmp_path: Path) -> None:
    """The second run, in a process that has trained before, is the one of a fresh process."""
    sweep = tmp_path / "sweep"
    done = launch(
        tmp_path / "unused", "--multirun", *DROPOUT, "seed=0,1", f"hydra.sweep.dir={sweep}"
    )
    assert done.status == 0, done.said
    assert {path.name for path in sweep.iterdir()} <= {"0-seed_0", "1-seed_1", "multirun.yaml"}
    titles = [line for line in done.output.splitlines() if line.startswith("trial ")]
    assert titles == ["trial 1 of 2: seed=0", "trial 2 of 2: seed=1"]
    assert not (tmp_path / "unused").exists()
    row = ROWS["dropout"]
    first, second = (Finished(sweep / f"{n}-seed_{n}", 0, "", "", math.inf) for n in (0, 1))
    for run in (first, second):
        check_files(run, row)
        check_logs(run, row)
        check_metrics(run, row)
        check_result(run, row)
        check_checkpoints(run)
        check_board(run)
    alone = launched["dropout"]
    for kind in ("train", "eval"):
        assert [timeless(e) for e in second.events(kind)] == [
            timeless(e) for e in alone.events(kind)
        ]
    assert first.losses()[0] != second.losses()[0]
