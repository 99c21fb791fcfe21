"""The clocks of a training: speed and waiting, against a clock that the test moves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import config, distributed, telemetry, trainer
from recipes.config import BenchmarkConfig, Config, LogConfig, TaskConfig
from recipes.data import Plan
from recipes.data.loader import Batch, train_loader
from recipes.data.transfer import on_device
from recipes.evaluation import Scores
from recipes.metering import Meter, Reading
from recipes.position import Position
from recipes.progress import NoDisplay
from recipes.pulse import NoPulse
from recipes.recorder import Recorder
from recipes.topology import Place

ROOT = Path(__file__).parent.parent
BATCH = 4  # samples
RANK_1 = Place(rank=1, world_size=2, local_rank=1, node=0)  # which writes nothing


class NoMeter(Meter):
    """Reads nothing."""

    def __init__(self) -> None:
        pass

    def read(self) -> Reading:
        return Reading(0.0, 0.0, 0)


class Clock:
    """Stands still but for `pass_time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def a_batch(step: int, part: int) -> Batch:
    empty = np.zeros(BATCH, np.int64)
    return Batch(np.zeros((BATCH, 1, 1, 3), np.uint8), empty, empty, empty, step, part, BATCH)


def play(
    made: Config,
    size: int,
    waits: list[float],
    works: list[float],
    between: float,
    begin: Position | None = None,
) -> list[dict[str, Any]]:
    """The events of a training whose micro-batches take these times, over and over.

    Args:
        size: samples of an epoch.
        waits: seconds until a micro-batch is there.
        works: seconds of computing with it.
        between: seconds of evaluation and saving between two epochs.
        begin: where the training goes on.
    """
    events: list[dict[str, Any]] = []
    clock = Clock()
    plan = Plan(size, BATCH, 0, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.now)
        recorder = Recorder(
            made,
            telemetry.RunFolder(Path("nowhere")),
            RANK_1,
            plan,
            begin or Position(),
            NoDisplay(),
            NoPulse(),
        )
        patch.setattr(recorder, "_write", events.append)

        def loader() -> Iterator[Batch]:
            for step in range(recorder.position.step_in_epoch, plan.steps_per_epoch):
                for part in range(made.accumulate):
                    number = (recorder.position.step * made.accumulate + part) % len(waits)
                    clock.pass_time(waits[number])
                    yield a_batch(step, part)

        while not recorder.done:
            recorder.go_on()
            for batch, _, _ in recorder.waiting(on_device(loader())):
                number = recorder.position.step * made.accumulate + batch.part
                clock.pass_time(works[number % len(works)])
                if batch.part < made.accumulate - 1:
                    continue
                recorder.finish_step(recorder.position.epoch, batch, 0.1, NoMeter())
                if recorder.done:
                    break
            recorder.pause()
            clock.pass_time(between)
    return events


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"epochs": 1}, "epochs=1 ends with step 2, and step 4 is done"),
        ({"epochs": 9, "max_steps": 3}, "max_steps=3 ends with step 3, and step 4 is done"),
    ],
)
def test_a_run_that_has_come_further_than_it_is_to_go_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: dict[str, int], said: str
) -> None:
    made = Config(global_batch_size=BATCH, **limits)  # type: ignore[arg-type]
    plan = Plan(2 * BATCH, BATCH, 0, 0, 1)
    begun = Position(step=4, epoch=2)
    alone = Place(rank=0, world_size=1, local_rank=0, node=0)
    with caplog.at_level("INFO", "recipes"):
        run = telemetry.RunFolder(tmp_path / "run")
        recorder = Recorder(made, run, alone, plan, begun, NoDisplay(), NoPulse())
    recorder.result()
    assert recorder.done
    assert said in caplog.text


def test_of_equal_top1_the_lower_loss_is_the_best() -> None:
    made = Config(global_batch_size=BATCH, log=LogConfig(every=100))
    run = telemetry.RunFolder(Path("nowhere"))
    plan = Plan(BATCH, BATCH, 0, 0, 1)
    recorder = Recorder(made, run, RANK_1, plan, Position(), NoDisplay(), NoPulse())
    scores = [(0.5, 2.0), (0.5, 1.0), (0.5, 1.0), (0.5, 1.5), (0.4, 0.1), (0.6, 9.0)]
    found = [recorder.evaluated(Scores(top1, None, loss, 9)) for top1, loss in scores]
    assert found == [True, True, False, False, False, True]
    assert recorder.position.best is not None
    assert recorder.position.best["loss"] == 9.0


@settings(max_examples=100, deadline=None)
@given(
    waits=st.lists(st.floats(0, 9), min_size=1, max_size=7),
    works=st.lists(st.floats(0.001, 9), min_size=1, max_size=5),
    every=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    steps_per_epoch=st.integers(1, 7),
    between=st.floats(0, 100),
)
def test_speed_and_waiting_are_those_of_the_interval(
    waits: list[float],
    works: list[float],
    every: int,
    accumulate: int,
    steps_per_epoch: int,
    between: float,
) -> None:
    steps = 12
    made = Config(
        log=LogConfig(every=every),
        accumulate=accumulate,
        epochs=steps,
        max_steps=steps,
        batch_size=2,
    )
    events = play(made, steps_per_epoch * BATCH, waits, works, between)
    due = {*range(every, steps + 1, every), *range(steps_per_epoch, steps + 1, steps_per_epoch)}
    assert [event["step"] for event in events] == sorted(due | {steps})
    before = 0
    for event in events:
        parts = range(before * accumulate, event["step"] * accumulate)
        waited = sum(waits[part % len(waits)] for part in parts)
        whole = waited + sum(works[part % len(works)] for part in parts)
        taken = event["step"] - before
        before = event["step"]
        assert event["images_per_second"] == pytest.approx(taken * BATCH / whole)
        assert event["data_wait"] == pytest.approx(waited / whole, abs=1e-9)


@pytest.mark.parametrize("begins_after", [0, 4, 9, 11])
def test_the_last_step_of_an_epoch_and_of_the_run_is_recorded(begins_after: int) -> None:
    made = Config(log=LogConfig(every=20), epochs=3, max_steps=13, batch_size=4)
    begin = Position(begins_after, begins_after // 9, begins_after % 9)
    events = play(made, 9 * BATCH, [0.0], [1.0], 0.0, begin)
    assert [event["step"] for event in events] == [step for step in (9, 13) if step > begins_after]
    assert [event["epoch"] for event in events] == [0, 1][-len(events) :]


@settings(max_examples=50, deadline=None)
@given(
    warmup=st.integers(0, 9),
    steps=st.integers(1, 4),
    repeats=st.integers(1, 4),
    steps_per_epoch=st.integers(1, 7),
)
def test_a_benchmark_has_an_event_for_the_warm_up_and_for_each_repetition(
    warmup: int, steps: int, repeats: int, steps_per_epoch: int
) -> None:
    made = config.with_measured_steps(
        Config(
            task=TaskConfig("benchmark"),
            benchmark=BenchmarkConfig(warmup=warmup, steps=steps, repeats=repeats),
        )
    )
    works = [1.0 + number for number in range(60)]
    events = play(made, steps_per_epoch * BATCH, [0.0], works, 5.0)
    measured = [event for event in events if event["step"] > warmup]
    ends = [warmup + steps * (number + 1) for number in range(repeats)]
    assert [event["step"] for event in measured] == ends
    assert [event["images_per_second"] for event in measured] == pytest.approx(
        [steps * BATCH / sum(works[end - steps : end]) for end in ends]
    )
    # The warm-up ends with an event, so that nothing of it is in the first repetition.
    assert warmup == 0 or warmup in [event["step"] for event in events]


def test_a_benchmark_neither_evaluates_nor_saves() -> None:
    asked = BenchmarkConfig(warmup=1, steps=2, repeats=2)
    for name, due in (("benchmark", False), ("train", True)):
        made = Config(task=TaskConfig(name), benchmark=asked, max_steps=5)
        recorder = Recorder(
            config.with_measured_steps(made),
            telemetry.RunFolder(Path("nowhere")),
            RANK_1,
            Plan(20, BATCH, 0, 0, 1),
            Position(step=5, epoch=1),
            NoDisplay(),
            NoPulse(),
        )
        assert recorder.done
        assert (recorder.save_due, recorder.evaluation_due) == (due, due)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_waiting_for_a_slow_loader_is_measured(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole loop, with a loader that takes 40 ms for each micro-batch."""
    delay, steps = 0.04, 6

    def slow(*given: Any) -> Iterator[Batch]:
        for batch in train_loader(*given):
            time.sleep(delay)
            yield batch

    monkeypatch.setattr(trainer, "train_loader", slow)
    config.register_schema()
    overrides = [
        *("model=paddleclas", "model.name=MobileNetV1_x0_25", "dataset=digits", "device=cpu"),
        *("batch_size=null", "global_batch_size=12", f"accumulate={accumulate}", "log.every=3"),
        *(f"max_steps={steps}", f"hydra.run.dir={tmp_path}"),
    ]
    made, folder = config.compose(ROOT / "conf", overrides)
    made = dataclasses.replace(made, eval_batch_size=360)
    run, alone = telemetry.RunFolder(folder), Place(0, 1, 0, 0)
    distributed.start(made, alone)
    trainer.train(made, run, alone, NoDisplay(), NoPulse())
    events = [each for each in telemetry.read_metrics(run.metrics) if each["event"] == "train"]
    assert [event["step"] for event in events] == [3, 6]
    for event in events:
        seconds = 3 * 12 / event["images_per_second"]
        slept = 3 * accumulate * delay
        # What else the loader does takes well under a millisecond here.
        assert slept <= event["data_wait"] * seconds <= slept * 1.25
