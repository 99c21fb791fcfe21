"""Batches read sample by sample in the rank's process: `loader=paddle` without worker processes.

Paddle's own loader would do so in the thread that trains, which nothing could call back from a read
that does not return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from recipes.data.base import Arrays, ImageDataset, Stream, stack
from recipes.data.in_hand import Patience, Source
from recipes.data.photographs import PhotoDataset
from recipes.data.reading_threads import ReadingThreads
from recipes.data.sampler import SampleKey


class InOneThread(Stream):
    """Reads nothing ahead.

    Args:
        dataset: read sample by sample.
        keys: the samples of each batch.
        deadline: seconds for one image.
    """

    def __init__(
        self, dataset: ImageDataset, keys: Iterable[list[SampleKey]], deadline: float = math.inf
    ) -> None:
        self._dataset, self._keys = dataset, iter(keys)
        self._thread = ReadingThreads(1, "reading", "number of ranks")
        self._patience = Patience(sources_of(dataset), deadline, self._thread.leave_behind)

    def __next__(self) -> Arrays:
        batch = next(self._keys, None)
        if batch is None:
            self.close()
            raise StopIteration
        return self._patience.result(self._thread.submit(self._read, batch))

    def close(self) -> None:
        """End the thread."""
        self._keys = iter(())
        self._thread.close()

    def _read(self, batch: list[SampleKey]) -> Arrays:
        return stack([self._dataset[key] for key in batch])


def sources_of(dataset: ImageDataset) -> list[Source]:
    """What is read of a dataset, where it has a file for each sample."""
    return [dataset.source] if isinstance(dataset, PhotoDataset) else []
