"""`make bench` puts rows together, and keeps what it has where one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench, table
from benchmarks.table import Row
from recipes.config import UserError


def row(ratio: float) -> Row:
    return Row("speed", "peer", "2x or more", 2.0, "higher", "images/s", [ratio], [1.0])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> Row:
        raise UserError("DALI is not there", "make bench")

    rows = {"good": lambda _: row(3.0), "slow": lambda _: row(1.0), "broken": fail}
    monkeypatch.setattr(bench, "ROWS", rows)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("chosen", "status", "kept"),
    [(["good"], 0, 1), (["good", "slow"], 1, 2), (["broken", "slow"], 2, 1), (["broken"], 2, 0)],
)
def test_what_was_measured_is_written_and_the_status_says_the_rest(
    chosen: list[str],
    status: int,
    kept: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["--rows", *chosen, "--output", str(tmp_path)]) == status
    told = capsys.readouterr()
    assert ("DALI is not there" in told.err) == ("broken" in chosen)
    written = [json.loads(path.read_text())["rows"] for path in tmp_path.glob("*.json")]
    assert [len(rows) for rows in written] == ([kept] if kept else [])
    assert told.out.count("met") + told.out.count("missed") == kept
    assert kept == 0 or table.HEADINGS[0] in told.out
