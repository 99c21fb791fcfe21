"""The comparison of two trainings: differences, causes in their order, the picture, the command."""

from __future__ import annotations

import json
import math
import re
import shlex
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import accuracy, parity
from benchmarks.comparison import Comparison, Record, Share, compare, relative_difference
from benchmarks.curves import plot
from benchmarks.runs import Job, Runner, Setting, flatten, random_layers, read_record, read_shares
from recipes import checkpoint
from recipes.config import UserError, from_hydra, register_schema
from recipes.snapshot import Snapshot

SETTINGS: dict[str, Any] = {
    **{"seed": 0, "sync_bn": True, "accumulate": 1, "optimizer.base_lr": 0.1, "model.name": "M"},
    **{"topology.nodes": 1, "topology.devices": 1, "dataset.name": "digits", "dtype": "float64"},
}
LOSSES = {1: 2.5, 2: 1.25, 3: 0.5, 4: 0.25}
BATCH = (7, 3, 9, 1)


def record(name: str, losses: dict[int, float] = LOSSES, ranks: int = 1, **more: Any) -> Record:
    """A run whose ranks share each step's batch."""
    settings = {**SETTINGS, "topology.devices": ranks, **more.pop("settings", {})}
    each = len(BATCH) // ranks
    shares = {
        step: [
            Share(r, BATCH[r * each : (r + 1) * each], BATCH[r * each : (r + 1) * each])
            for r in range(ranks)
        ]
        for step in losses
    }
    return Record(name, settings, losses, **{"shares": shares, **more})


def off(step: int, by: float) -> dict[int, float]:
    """The losses, from a step on larger by a relative difference."""
    return {at: loss * (1 + by) if at >= step else loss for at, loss in LOSSES.items()}


def kind(a: Record, b: Record, tolerance: float = 1e-9) -> tuple[str, str]:
    found = compare(a, b, tolerance)
    assert not found.agree
    assert found.cause is not None
    return found.cause.kind, found.cause.explanation


# --- differences --------------------------------------------------------------------------------


def test_equal_runs_agree() -> None:
    found = compare(record("a"), record("b", ranks=2), 0.0)
    assert found.agree
    assert (found.steps, found.differences, found.largest) == ([1, 2, 3, 4], [0.0] * 4, 0.0)
    assert found.cause is None


@given(st.integers(1, 4), st.floats(1e-8, 1e3))
def test_the_first_step_over_the_tolerance_is_found(step: int, by: float) -> None:
    found = compare(record("a"), record("b", off(step, by), ranks=2), 1e-9)
    assert not found.agree
    assert found.first_over == step
    assert found.largest == pytest.approx(by / (1 + by), rel=1e-6)
    assert found.differences[: step - 1] == [0.0] * (step - 1)


@given(st.floats(0, 5e-10))
def test_what_is_within_the_tolerance_agrees(by: float) -> None:
    assert compare(record("a"), record("b", off(1, by)), 1e-9).agree


@given(st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_the_difference_is_symmetric_and_relative(a: float, b: float) -> None:
    difference = relative_difference(a, b)
    assert difference == relative_difference(b, a)
    if math.isfinite(a) and math.isfinite(b):
        assert 0 <= difference <= 2 or math.isinf(a - b)
        assert (difference == 0) == (a == b) or abs(a - b) < 1e-300
    else:
        assert difference == math.inf


def test_a_loss_that_is_not_finite_never_agrees() -> None:
    found = compare(record("a", {1: math.nan}), record("b", {1: math.nan}), 1.0)
    assert (found.agree, found.first_over) == (False, 1)


def test_a_missing_step_is_a_disagreement_that_is_named() -> None:
    short = {step: loss for step, loss in LOSSES.items() if step < 3}
    found = compare(record("a"), record("b", short), 1e-9)
    assert (found.missing, found.first_over, found.largest) == ([3, 4], None, 0.0)
    assert kind(record("a"), record("b", short)) == ("steps", "only a has 2 steps: 3, 4")


def test_runs_without_a_step_in_common_disagree() -> None:
    found = compare(record("a", {1: 1.0}), record("b", {2: 1.0}), 1e-9)
    assert not found.agree
    assert found.largest == math.inf


# --- causes -------------------------------------------------------------------------------------


def test_an_overlap_of_ranks_is_named() -> None:
    wrong = {1: [Share(0, (7, 3)), Share(1, (3, 9))]}
    found, text = kind(record("a"), record("b", off(1, 0.1), ranks=2, shares=wrong))
    assert found == "data"
    assert text == "b, step 1: ranks 0, 1 read 1 samples more than once: 3"


def test_a_sample_read_twice_by_one_rank_is_named() -> None:
    wrong = {2: [Share(0, (7, 3, 3)), Share(1, (9,))]}
    assert (
        "step 2: rank 0 read 1 samples"
        in kind(record("a"), record("b", off(2, 0.1), shares=wrong))[1]
    )


def test_other_members_are_named_with_the_seeds() -> None:
    other = {1: [Share(0, (7, 3, 8, 2))]}
    b = record("b", off(1, 0.1), shares=other, settings={"seed": 5})
    found, text = kind(record("a"), b)
    assert found == "data"
    assert "different members: only a has 1, 9; only b has 2, 8 (seed=0 and 5)" in text


def test_other_pixels_of_the_same_samples_are_data() -> None:
    changed = {1: [Share(0, BATCH, (7, 0, 9, 1))]}
    found, text = kind(record("a"), record("b", off(1, 0.1), shares=changed))
    assert found == "data"
    assert "different pixels or labels (augmentation, reading): 3" in text


def test_data_that_differs_only_later_does_not_explain() -> None:
    late = {1: [Share(0, BATCH, BATCH)], 4: [Share(0, (1, 2))]}
    assert kind(record("a"), record("b", off(2, 0.1), shares=late))[0] != "data"


def test_the_order_within_a_batch_is_no_difference() -> None:
    turned = {1: [Share(0, BATCH[::-1], BATCH[::-1])]}
    assert kind(record("a"), record("b", off(1, 0.1), shares=turned))[0] == "unknown"


def test_without_sync_bn_the_cut_into_shares_is_data() -> None:
    own = {"sync_bn": False}
    cut = {1: [Share(0, (7, 9), (7, 9)), Share(1, (3, 1), (3, 1))]}
    b = record("b", off(1, 0.1), 2, shares=cut, settings=own)
    found, text = kind(record("a", ranks=2, settings=own), b)
    assert (found, "cut into other shares" in text) == ("data", True)


@pytest.mark.parametrize("both", [True, False])
def test_statistics_of_shares_are_the_model(both: bool) -> None:
    a = record("a", settings={"sync_bn": not both})
    found, text = kind(a, record("b", off(1, 0.1), 2, settings={"sync_bn": False}))
    assert found == "model"
    assert ("2 shares" in text) == (not both)
    assert ("sync_bn is off" if both else "sync_bn is on in a only") in text


def test_an_unconverted_layer_is_named_by_the_statistics() -> None:
    ours = {"stem._mean": np.ones(2), "block._mean": np.ones(2), "head._mean": np.ones(2)}
    theirs = {**ours, "block._mean": np.array([1.0, 1.1]), "head._mean": np.zeros(2)}
    a = record("a", statistics=ours, statistics_step=1)
    b = record("b", off(1, 0.1), 2, statistics=theirs, statistics_step=1)
    found, text = kind(a, b)
    assert found == "model"
    assert "first running statistic that differs is block._mean, 1 before it agree" in text
    # After the first differing step, weights differ too, and the statistics tell nothing.
    assert kind(a, replace(b, losses=off(2, 0.1), statistics_step=1))[0] != "model"


def test_a_mean_that_is_zero_but_for_rounding_agrees() -> None:
    a, b = ({"bn._mean": np.array([each]), "bn._variance": np.ones(1)} for each in (3e-17, -2e-17))
    x = record("a", statistics=a, statistics_step=1)
    y = record("b", off(1, 0.1), 2, statistics=b, statistics_step=1)
    assert kind(x, y)[0] == "unknown"
    (b["bn._mean"],) = np.array([[1e-6]])
    assert kind(x, y)[0] == "model"


def test_float32_is_rounding_where_it_is_small() -> None:
    single = {"dtype": "float32"}
    a = record("a", settings=single)
    found, text = kind(a, record("b", off(1, 3e-6), 2, settings=single))
    assert (found, "dtype=float64 tells" in text) == ("rounding", True)
    assert kind(a, record("b", off(1, 0.1), 2, settings=single))[0] == "unknown"


def test_other_models_are_the_model() -> None:
    b = record("b", off(1, 0.1), settings={"model.name": "N"})
    assert kind(record("a"), b) == ("model", "the models differ: model.name=M and N")


def test_dropout_is_named_where_the_ranks_differ() -> None:
    a = record("a", dropouts=("head.dropout",))
    found, text = kind(a, record("b", off(1, 0.1), 2))
    assert (found, text.endswith("its own share: head.dropout")) == ("random numbers", True)
    assert kind(a, record("b", off(1, 0.1), 1))[0] == "unknown"


def test_seeds_with_the_same_data_are_random_numbers() -> None:
    b = record("b", off(1, 0.1), settings={"seed": 1})
    assert kind(record("a"), b) == ("random numbers", "the seeds differ: 0 and 1")


def test_other_settings_come_after_random_numbers() -> None:
    b = record("b", off(1, 0.1), settings={"optimizer.base_lr": 0.2})
    text = "other settings differ: optimizer.base_lr=0.1 and 0.2"
    assert kind(record("a"), b) == ("settings", text)
    b = replace(record("b", off(2, 0.1)), rates={2: 0.5})
    assert "learning rates differ from step 2: None and 0.5" in kind(record("a"), b)[1]


def test_a_small_growth_is_rounding_and_a_jump_is_not() -> None:
    grown = {step: loss * (1 + 1e-13 * 100**step) for step, loss in LOSSES.items()}
    assert kind(record("a"), record("b", grown))[0] == "rounding"
    jumped = {step: loss * (1 + (0.1 if step > 2 else 1e-15)) for step, loss in LOSSES.items()}
    assert kind(record("a"), record("b", jumped))[0] == "unknown"


def test_the_order_of_causes() -> None:
    """Everything is wrong; mended one by one, in this order."""
    everything: dict[str, Any] = {"seed": 1, "sync_bn": False, "optimizer.base_lr": 9.0}
    data = {1: [Share(0, (7, 3)), Share(1, (3, 9))]}
    seen = []
    for settings, shares in (
        (everything, data),
        (everything, {}),
        ({**everything, "sync_bn": True}, {}),
        ({**everything, "sync_bn": True, "seed": 0}, {}),
        ({}, {}),
    ):
        b = record("b", off(1, 0.1), 2, settings=settings, shares=shares)
        seen.append(kind(record("a"), b)[0])
    assert seen == ["data", "model", "random numbers", "settings", "unknown"]


# --- reading runs -------------------------------------------------------------------------------


def left_behind(folder: Path, step: int = 2) -> Job:
    """A run folder of two ranks, as a training leaves it."""
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    train: dict[str, Any] = {"event": "train", "lr": 0.1, "images_per_second": 2.0}
    events = [
        train | {"step": number, "loss": 1.0 / number, "samples": 4 * number}
        for number in range(1, step + 1)
    ]
    scores: dict[str, Any] = {"epoch": 0, "step": step, "samples": 4, "top1": 0.5, "loss": 3.0}
    events.append({"event": "eval"} | scores)
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (run / "config.yaml").write_text("seed: 3\ntopology: {nodes: 1, devices: 2}\n")
    model = {"bn._mean": np.ones(2), "bn.weight": np.ones(2), "bn._variance": np.zeros(2)}
    snapshot = Snapshot(model, {}, {"step": step})
    checkpoint.save(run / "checkpoints", snapshot, best=False, keep=1)
    for rank in range(2):
        line = {"event": "samples", "epoch": 0, "step": 1, "indices": [[rank], [rank + 2]]}
        text = json.dumps({**line, "crc32": [[5], [6]]})
        (run / "logs" / f"samples-rank-{rank}.jsonl").write_text(text + "\n")
    return Job(Setting("s", ()), folder, "this machine", [])


def test_a_run_is_read_as_it_was_left(tmp_path: Path) -> None:
    found = read_record(left_behind(tmp_path), "a")
    assert found.losses == {1: 1.0, 2: 0.5}
    assert found.rates == {1: 0.1, 2: 0.1}
    assert found.settings == {"seed": 3, "topology.nodes": 1, "topology.devices": 2}
    assert set(found.statistics) == {"bn._mean", "bn._variance"}
    assert found.statistics_step == 2
    shares = [(share.rank, share.indices) for share in found.shares[1]]
    assert shares == [(0, (0,)), (0, (2,)), (1, (1,)), (1, (3,))]


def test_samples_of_several_nodes_are_one_run(tmp_path: Path) -> None:
    left_behind(tmp_path)
    logs = tmp_path / "run-node1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run/logs/samples-rank-1.jsonl").rename(logs / "samples-rank-1.jsonl")
    shares = read_shares(sorted(tmp_path.glob("run*/logs/samples-rank-*.jsonl")))
    assert {share.rank for share in shares[1]} == {0, 1}


def test_flattening() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": {}}) == {"a.b.c": 1, "a.d": [2], "e": {}}


def test_layers_that_draw_random_numbers_are_found() -> None:
    class DropPath(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self, drop_prob: float) -> None:
            super().__init__()
            self.drop_prob = drop_prob

    class Model(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = paddle.nn.Linear(2, 2)
            self.head = paddle.nn.Sequential(paddle.nn.Dropout(0.2), paddle.nn.Dropout(0.0))
            self.path, self.none = DropPath(0.1), DropPath(0.0)

    assert random_layers(Model()) == ["head.0", "path"]


# --- pictures, lines and the command ------------------------------------------------------------


def test_a_picture_of_both_curves_is_made(tmp_path: Path) -> None:
    nan = {**LOSSES, 4: math.nan}
    for number, losses in enumerate((LOSSES, off(2, 1e-3), nan)):
        path = tmp_path / f"{number}.png"
        plot([compare(record("a"), record("b", losses), 1e-9)], path, "a title")
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (960, 720)
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()


def comparison(step: int | None = None) -> Comparison:
    return compare(record("1x1"), record("1x2", off(step, 0.1) if step else LOSSES, 2), 1e-9)


def test_a_line_has_steps_difference_and_verdict() -> None:
    same, other = (parity.line(comparison(step), 12) for step in (None, 3))
    assert "1x1 and 1x2" in same
    assert "4 steps  largest relative difference  0.0e+00  agree (tolerance 1e-09)" in same
    assert "9.1e-02  DIFFER from step 3" in other


def options(*arguments: str) -> Any:
    return parity.parse(arguments)


def test_both_sides_get_the_defaults_and_their_own() -> None:
    chosen = options("--a", "topology=1x1", "seed=4", "--b", "topology=1x4 dtype=float32")
    (a, b), rows = parity.chosen(chosen)
    assert (a.name, b.name, rows) == ("a", "b", [parity.Row("a", "b")])
    assert a.overrides[-2:] == ("seed=4", "topology=1x1")
    assert b.overrides[-3:] == ("seed=4", "topology=1x4", "dtype=float32")
    assert "dtype=float64" in a.overrides
    assert "max_steps=100" in a.overrides


def test_the_matrix_runs_each_setting_once() -> None:
    settings, rows = parity.chosen(options("--matrix"))
    names = [setting.name for setting in settings]
    assert sorted(names) == sorted(parity.SETTINGS)
    assert rows == list(parity.MATRIX)
    settings, rows = parity.chosen(options("--matrix", "--rows", "1x2"))
    assert [setting.name for setting in settings] == ["1x1", "1x2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --matrix, or how the sides differ"),
        (("--matrix", "--a", "seed=1"), "give --matrix, or"),
        (("--a", "seed=1", "--rows", "1x2"), "--rows is for --matrix"),
        (("--matrix", "--steps", "0"), "--steps and --at-once are at least 1"),
        (("--matrix", "--tolerance", "nan"), "--tolerance at least 0"),
        (("--matrix", "--steps", "many"), "invalid int value: 'many'"),
    ],
)
def test_a_mistake_on_the_command_line_is_told(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_row_is_told() -> None:
    with pytest.raises(SystemExit, match="--rows=1x9: the rows are 1x2, 1x3"):
        parity.chosen(options("--matrix", "--rows", "1x9"))


def test_a_wrong_override_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parity.main(["--a", "topology=1xx", "--b", "", "--output", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "error: a: topology=1xx is not one of" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_an_unknown_commit_is_told(tmp_path: Path) -> None:
    with (
        Runner(tmp_path, 1, say=lambda _: None) as runner,
        pytest.raises(UserError, match=r"commit no-such-commit: .*invalid reference"),
    ):
        runner.run([Setting("a", (), "no-such-commit")])


def test_a_failed_run_shows_the_end_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "console-0.log").write_text("x" * 9000 + "\nthe last words\n")
    failed = subprocess.Popen(["false"])
    failed.wait()
    job = Job(Setting("b", ()), tmp_path, "this machine", [failed])
    with pytest.raises(UserError, match=r"b ended with status 1:\nx+\nthe last words") as caught:
        job.check()
    assert len(str(caught.value)) < 3000
    assert "console-0.log" in caught.value.remedy


def test_what_runs_is_stopped_when_the_comparison_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    with Runner(tmp_path, 1) as runner:
        runner._jobs.append(Job(Setting("b", ()), tmp_path, "this machine", [process]))
    assert process.poll() is not None


# --- accuracy -----------------------------------------------------------------------------------


def test_means_over_seeds_decide() -> None:
    first = accuracy.Scores("one", [0.97, 0.98, 0.99], [0.1] * 3, [2.0] * 3)
    near = accuracy.Scores("two", [0.99, 0.98, 0.985], [0.2] * 3, [2.0, 2.0, 2.0 + 2e-6])
    assert accuracy.within(near, first, 0.01)
    assert not accuracy.within(near, first, 0.004)
    text = accuracy.line(near, first)
    assert "top-1 98.50% +- 0.50% (99.00%, 98.00%, 98.50%)  +0.50% of the first" in text
    assert "1.0e-06 away" in text


def test_each_seed_runs_each_setting() -> None:
    chosen = accuracy.parse(
        ["--setting", "topology=1x1", "--setting", "topology=1x2 sync_bn=true", "--seeds", "4", "5"]
    )
    settings = accuracy.settings_of(chosen)
    assert [each.name for each in settings] == ["0-seed-4", "1-seed-4", "0-seed-5", "1-seed-5"]
    assert settings[1].overrides[-3:] == ("topology=1x2", "sync_bn=true", "seed=4")


# --- documentation ------------------------------------------------------------------------------

PAGES = [Path(parity.__file__).parents[1] / name for name in ("README.md", "docs/topology.md")]


def documented(program: str) -> list[list[str]]:
    """The arguments of each command of a program in fenced blocks and in the program's own text."""
    texts = [page.read_text() for page in PAGES] + [parity.__doc__ or "", accuracy.__doc__ or ""]
    joined = "\n".join(texts).replace("\\\n", " ")
    lines = re.findall(rf"^ *python -m benchmarks\.{program} (.*)$", joined, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_the_documented_commands_are_understood() -> None:
    assert len(documented("parity")) >= 6
    assert documented("accuracy")
    for arguments in documented("parity"):
        settings, _ = parity.chosen(parity.parse(arguments))
        check_overrides(settings)
    for arguments in documented("accuracy"):
        check_overrides(accuracy.settings_of(accuracy.parse(arguments)))


def check_overrides(settings: list[Setting]) -> None:
    register_schema()
    for setting in settings:
        with initialize_config_dir(str(PAGES[0].parent / "conf"), version_base="1.3"):
            from_hydra(hydra_compose("config", overrides=list(setting.overrides)))
