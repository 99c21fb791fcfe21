"""The instrumented loop does the same work as the trainer, and its parts add up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import config, distributed, telemetry, trainer
from recipes.benchmark import split
from recipes.benchmark.record import PHASES, TOLERANCE
from recipes.config import Config
from recipes.progress import NoDisplay
from recipes.pulse import NoPulse
from recipes.topology import Place

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
ALONE = Place(0, 1, 0, 0)
STEPS = 5  # of three an epoch
# Drops out, has batch-norm and runs over the end of an epoch.
SMALL = (
    *("model=paddleclas", "model.name=MobileNetV3_small_x0_35", "device=cpu", "dataset=synthetic"),
    *("dataset.num_classes=10", "dataset.train_size=36", "dataset.eval_size=4", "epochs=9"),
    *("dataset.image_size=32", "batch_size=null", "global_batch_size=12", "log.every=1"),
    *("optimizer.base_lr=0.5", f"max_steps={STEPS}", "label_smoothing=0.1", "save.keep=1"),
)


def composed(folder: Path, *overrides: str) -> tuple[Config, telemetry.RunFolder]:
    config.register_schema()
    made, path = config.compose(
        ROOT / "conf", [*SMALL, *overrides, f"hydra.run.dir={folder / 'run'}"]
    )
    return made, telemetry.RunFolder(path)


def trained_and_instrumented(
    made: Config, run: telemetry.RunFolder, place: Place
) -> tuple[list[float], split.Timings]:
    trainer.train(made, run, place, NoDisplay(), NoPulse())
    losses = [e["loss"] for e in telemetry.read_metrics(run.metrics) if e["event"] == "train"]
    return losses, split.instrumented(made, place, NoPulse(), 1, STEPS - 1)


@pytest.mark.parametrize("overrides", [(), ("accumulate=2", "optimizer=adamw")])
def test_the_instrumented_loop_trains_as_the_trainer_does(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    made, run = composed(tmp_path, *overrides)
    distributed.start(made, ALONE)
    losses, timings = trained_and_instrumented(made, run, ALONE)
    assert len(losses) == STEPS
    assert timings.losses == losses
    assert timings.steps.shape == (STEPS - 1, len(PHASES) + 1)
    assert timings.local_backward.shape == (0,)
    parts, whole = timings.steps[:, :-1].sum(axis=1), timings.steps[:, -1]
    assert (parts <= whole).all()
    np.testing.assert_allclose(parts, whole, rtol=TOLERANCE)
    assert (timings.steps[:, PHASES.index("communication")] == 0).all()  # not known yet
    for phase in ("data_wait", "input", "forward", "backward", "optimizer", "rest"):
        assert (timings.steps[:, PHASES.index(phase)] > 0).all()


def on_rank(place: Place) -> dict[str, Any]:
    """One rank's part of `test_on_three_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        made, run = composed(
            Path(folder), "topology.devices=3", "accumulate=2", "benchmark.split_steps=3"
        )
        losses, timings = trained_and_instrumented(made, run, place)
        found = split.measure(made, place, NoPulse())
    return {
        "losses": losses,
        "again": timings.losses,
        "local_backward": timings.local_backward.tolist(),
        "split": asdict(found),
    }


@pytest.mark.launch
def test_on_three_ranks(three_ranks: dict[str, list[Any]]) -> None:
    """What is measured between the steps, each rank's own backward pass, changes nothing."""
    found = three_ranks["benchmark.test_split:on_rank"]
    losses = found[0]["losses"]
    assert len(losses) == STEPS
    for rank, each in enumerate(found):
        assert rank == 0 or each["losses"] == []  # it writes nothing
        # Three numbers can be added in another order; another training would be further off.
        assert each["again"] == pytest.approx(losses, rel=1e-14)
        assert len(each["local_backward"]) == STEPS - 1
        assert min(each["local_backward"]) > 0
        split_of_all = each["split"]
        assert np.shape(split_of_all["steps"]) == (3, 3, len(PHASES) + 1)
        assert np.shape(split_of_all["local_backward"]) == (3, 3)
        assert split_of_all == found[0]["split"]
        parts = split_of_all["phases"].values()
        assert sum(parts) == pytest.approx(split_of_all["step"], rel=TOLERANCE)
        assert min(parts) >= 0


# --- split_of

SECONDS = st.floats(1e-6, 10)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), steps=st.integers(1, 9))
def test_the_parts_are_means_over_the_middle_half(
    data: st.DataObject, ranks: int, steps: int
) -> None:
    shape = (ranks, steps, len(PHASES))
    numbers = data.draw(st.integers(0, 2**32))
    parts = np.random.default_rng(numbers).exponential(size=shape)
    parts[..., PHASES.index("communication")] = 0
    whole = parts.sum(axis=-1, keepdims=True)
    accumulate = data.draw(st.integers(1, 3))
    count = steps if ranks > 1 else 0
    local = np.random.default_rng(numbers + 1).exponential(size=(ranks, count)) / 2 / accumulate
    found = split.split_of(np.concatenate([parts, whole], axis=-1), local, accumulate)

    # As a person would work it out.
    means: dict[str, list[float]] = {name: [] for name in (*PHASES, "step")}
    for rank in range(ranks):
        order = sorted(range(steps), key=lambda step: whole[rank, step, 0])
        kept = order[steps // 4 : steps - steps // 4]
        own = {
            name: sum(parts[rank, step, number] for step in kept) / len(kept)
            for number, name in enumerate(PHASES)
        }
        if ranks > 1:
            alone = sorted(local[rank])[steps // 4 : steps - steps // 4]
            synced = own["backward"]
            own["communication"] = max(0.0, synced - accumulate * sum(alone) / len(alone))
            own["backward"] = synced - own["communication"]
        own["step"] = sum(own.values())
        for name, value in own.items():
            means[name].append(value)
    assert tuple(found.phases) == PHASES
    for name in PHASES:
        assert found.phases[name] == pytest.approx(sum(means[name]) / ranks)
    assert found.step == pytest.approx(sum(means["step"]) / ranks)
    assert sum(found.phases.values()) == pytest.approx(found.step)


def test_a_pause_in_one_step_is_nobodys_part() -> None:
    steps = np.full((1, 8, len(PHASES) + 1), 1.0)
    steps[..., -1] = len(PHASES)
    steps[0, 3, PHASES.index("optimizer")] += 100
    steps[0, 3, -1] += 100
    assert set(split.split_of(steps, np.zeros((1, 0)), 1).phases.values()) == {1.0}


def test_averaging_that_hides_completely_costs_nothing() -> None:
    steps = np.full((2, 4, len(PHASES) + 1), 1.0)
    found = split.split_of(steps, np.full((2, 4), 1.25), 1)
    assert found.phases["communication"] == 0
    assert found.phases["backward"] == 1


def test_a_lap_waits_for_a_gpu_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr("paddle.device.synchronize", lambda: waits.append(1))
    for gpu in (False, True):
        clock = split.Stopwatch(gpu)
        clock.begin()
        clock.lap("forward")
        clock.lap("rest")
        assert len(waits) == (3 if gpu else 0)
        assert clock.seconds()[PHASES.index("forward")] > 0


# --- a GPU

ON_GPU = """
import sys
from pathlib import Path
from benchmark.test_split import ALONE, composed, trained_and_instrumented
from recipes import distributed
made, run = composed(Path(sys.argv[1]), "device=gpu", "deterministic=true")
distributed.start(made, ALONE)
losses, timings = trained_and_instrumented(made, run, ALONE)
assert timings.losses == losses, (timings.losses, losses)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU and a GPU build of Paddle")
def test_on_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_GPU, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
