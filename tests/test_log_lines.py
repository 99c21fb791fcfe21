"""The lines of events: what they tell, and that none is longer than a terminal is wide."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.log_lines import WIDTH, eval_line, train_line

TRAINED = {"epoch": 0, "loss": 2.3026, "top1": 0.5, "lr": 0.05, "data_wait": 0.03}
SCORED = {"epoch": 0, "step": 115, "top1": 0.9, "top5": 0.99, "loss": 0.25, "samples": 360}


def trained(step: int, **changes: Any) -> dict[str, Any]:
    return {**TRAINED, "step": step, "images_per_second": 612.4, **changes}


def number(pattern: str, line: str) -> float:
    match = re.search(pattern, line)
    assert match, line
    return float(match[1].replace(",", ""))


@given(
    st.integers(1, 115),
    st.floats(1e-6, 99),
    st.floats(1e-7, 10),
    st.floats(0, 9_999),
    st.floats(0, 99_999),
)
def test_the_train_line_tells_the_event(
    step: int, loss: float, lr: float, speed: float, left: float
) -> None:
    event = trained(step, epoch=1, loss=loss, lr=lr, images_per_second=speed)
    line = train_line(event, epochs=5, steps=115, seconds_left=left)
    assert line.startswith("epoch 2/5 step ")
    assert number(r"step +(\d+)\b", line) == step
    assert number(r"loss (\S+)", line) == pytest.approx(loss, abs=5.1e-4)
    assert number(r"lr (\S+)", line) == pytest.approx(lr, rel=5.1e-2)
    assert number(r"(\S+) img/s", line) == pytest.approx(speed, abs=0.51)
    assert len(line) <= WIDTH


@given(
    step=st.integers(1, 2_000_000),
    epochs=st.integers(1, 999),
    loss=st.floats(0, 999) | st.just(math.nan),
    lr=st.floats(1e-9, 99),
    speed=st.floats(0, 500_000),
    share=st.floats(0, 1),
    left=st.floats(0, 3_000_000) | st.none() | st.just(math.inf),
)
def test_no_line_is_longer_than_a_terminal(
    step: int, epochs: int, loss: float, lr: float, speed: float, share: float, left: float | None
) -> None:
    event = trained(step, epoch=epochs - 1, loss=loss, lr=lr, images_per_second=speed, top1=share)
    for known in (epochs, None):
        line = train_line(event, epochs=known, steps=2_000_000, seconds_left=left)
        assert len(line) <= WIDTH
        assert " img/s" in line
        assert " lr " in line
    scored = {**SCORED, "epoch": epochs - 1, "step": step, "top1": share, "top5": 1.0}
    scored |= {"loss": loss, "samples": 50_000}
    assert len(eval_line(scored, epochs=epochs)) <= WIDTH


def test_columns_stay_in_place() -> None:
    lines = [
        train_line(trained(step, lr=lr), epochs=5, steps=115, seconds_left=41)
        for step, lr in ((7, 0.05), (115, 1.2e-05))
    ]
    assert len({line.index("img/s") for line in lines}) == 1


def test_what_there_is_room_for_is_told() -> None:
    line = train_line(trained(7), steps=115, seconds_left=41.2)
    assert line.startswith("step   7/115 loss 2.303 lr 0.05 ")
    assert line.endswith("top1 50.0%")
    assert train_line(trained(7, top1=None), seconds_left=41.2).endswith("left 0:41")


def test_the_eval_line_tells_the_event() -> None:
    line = eval_line({**SCORED, "epoch": 4}, epochs=5)
    assert line == "epoch 5/5 eval loss 0.250 top1 90.00% top5 99.00% of 360"
    assert eval_line(SCORED) == "epoch 1 step 115 eval loss 0.250 top1 90.00% top5 99.00%"
    without = {key: value for key, value in SCORED.items() if key != "top5"}
    assert eval_line(without, epochs=5) == "epoch 1/5 step 115 eval loss 0.250 top1 90.00% of 360"
