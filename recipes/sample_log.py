"""Which samples a rank has trained on, step by step: ``log.samples=true``."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.loader import Batch
from recipes.telemetry import MetricsLog


class SampleLog:
    """``logs/samples-rank-K.jsonl``: one JSON object per optimizer step.

    ``{"event": "samples", "epoch": 0, "step": 1, "indices": [[17, 4], [9, 8]], "crc32": …}``:
    ``step`` counts optimizer steps from 1 as in ``metrics.jsonl``, ``indices`` and ``crc32`` hold a
    list per micro-batch, and ``crc32`` is the checksum of a sample's pixels and label as the model
    gets them, so that two runs can also be compared in their augmentation.

    Args:
        path: the rank's file.
        step: where the training goes on; what was logged after it is superseded.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._log = MetricsLog(path)
        self._log.rewind(step)
        self._step: dict[str, Any] = {}

    def add(self, epoch: int, step: int, batch: Batch) -> None:
        """Note a micro-batch; the step is written once the next one begins, or on closing."""
        if self._step.get("step") != step:
            self._write()
            self._step = {
                **{"event": "samples", "epoch": epoch, "step": step},
                **{"indices": [], "crc32": []},
            }
        self._step["indices"].append(batch.indices.tolist())
        self._step["crc32"].append(checksums(batch))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._write()
        self._log.close()

    def _write(self) -> None:
        if self._step:
            self._log.append(self._step)
        self._step = {}


def checksums(batch: Batch) -> list[int]:
    """CRC-32 of each sample: its pixels in order, then its label as an int64."""
    return [
        zlib.crc32(label.tobytes(), zlib.crc32(image.tobytes()))
        for image, label in zip(np.asarray(batch.images), batch.labels, strict=True)
    ]
