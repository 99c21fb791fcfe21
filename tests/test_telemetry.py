"""What a run says and leaves behind."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import dumped, mutated, mutated_json

from recipes import log_lines, telemetry
from recipes.config import UserError
from recipes.telemetry import Board, MetricsLog, Result, RunFolder, read_metrics

ROOT = Path(__file__).parent.parent
FULL = Path("/dev/full")  # every write to it fails as on a full disk


def train_event(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "train",
        "epoch": 0,
        "step": step,
        "samples": 64 * step,
        "loss": 1 / (step + 2),
        "top1": 0.5,
        "lr": 0.05,
        "images_per_second": 612.4,
        "data_wait": 0.03,
        "time": 1_700_000_000.0 + step,
        **changes,
    }


def eval_event(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "eval",
        "epoch": 0,
        "step": step,
        "top1": 0.9,
        "top5": 0.99,
        "loss": 0.25,
        "samples": 360,
        "time": 1_700_000_000.5 + step,
        **changes,
    }


def equal(left: Any, right: Any) -> bool:
    """Equal with NaN equal to NaN."""
    return repr(left) == repr(right)


# metrics.jsonl

EVALUATION = (
    '{"event": "eval", "epoch": 0, "step": 2, "top1": 0.5, "top5": 1.0, "loss": 1.5, "samples": 8}'
)
TRAINED = '{"event": "train", "step": 1, "samples": 8, "lr": 0.1, "images_per_second": 7.5}'
numbers = st.floats() | st.integers(-(2**60), 2**60)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.fixed_dictionaries({"step": st.integers(1, 99), "loss": numbers}), max_size=6))
def test_metrics_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsLog(path) as log:
        written = [log.append(event) for event in events]
        assert equal(read_metrics(path), written)  # readable before the file is closed
    for event, line in zip(events, path.read_text().splitlines() if events else [], strict=True):
        stored = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert stored["time"] > 1e9
        if math.isfinite(event["loss"]):
            assert stored["loss"] == event["loss"]
            assert "non_finite" not in stored
        else:
            assert stored["loss"] is None
            assert equal(float(stored["non_finite"]["loss"]), event["loss"])


def test_numpy_scalars_are_written_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"loss": np.float32(0.1), "step": np.int64(3), "top1": np.float32("nan")})
    (event,) = read_metrics(path)
    assert event["loss"] == float(np.float32(0.1))
    assert type(event["step"]) is int
    assert math.isnan(event["top1"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["one", "other"]), st.integers(1, 12)), max_size=20),
    st.integers(0, 13),
    st.integers(0, 40),
)
def test_rewind_keeps_each_event_up_to_the_step_once(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, int]],
    step: int,
    torn: int,
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"event": "start"})
    for number, (kind, at) in enumerate(kinds):
        log.append({"event": kind, "step": at, "number": number})
    log.close()
    with path.open("a") as stream:
        stream.write('{"event": "train", "step": 1, "number": 99}'[:torn])
    kept = log.rewind(step)
    latest = {kind: number for number, kind in enumerate(kinds) if kind[1] <= step}
    assert [event.get("number") for event in kept] == [None, *sorted(latest.values())]
    assert read_metrics(path) == kept
    log.append({"event": "one", "step": step + 1, "number": 100})
    log.close()
    assert [event.get("number") for event in read_metrics(path)[-1:]] == [100]
    assert [name.name for name in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_before_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsLog(path) as log:
        log.append({"step": 3})
    assert [event["step"] for event in read_metrics(path)] == [1, 3]


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"non_finite": 1}', ""])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(UserError, match=f"{path}, line 2: not a JSON object"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": "1"}', "step is no count"),
        ('{"step": 1.5}', "step is no count"),
        ('{"step": true}', "step is no count"),
        ('{"event": ["eval"]}', "event is no number or text"),
        ('{"event": 3}', "event is no name"),
        ('{"step": 1, "time": "now"}', "time is no time"),
        ('{"event": "eval", "step": 1}', "epoch is missing"),
        (EVALUATION.replace("0.5", "null"), "top1 is no number"),
        ('{"event": "train", "step": 1, "samples": 8}', "images_per_second is missing"),
        (TRAINED.replace("7.5", "0"), "images_per_second is no speed"),
        (TRAINED.replace("7.5", '"7"'), "images_per_second is no number"),
        (TRAINED.replace("0.1", "[0.1]"), "lr is no number or text"),
        ('{"a": "' + "x" * 70_000 + '"}', "not a JSON object"),
        ("[" * 70_000, "not a JSON object"),
        ('{"step": 1' + "0" * 5000 + "}", "not a JSON object"),
        ('{"non_finite": {"loss": "\x1b[31m"}}', "not a JSON object"),
    ],
)
def test_what_is_no_event_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{TRAINED}\n{EVALUATION}\n{line}\n")
    for use in (read_metrics, lambda path: MetricsLog(path).rewind(9)):
        with pytest.raises(UserError) as caught:
            use(path)
        assert f"{path}, line 3: " in caught.value.message
        assert reason in caught.value.message
        assert str(caught.value).isprintable() or "\n  remedy" in str(caught.value)
        assert "\x1b" not in str(caught.value)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "link to nothing"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, kind: str, name: str) -> None:
    run, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    run.path.mkdir()
    path = run.path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(outside)
    if kind == "link":
        outside.write_text("secret\n")
    read: Any = read_metrics if name == "metrics.jsonl" else lambda _: telemetry.read_result(run)
    with pytest.raises(UserError, match=r"(?s)cannot be read: it is (no file|a link)") as caught:
        read(path)
    assert "secret" not in str(caught.value)
    if name == "metrics.jsonl" and kind != "fifo":  # which reading has refused before
        with pytest.raises(UserError, match="cannot be written"):
            MetricsLog(path).append({"step": 1})
        assert outside.exists() == (kind == "link")


def test_mutations_of_metrics_give_a_message_or_events(tmp_path: Path) -> None:
    run, chance = RunFolder(tmp_path), random.Random(0)
    lines = f"{TRAINED}\n{EVALUATION}\n" * 4
    read = 0
    for number in range(400):
        if number % 2:
            run.metrics.write_bytes(mutated(lines.encode(), chance))
        else:
            odd = dumped(mutated_json(json.loads(EVALUATION), chance))
            run.metrics.write_bytes(lines.encode() + odd + b"\n" + lines.encode())
        with contextlib.suppress(UserError):
            history = MetricsLog(run.metrics).rewind(chance.randrange(9))
            telemetry.scores_of(history)
            telemetry.speed_of(history)
            Board(run.visualdl, name="a", hyperparameters={}, config="", history=history).close()
            read += 1
    assert 0 < read < 400
    assert {each.name for each in tmp_path.iterdir()} == {"metrics.jsonl", "visualdl"}


def test_mutations_of_a_result_give_a_message_or_a_result(tmp_path: Path) -> None:
    run, chance = RunFolder(tmp_path), random.Random(0)
    scores = {"epoch": 1, "step": 9, "samples": 8, "top1": 0.5, "top5": 1.0, "loss": 1.5}
    error = {"node": 0, "rank": 1, "type": "UserError", "message": "m", "remedy": "r"}
    whole = Result("failed", scores, scores, 7.5, 3.0, "1x2", 2, error).as_dict()
    read = 0
    for number in range(400):
        odd = mutated_json(whole, chance)
        data = dumped(odd) if number % 2 else mutated(dumped(whole), chance)
        run.result.write_bytes(data)
        with contextlib.suppress(UserError):
            telemetry.summary_table(telemetry.read_result(run), run)
            read += 1
    assert 0 < read < 400


def test_metrics_of_no_run(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert MetricsLog(tmp_path / "metrics.jsonl").rewind(3) == []
    assert list(tmp_path.iterdir()) == []


def test_metrics_on_a_full_disk_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log._stream = FULL.open("a")
    with pytest.raises(UserError, match=f"{path} cannot be written: No space left") as error:
        log.append({"step": 1})
    assert "make room" in error.value.remedy
    log.close()


# result.json and other JSON files


def a_result(**changes: Any) -> Result:
    metrics = {"top1": 0.98125, "top5": 1.0, "loss": 0.0712, "epoch": 4, "step": 115}
    fields: dict[str, Any] = {
        "status": "completed",
        "final": metrics,
        "best": {**metrics, "top1": 0.984, "epoch": 3, "step": 92},
        "images_per_second": 612.44,
        "wall_seconds": 83.0,
        "topology": "1x2",
        "world_size": 2,
    }
    return Result(**{**fields, **changes})


def test_the_result_has_the_promised_keys(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    a_result().write(folder)
    written = json.loads(folder.result.read_text())
    assert list(written) == [
        "status",
        "final",
        "best",
        "images_per_second",
        "wall_seconds",
        "topology",
        "world_size",
    ]
    assert written == a_result().as_dict()
    error = {"node": 0, "rank": 1, "type": "ValueError", "message": "m", "remedy": ""}
    loss = {"top1": 0.1, "top5": 0.5, "loss": math.nan, "epoch": 0, "step": 1}
    a_result(status="failed", error=error, final=loss, best=None).write(folder)
    written = json.loads(folder.result.read_text())
    assert written["error"] == error
    assert written["final"]["loss"] is None
    assert written["best"] is None
    assert [path.name for path in folder.path.iterdir()] == ["result.json"]


def test_a_result_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="status 'done'"):
        a_result(status="done")
    with pytest.raises(ValueError, match="failed run"):
        a_result(status="failed")
    with pytest.raises(ValueError, match="completed run"):
        a_result(error={})


def test_a_json_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    telemetry.write_json(path, {"x": 1})
    seen = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for size in range(1, 60):
        telemetry.write_json(path, {"x": size, "y": list(range(size * 50))})
    stop.set()
    reader.join()
    for text in seen:
        content = json.loads(text)
        assert len(content.get("y", range(50 * content["x"]))) == 50 * content["x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"b\.json cannot be written"):
        telemetry.write_json(tmp_path / "file" / "b.json", {})


# VisualDL


def scalars(folder: Path) -> dict[str, list[tuple[int, float, int]]]:
    """Step, value and time of every curve, read by VisualDL itself."""
    from visualdl import LogReader

    (path,) = folder.iterdir()
    reader = LogReader(file_path=str(path))
    tags = reader.get_tags().get("scalar", [])
    return {
        tag: [(item.id, item.value, item.timestamp) for item in reader.get_data("scalar", tag)]
        for tag in tags
    }


def board(folder: Path, history: list[dict[str, Any]] | None = None) -> Board:
    return Board(
        folder,
        name="run",
        hyperparameters={"lr": 0.1, "epochs": 5, "sync_bn": True, "model": "R", "seed": None},
        config="model:\n  name: R\n",
        history=history or [],
    )


def test_the_board_holds_curves_images_and_settings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from visualdl import LogReader

    threads = threading.active_count()
    capfd.readouterr()
    with board(tmp_path) as it:
        for step in (5, 10):
            it.add(train_event(step))
        it.add(eval_event(10))
        it.add({"event": "other", "step": 3, "loss": 1.0})
        it.add_images(np.random.default_rng(0).random((5, 8, 6, 1), np.float32))
        assert threading.active_count() == threads
        live = scalars(tmp_path)  # readable while the run goes on
    assert capfd.readouterr() == ("", "")
    assert live == scalars(tmp_path)
    assert set(live) == {
        *(f"train/{key}" for key in ("loss", "top1", "lr", "images_per_second", "data_wait")),
        *(f"eval/{key}" for key in ("top1", "top5", "loss")),
    }
    assert live["train/loss"] == [
        (step, float(np.float32(1 / (step + 2))), 1_700_000_000_000 + 1000 * step)
        for step in (5, 10)
    ]
    assert [item[:2] for item in live["eval/top1"]] == [(10, float(np.float32(0.9)))]

    reader = LogReader(file_path=str(it.path))
    assert reader.get_tags()["image"] == ["input/samples"]
    (text,) = reader.get_data("text", "config")
    assert [line[4:] for line in text.text.encoded_text_string.splitlines()] == [
        "model:",
        "  name: R",
    ]
    (record,) = reader.get_data("hyper_parameters", "hparam")
    kept = {info.name: getattr(info, info.WhichOneof("type")) for info in record.hparam.hparamInfos}
    assert kept == {"lr": pytest.approx(0.1), "epochs": 5, "sync_bn": "true", "model": "R"}
    assert [info.name for info in record.hparam.metricInfos] == [
        "eval/top1",
        "eval/top5",
        "eval/loss",
    ]


def test_a_continued_run_has_one_file_and_each_step_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    log = MetricsLog(run.metrics)
    with board(run.visualdl) as first:
        for step in (5, 10, 15, 20):
            first.add(log.append(train_event(step)))
    (run.visualdl / "vdlrecords.1700000000.log").write_bytes(b"of another version")
    (run.visualdl / ".partial-1").write_bytes(b"of a killed process")
    kept = log.rewind(10)
    with board(run.visualdl, kept) as second:
        second.add(log.append(train_event(15, loss=9.0)))
    curves = scalars(run.visualdl)
    assert [item[0] for item in curves["train/loss"]] == [5, 10, 15]
    assert curves["train/loss"][-1][1] == 9.0
    assert [event["step"] for event in read_metrics(run.metrics)] == [5, 10, 15]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_left_out_with_a_word(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    with board(tmp_path, [train_event(1, loss=value)]) as it:
        it.add(train_event(2, loss=value))
        it.add(train_event(3))
    assert [item[0] for item in scalars(tmp_path)["train/loss"]] == [3]
    assert [item[0] for item in scalars(tmp_path)["train/lr"]] == [1, 2, 3]
    assert f"train/loss is {value} at step 2: left out" in caplog.text


def test_a_board_that_cannot_be_written_says_so_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with board(tmp_path) as it:
        assert it._stream is not None
        it._stream.close()
        it._stream = FULL.open("wb")
        for step in range(3):
            it.add(train_event(step))
        it.add_images(np.zeros((1, 2, 2, 3), np.uint8))
        assert it.failed
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "No space left on device" in record.getMessage()
    assert str(it.path) in record.getMessage()
    caplog.clear()
    (tmp_path / "file").write_text("")
    assert board(tmp_path / "file").failed
    assert "Training goes on" in caplog.text


def test_a_process_with_an_open_board_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from recipes.telemetry import Board;"
        f"b = Board(Path({str(tmp_path)!r}), name='r', hyperparameters={{}}, config='');"
        "b.add({'event': 'train', 'step': 1, 'loss': 0.5})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [item[:2] for item in scalars(tmp_path)["train/loss"]] == [(1, 0.5)]


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3]))
def test_every_image_is_in_the_grid(count: int, height: int, width: int, channels: int) -> None:
    images = np.zeros((count, height, width, channels), np.uint8)
    images += np.arange(1, count + 1, dtype=np.uint8)[:, None, None, None]
    grid = telemetry.image_grid(images)
    values, areas = np.unique(grid, return_counts=True)
    found = dict(zip(values.tolist(), areas.tolist(), strict=True))
    found.pop(0, None)
    assert found == dict.fromkeys(range(1, count + 1), height * width * 3)


def test_float_images_are_stretched_to_the_whole_range() -> None:
    images = np.array([-2.0, 0.0, 2.0, np.nan]).reshape(1, 2, 2, 1)
    assert telemetry.image_grid(images)[..., 0].tolist() == [[0, 128], [255, 128]]
    assert not telemetry.image_grid(np.full((1, 2, 2, 3), 7.0)).any()


# environment.json


def test_the_environment_is_whole_and_json() -> None:
    import paddle

    found = telemetry.environment(["node-a", "node-b"])
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {
        "hosts",
        "os",
        "python",
        "cpu",
        "memory_bytes",
        "packages",
        "paddle",
        "gpu",
        "git",
        "image",
    }
    assert found["hosts"] == ["node-a", "node-b"]
    assert found["packages"]["visualdl"] == "2.5.3"
    assert found["paddle"]["version"] == paddle.__version__
    assert re.fullmatch("[0-9a-f]{40}", found["paddle"]["commit"])
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory_bytes"] > 2**28
    if not paddle.is_compiled_with_cuda():
        assert found["paddle"]["cuda"] is None
    assert telemetry.environment()["hosts"] == [os.uname().nodename]


def test_the_git_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    assert telemetry._git(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    (tmp_path / "untracked").write_text("")
    assert telemetry._git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert telemetry._git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


@pytest.mark.parametrize(("given", "dirty"), [("a1b2", False), ("a1b2-modified", True)])
def test_a_mounted_checkout_brings_its_commit(
    given: str, dirty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(telemetry.COMMIT_VARIABLE, given)
    assert telemetry._git(tmp_path) == {"commit": "a1b2", "dirty": dirty}


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert telemetry._git(ROOT) is None


def test_the_image_by_variable_else_by_file(tmp_path: Path) -> None:
    file = tmp_path / "image.json"
    assert telemetry._image({}, file) is None
    file.write_text('{"id": "sha256:1"}')
    assert telemetry._image({}, file) == {"id": "sha256:1"}
    assert telemetry._image({"FLEET_RECIPES_IMAGE": "sha256:2"}, file) == "sha256:2"
    file.write_text("{")
    assert telemetry._image({}, file) is None


def test_gpus_as_the_management_library_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    calls = []
    library: Any = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.nvmlInit = lambda: calls.append("init")
    library.nvmlShutdown = lambda: calls.append("shutdown")
    library.nvmlDeviceGetCount = lambda: 2
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlSystemGetDriverVersion = lambda: "580.1"
    library.nvmlDeviceGetName = lambda handle: f"GPU {handle}".encode()
    library.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=handle + 8)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert telemetry._gpu() == {
        "driver": "580.1",
        "devices": [
            {"name": "GPU 0", "memory_bytes": 8},
            {"name": "GPU 1", "memory_bytes": 9},
        ],
    }
    assert calls == ["init", "shutdown"]

    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded")

    library.nvmlInit = no_driver
    assert telemetry._gpu() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert telemetry._gpu() is None


# The console


@pytest.fixture
def quiet_logger() -> Iterator[None]:
    logger = logging.getLogger("recipes")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.level, logger.propagate, logger.handlers[:] = before[0], before[1], before[2]


@pytest.mark.usefixtures("quiet_logger")
def test_what_no_text_holds_is_logged_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name may be any bytes: half a character, or what a terminal obeys."""
    file = tmp_path / "rank.log"
    telemetry.setup_logging("[node0 rank0]", file=file)
    logging.getLogger("recipes.trainer").warning("replaced %s", "caf\udce9\x1b[31m.jpg")
    out, err = capsys.readouterr()
    assert err == ""
    assert out == file.read_text()
    assert out.endswith("warning: replaced caf\\udce9\\x1b[31m.jpg\n")


@pytest.mark.usefixtures("quiet_logger")
def test_every_line_is_tagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "rank1.log"
    telemetry.setup_logging("[node9 rank9]")
    telemetry.setup_logging("[node0 rank1]", file=file)
    log = logging.getLogger("recipes.trainer")
    log.info("one\ntwo %d", 2)
    log.info("")
    log.warning("careful\nnow")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("failed")
    log.debug("not shown")
    out, err = capsys.readouterr()
    assert err == ""
    assert out == file.read_text()
    form = re.compile(r"\[node0 rank1\] \d\d:\d\d:\d\d (.*)")
    matches = [form.fullmatch(line) for line in out.splitlines()]
    assert all(matches)
    messages = [match[1] for match in matches if match]
    assert messages[:6] == ["one", "two 2", "", "warning: careful", "now", "error: failed"]
    assert messages[6] == "Traceback (most recent call last):"
    assert messages[-2:] == ["ValueError: first", "second"]


@pytest.mark.usefixtures("quiet_logger")
def test_a_log_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(UserError, match=r"rank0\.log cannot be written"):
        telemetry.setup_logging("[node0 rank0]", file=tmp_path / "logs" / "rank0.log")


def number(pattern: str, line: str) -> float:
    match = re.search(pattern, line)
    assert match, line
    return float(match[1].replace(",", ""))


def test_what_is_not_scored_is_not_shown(tmp_path: Path) -> None:
    event = eval_event(115)
    del event["top5"]
    assert "top5" not in log_lines.eval_line(event)
    scores = {"top1": 0.5, "loss": 0.25, "epoch": 4, "step": 115}
    text = telemetry.summary_table(a_result(final=scores, best=scores), RunFolder(tmp_path))
    assert "top-1" in text
    assert "top-5" not in text
    older = {**scores, "top5": 1.0}
    assert "100.00%" in telemetry.summary_table(
        a_result(final=scores, best=older), RunFolder(tmp_path)
    )


def test_a_table_shows_a_result_that_was_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    loss = {"top1": 0.1, "top5": 0.5, "loss": math.nan, "epoch": 0, "step": 1}
    a_result(final=loss).write(folder)
    assert "nan" in telemetry.summary_table(telemetry.read_result(folder), folder)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([(0.5, 2.0), (0.5, 1.0), (0.5, 1.5)], 1),
        ([(0.5, 1.0), (0.5, 1.0)], 0),
        ([(0.5, 1.0), (0.6, 9.0)], 1),
        ([(0.6, 9.0), (0.5, 1.0)], 0),
        ([(0.5, math.nan), (0.5, 9.0)], 1),
        ([(0.5, 9.0), (0.5, math.nan)], 0),
        ([(0.5, None), (0.5, math.inf)], 0),
        ([(0.5, None), (0.5, 9.0), (0.5, None)], 1),
    ],
)
def test_of_equal_top1_the_lower_loss_is_the_best(
    evaluations: list[tuple[float, float | None]], best: int
) -> None:
    events = [
        eval_event(step, top1=top1, loss=loss) for step, (top1, loss) in enumerate(evaluations)
    ]
    found = telemetry.scores_of(events)[1]
    assert found is not None
    assert found["step"] == best


@given(st.integers(0, 10**6))
def test_a_duration_reads_back(seconds: int) -> None:
    parts = [int(part) for part in log_lines.duration(seconds).split(":")]
    assert sum(part * 60**power for power, part in enumerate(reversed(parts))) == seconds
    assert all(part < 60 for part in parts[1:])


def test_a_duration_that_is_not_known() -> None:
    assert log_lines.duration(math.inf) == "?"
    assert log_lines.duration(-3) == "0:00"


def test_the_summary_shows_the_results_and_where_they_are() -> None:
    text = telemetry.summary_table(a_result(), RunFolder(Path("outputs/[red]run")))
    assert text.isascii()
    assert "Training completed" in text
    rows = {line.split()[1]: line for line in text.splitlines() if "%" in line}
    assert re.findall(r"[\d.]+", rows["final"]) == ["98.12", "100.00", "0.0712", "5", "115"]
    assert re.findall(r"[\d.]+", rows["best"]) == ["98.40", "100.00", "0.0712", "4", "92"]
    for part in ("612.4 images/s", "1:23 in all", "topology 1x2 (2 processes)"):
        assert part in text
    assert "results: outputs/[red]run" in text


def test_the_summary_of_a_failed_run() -> None:
    error = {"node": 1, "rank": 3, "type": "ValueError", "message": "[x] is bad", "remedy": ""}
    result = a_result(status="failed", error=error, final=None, best=None, images_per_second=None)
    text = telemetry.summary_table(result, RunFolder(Path("outputs/run")))
    assert "Training failed" in text
    assert "failed on node 1, rank 3: ValueError: [x] is bad" in text
    assert "%" not in text


def test_a_log_on_a_full_disk_ends_with_one_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.log").symlink_to(FULL)
    telemetry.setup_logging("[node0 rank0]", file=tmp_path / "rank-0.log")
    try:
        for number in range(3):
            logging.getLogger("recipes").info("line %d", number)
    finally:
        telemetry.setup_logging("")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("line") == 3
    assert said.out.count("rank-0.log: No space left on device; it ends here") == 1
