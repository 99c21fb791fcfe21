"""What each rank notes of the samples it has trained on."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.config import UserError
from recipes.data.loader import Batch
from recipes.sample_log import SampleLog, checksums


def batch(*indices: int, label: int = 3) -> Batch:
    images = np.array(indices, np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8)
    numbers = np.array(indices, np.int64)
    return Batch(images, np.full(len(indices), label, np.int64), numbers, numbers, 0, 0, 8)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_a_line_with_a_list_per_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "samples-rank-0.jsonl"
    log = SampleLog(path, 0)
    log.add(0, 1, batch(5, 2))
    log.add(0, 1, batch(7))
    log.add(1, 2, batch(9))
    log.close()
    first, second = lines(path)
    assert first.pop("time") > 0
    assert first == {
        **{"event": "samples", "epoch": 0, "step": 1, "indices": [[5, 2], [7]]},
        "crc32": [checksums(batch(5, 2)), checksums(batch(7))],
    }
    assert (second["epoch"], second["step"], second["indices"]) == (1, 2, [[9]])


def test_a_checksum_is_of_pixels_and_label() -> None:
    (one,) = checksums(batch(5))
    assert one == zlib.crc32(bytes([5] * 12) + (3).to_bytes(8, "little"))
    assert checksums(batch(5, label=4)) != [one]
    assert checksums(batch(6)) != [one]


def test_a_continued_run_lists_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "samples-rank-1.jsonl"
    log = SampleLog(path, 0)
    for step in (1, 2, 3):
        log.add(0, step, batch(step))
    log.close()
    log = SampleLog(path, 1)  # the checkpoint was after step 1
    log.add(0, 2, batch(2))
    log.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    log = SampleLog(tmp_path / "logs" / "samples-rank-0.jsonl", 0)
    log.add(0, 1, batch(1))
    with pytest.raises(UserError, match=r"samples-rank-0\.jsonl cannot be written"):
        log.close()
