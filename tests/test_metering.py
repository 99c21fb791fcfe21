"""Readings against an independent computation, and a loss that is not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.metering import Meter, NonFiniteLoss
from recipes.topology import Place

ALONE = Place(0, 1, 0, 0)
CLASSES = 5


@pytest.fixture(autouse=True)
def cpu() -> None:
    paddle.set_device("cpu")


def step(meter: Meter, number: int, loss: float, skipped: bool | None = None) -> None:
    """One optimizer step of one micro-batch with two samples, one of them right."""
    meter.add(
        paddle.to_tensor(loss), paddle.to_tensor([[0.0, 1.0], [1.0, 0.0]]), paddle.to_tensor([1, 1])
    )
    meter.finish_step(number, None if skipped is None else paddle.to_tensor([skipped]))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    intervals=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    accumulate=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "float64"]),
    scaler=st.booleans(),
)
def test_readings(
    seed: int, intervals: list[int], accumulate: int, dtype: str, scaler: bool
) -> None:
    rng = np.random.default_rng(seed)
    meter, number, skips = Meter(ALONE), 0, 0
    for steps in intervals:
        hits, count, loss = 0, 0, 0.0
        for _ in range(steps):
            loss, number = 0.0, number + 1
            for _ in range(accumulate):
                size = int(rng.integers(1, 6))
                logits = rng.normal(size=(size, CLASSES)).astype(dtype)
                labels = rng.integers(0, CLASSES, size)
                share = rng.normal(size=()).astype(dtype)
                network_output = paddle.to_tensor(logits, stop_gradient=False)
                meter.add(paddle.to_tensor(share), network_output, paddle.to_tensor(labels))
                loss += float(share)
                count += size
                hits += sum(
                    int(np.argmax(row)) == at for row, at in zip(logits, labels, strict=True)
                )
            skip = bool(rng.integers(0, 2))
            skips += skip and scaler
            meter.finish_step(number, paddle.to_tensor([skip]) if scaler else None)
        meter.check_finite()  # leaves the interval as it is
        reading = meter.read()
        assert reading.loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
        assert reading.top1 == hits / count
        assert reading.skipped_steps == skips


def test_an_interval_without_samples_has_no_hits() -> None:
    reading = Meter(ALONE).read()
    assert (reading.loss, reading.top1, reading.skipped_steps) == (0.0, 0.0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("check", ["read", "check_finite"])
def test_the_first_bad_step_is_named(bad: float, check: str) -> None:
    meter = Meter(ALONE)
    step(meter, 7, 0.5)
    step(meter, 8, bad)
    step(meter, 9, math.nan)
    step(meter, 10, 0.5)
    with pytest.raises(NonFiniteLoss, match=r"not finite at step 8 on rank 0; nothing") as caught:
        getattr(meter, check)()
    assert "resume=auto" in caught.value.remedy


def test_a_bad_part_among_good_ones_is_found() -> None:
    meter = Meter(ALONE)
    for share in (0.1, math.inf, 0.1):
        meter.add(paddle.to_tensor(share), paddle.zeros([1, 2]), paddle.to_tensor([0]))
    meter.finish_step(3, None)
    with pytest.raises(NonFiniteLoss, match="step 3"):
        meter.check_finite()


def test_reading_counts_a_skipped_step_and_goes_on() -> None:
    meter = Meter(ALONE)
    step(meter, 1, 0.5, skipped=True)
    step(meter, 2, 0.25, skipped=False)
    step(meter, 3, 0.125, skipped=True)
    assert meter.read().skipped_steps == 2
    step(meter, 4, 0.5, skipped=False)
    assert meter.read().skipped_steps == 2  # so far, not in the interval


def test_nothing_waits_for_the_device_before_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(ALONE)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was read from the device")

    with monkeypatch.context() as patch:
        for name in ("numpy", "item", "tolist", "__bool__", "__float__", "__int__"):
            patch.setattr(paddle.Tensor, name, refuse)
        step(meter, 1, 0.5, skipped=True)
    assert meter.read().loss == 0.5


def on_rank(place: Place) -> dict[str, Any]:
    """One rank's part of `test_three_ranks`."""
    meter = Meter(place)
    logits = paddle.to_tensor([[0.0, 1.0]] * (1 + place.rank))
    meter.add(
        paddle.to_tensor(0.25 * (1 + place.rank)), logits, paddle.to_tensor([1] * (1 + place.rank))
    )
    if place.rank == 0:  # its share is a part more, and wrong
        meter.add(paddle.to_tensor(0.25), logits, paddle.to_tensor([0]))
    meter.finish_step(1, None)
    meter.check_finite()
    reading = meter.read()
    found: dict[str, Any] = {"reading": [reading.loss, reading.top1]}
    for name, first_bad in {"one": {1: 4}, "earlier": {0: 5, 1: 3}, "both": {0: 6, 1: 6}}.items():
        meter = Meter(place)
        for number in range(1, 8):
            step(meter, number, math.nan if number >= first_bad.get(place.rank, 99) else 0.5)
        try:
            meter.check_finite() if name == "one" else meter.read()
        except NonFiniteLoss as error:
            found[name] = error.message
    return found


@pytest.mark.launch
def test_three_ranks(three_ranks: dict[str, list[Any]]) -> None:
    for found in three_ranks["test_metering:on_rank"]:
        assert found["reading"] == [1.75, 6 / 7]
        assert "step 4 on rank 1;" in found["one"]
        assert "step 3 on rank 1;" in found["earlier"]
        assert "step 6 on rank 0, 1;" in found["both"]


@settings(max_examples=30, deadline=None)
@given(rights=st.lists(st.integers(0, 2), min_size=2, max_size=8), data=st.data())
def test_a_continued_interval_is_read_as_if_it_had_not_been_interrupted(
    rights: list[int], data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(rights)))

    def play(meter: Meter, steps: range) -> None:
        for number in steps:
            labels = [1] * rights[number] + [0] * (2 - rights[number])
            logits = paddle.to_tensor([[0.0, 1.0], [0.0, 1.0]])
            meter.add(paddle.to_tensor(0.5), logits, paddle.to_tensor(labels))
            meter.finish_step(number + 1, None)

    whole, first = Meter(ALONE), Meter(ALONE)
    play(whole, range(len(rights)))
    play(first, range(stop))
    assert first.since_event() == (sum(rights[:stop]), 2 * stop)
    second = Meter(ALONE, first.since_event())
    play(second, range(stop, len(rights)))
    expected = whole.read()
    assert expected.top1 == sum(rights) / (2 * len(rights))
    assert second.read().top1 == expected.top1
