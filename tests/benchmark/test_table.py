"""The table of `make bench`."""

from __future__ import annotations

import json
import math
import socket
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import table
from benchmarks.table import Row

SAMPLES = st.lists(st.floats(0.1, 1e5), min_size=1, max_size=7)


def a_row(
    ours: list[float],
    peer: list[float],
    limit: float = 1.0,
    better: Literal["higher", "lower"] = "higher",
    **rest: Any,
) -> Row:
    return Row(
        "a thing", "another", "at least as much", limit, better, "images/s", ours, peer, **rest
    )


@given(ours=SAMPLES, peer=SAMPLES, limit=st.floats(0.01, 100))
def test_the_ratio_of_medians_decides(ours: list[float], peer: list[float], limit: float) -> None:
    ratio = median(ours) / median(peer)
    assert a_row(ours, peer).ratio == ratio
    assert a_row(ours, peer, limit).met == (ratio >= limit)
    assert a_row(ours, peer, limit, "lower").met == (ratio <= limit)


@given(ours=st.lists(st.floats(1, 10), min_size=1, max_size=7), drift=st.floats(1.1, 3))
def test_in_pairs_a_drift_of_the_machine_cancels(ours: list[float], drift: float) -> None:
    slower = [value * drift**i for i, value in enumerate(ours)]
    peer = [value / 2 for value in slower]
    assert a_row(slower, peer, paired=True).ratio == pytest.approx(2)


def test_a_ratio_that_is_no_number_meets_nothing() -> None:
    choices: tuple[Literal["higher", "lower"], ...] = ("higher", "lower")
    for better in choices:
        assert not a_row([math.nan], [1.0], 1.0, better).met


@pytest.mark.parametrize(
    ("ours", "peer", "paired"), [([], [1.0], False), ([1.0], [], False), ([1.0], [1.0, 2.0], True)]
)
def test_samples_must_be_there(ours: list[float], peer: list[float], paired: bool) -> None:
    with pytest.raises(ValueError, match="a thing"):
        a_row(ours, peer, paired=paired)


ROWS = [
    a_row([4000.0, 4200.0, 3900.0], [100.0], 40.0, note="on one core"),
    a_row([1.02], [1.0, 1.01, 1.0], 1.01, "lower"),
]


def test_the_table_has_measured_values_and_verdicts() -> None:
    header, rule, first, second, note = table.text(ROWS).splitlines()
    assert header.split() == list(table.HEADINGS)
    assert set(rule) == {"-"}
    assert "4,000 (3,900 to 4,200)" in first
    assert "  40  " in first
    assert first.endswith("met")
    assert "1.020" in second
    assert second.endswith("missed")
    assert note == "a thing: on one core"
    # Columns begin at the same place.
    for heading in ("against", "ratio", "verdict"):
        assert first[header.index(heading) - 1] == second[header.index(heading) - 1] == " "


def test_the_files_hold_the_samples_and_the_machine(tmp_path: Path) -> None:
    day = date(2026, 1, 2)
    data, page = table.write(ROWS, tmp_path, day)
    assert (data.name, page.name) == ("bench-2026-01-02.json", "bench-2026-01-02.md")
    content = json.loads(data.read_text())
    assert content["schema"] == 1
    assert [row["ours"] for row in content["rows"]] == [row.ours for row in ROWS]
    assert [row["verdict"] for row in content["rows"]] == ["met", "missed"]
    assert content["rows"][0]["ratio"] == 40.0
    assert content["machine"]["cores"] > 0
    assert len(content["code"]["commit"]) == 40
    text = page.read_text()
    assert content["machine"]["cpu"] in text
    assert "| a thing | another | 4,000 (3,900 to 4,200) | 100 |" in text
    assert "- a thing: on one core" in text
    assert socket.gethostname() not in text + data.read_text()
    assert str(tmp_path) not in text + data.read_text()


def test_a_bar_in_a_cell_stays_in_its_cell() -> None:
    assert "| a \\| b | c |" in table.markdown([["x", "y"], ["a | b", "c"]])
