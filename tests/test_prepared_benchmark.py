"""`benchmarks.prepared`: what it prepares is what it says, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prepared
from benchmarks.loaders import Measuring, prepared_folder
from benchmarks.pictures import make_photographs
from benchmarks.table import Row
from recipes.config import DatasetConfig, UserError
from recipes.data import build


def test_the_sides_are_prepared_of_the_photographs(tmp_path: Path) -> None:
    make_photographs(tmp_path, 20)
    for name in prepared.SIDES:
        for _ in range(2):  # the second time finds it done
            prepared.make_prepared(tmp_path, name)
        path = str(prepared_folder(tmp_path, name))
        dataset = build(DatasetConfig(name="imagenet", path=path, image_size=224), "train", 0)
        assert len(dataset) == 20
        assert len(dataset.classes) == 10


def test_sizes_are_those_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photographs(tmp_path, 10)
    monkeypatch.setattr(prepared, "SIZES", (prepared.SIZES[0], prepared.SIZES[-1]))
    small, raw = prepared.measure_sizes(tmp_path)
    assert raw.stored_bytes == pytest.approx(320 * 427 * 3, rel=0.02)
    assert small.stored_bytes < small.source_bytes < raw.stored_bytes
    text = prepared.render_sizes([small, raw])
    assert "| 256 | jpeg 90 |" in text
    assert "| 320 | raw |" in text


def test_dali_has_to_be_there(tmp_path: Path) -> None:
    measuring = Measuring(tmp_path, photographs=1, dali=tmp_path / "none")
    with pytest.raises(UserError, match="NVIDIA DALI is not there"):
        prepared.prepared_row(measuring)
    assert list(tmp_path.iterdir()) == []


def test_the_row_compares_the_default_settings_with_dali(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"prepared": [5.0], "photographs": [3.0], "prepared raw": [9.0], "DALI": [2.0]}
    monkeypatch.setattr(prepared, "measure", lambda names, *_: {n: rates[n] for n in names})
    monkeypatch.setattr(prepared, "check_dali", lambda _: None)
    row: Row = prepared.prepared_row(Measuring(tmp_path, photographs=10))
    assert (row.ratio, row.met) == (2.5, True)
    assert "320 pixels, quality 90" in row.name
    assert row.note == "ours, raw 256 pixels: 9, 4.5x; ours, the files: 3, 1.5x"
