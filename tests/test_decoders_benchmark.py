"""`benchmarks.decoders`: every side decodes, and all are in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import decoders


def test_the_table_has_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--folder", str(tmp_path), "--photographs", "12", "--repetitions", "1"]
    assert decoders.main([*options, "--counts", "1", "2", "--seconds", "0.05"]) == 0
    headings, _, *rows = capsys.readouterr().out.splitlines()
    assert headings.count("threads") == headings.count("processes") == 2
    for row, count in zip(rows, (1, 2), strict=True):
        first, *rates = [cell.strip() for cell in row.strip("|").split("|")]
        assert first == str(count)
        assert len(rates) == 4
        assert all(float(re.sub(",", "", rate)) > 0 for rate in rates)


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8])]
)
def test_counts_are_powers_of_two(cores: int, counts: list[int]) -> None:
    assert decoders.powers(cores) == counts
