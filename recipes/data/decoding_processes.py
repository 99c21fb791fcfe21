"""Batches of photographs, decoded by processes forked from the rank.

A thread takes Python's lock about ten times an image, and the more there are, the longer each waits
for it: on 16 cores, 16 threads are slower than 8 (docs/data.md), and the training loop waits with
them. A process has a lock of its own. Images are written into memory that was mapped before the
fork, so nothing is copied, and /dev/shm is not used.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import UserError
from recipes.data.base import Arrays, Stream
from recipes.data.decoding_threads import fill, portions
from recipes.data.forked import live_with_rank, no_collection
from recipes.data.jpeg import Scratch
from recipes.data.photographs import PhotoDataset
from recipes.data.sampler import SampleKey

# A process takes as much of a batch at once as makes its messages small beside decoding.
_TAKEN = 32
_HELD_BY_RANK = 3  # the batch asked for, the one in the training step, the one on its way to it


class _Part(NamedTuple):
    rows: slice
    read: Future[tuple[NDArray[np.int64], NDArray[np.int64]]]  # labels, sources


class _Pending(NamedTuple):
    arrays: Arrays
    parts: list[_Part]


class DecodingProcesses(Stream):
    """Reads ahead in processes. The samples and pixels are those of `DecodingThreads`.

    The memory of a batch's images is used for another batch once no array refers to it any more;
    where the caller holds on to many, it is given copies.

    Args:
        dataset: read as it is kept. The processes see it as it is now.
        keys: the samples of each batch, of one epoch; the first batch is the largest.
        processes: that decode. They are forked by the first batch, from the thread that asks for
            it, and end with that thread.
        prefetch: batches decoded ahead of the one asked for.
    """

    def __init__(
        self,
        dataset: PhotoDataset,
        keys: Iterable[list[SampleKey]],
        processes: int,
        prefetch: int,
    ) -> None:
        self._dataset, self._processes = dataset, processes
        all_keys = iter(keys)
        first = next(all_keys, [])
        self._keys: Iterator[list[SampleKey]] = chain([first] if first else [], all_keys)
        self._slots = _Slots(
            prefetch + _HELD_BY_RANK, len(first) * dataset.image_size**2 * dataset.channels
        )
        self._pool = ProcessPoolExecutor(
            processes, get_context("fork"), _set_up, (os.getpid(), dataset, self._slots)
        )
        self._pending: deque[_Pending] = deque()
        with no_collection():
            for _ in range(prefetch):
                self._start_next()

    def __next__(self) -> Arrays:
        self._start_next()
        if not self._pending:
            self.close()
            raise StopIteration
        arrays, parts = self._pending.popleft()
        try:
            for rows, read in parts:
                arrays.labels[rows], arrays.sources[rows] = read.result()
        except BrokenProcessPool as error:
            self.close()
            raise UserError(
                f"a decoding process died: {error}",
                "out of memory? Use fewer dataset.workers or a smaller dataset.prefetch",
            ) from error
        except BaseException:
            self.close()
            raise
        # The next batch needs a place, whatever the caller holds on to.
        if not self._slots.any_free():
            arrays = arrays._replace(images=arrays.images.copy())
        return arrays

    def close(self) -> None:
        """End the processes: what they have begun is finished, what waits is dropped."""
        self._keys = iter(())
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start_next(self) -> None:
        """Have the processes begin with the next batch, if there is one."""
        keys = next(self._keys, None)
        if keys is None:
            return
        size, count = self._dataset.image_size, len(keys)
        place, images = self._slots.take((count, size, size, self._dataset.channels))
        indices = np.array([index for _, index in keys], np.int64)
        arrays = Arrays(images, np.empty(count, np.int64), indices, np.empty(count, np.int64))
        parts = [
            _Part(rows, self._pool.submit(_decode, keys[0][0], place, indices[rows], rows))
            for rows in portions(count, self._processes, _TAKEN)
        ]
        self._pending.append(_Pending(arrays, parts))


class _Slots:
    """Places for the images of batches, in memory that processes forked later share.

    Args:
        count: of places.
        size: of a place, in bytes.
    """

    def __init__(self, count: int, size: int) -> None:
        # A view of an array that owns no memory refers to the first array of the memory: one each.
        self._flat = [np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8) for _ in range(count)]
        self._unused = self._references(0)

    def take(self, shape: tuple[int, ...]) -> tuple[int, NDArray[np.uint8]]:
        """The number of a free place, and an array in it, in which anything may be."""
        place = next(place for place in range(len(self._flat)) if self._free(place))
        return place, self.array(place, 0, shape)

    def any_free(self) -> bool:
        """Whether there is a place that no array refers to."""
        return any(self._free(place) for place in range(len(self._flat)))

    def array(self, place: int, start: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An array in a place, `start` bytes from its beginning."""
        return self._flat[place][start : start + int(np.prod(shape))].reshape(shape)

    def _free(self, place: int) -> bool:
        return self._references(place) == self._unused

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._flat[place])


class _Decoder:
    """What a process has been forked with, and memory of its own."""

    def __init__(self, dataset: PhotoDataset, slots: _Slots) -> None:
        self.dataset, self.slots, self.scratch = dataset, slots, Scratch()


_decoder: _Decoder | None = None  # set once in each process, and never in the rank


def _set_up(rank_process: int, dataset: PhotoDataset, slots: _Slots) -> None:
    global _decoder
    live_with_rank(rank_process)
    _decoder = _Decoder(dataset, slots)


def _decode(
    epoch: int, place: int, indices: NDArray[np.int64], rows: slice
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode samples into rows of a batch; their labels and sources. Runs in a process."""
    assert _decoder is not None
    dataset, count = _decoder.dataset, len(indices)
    shape = (dataset.image_size, dataset.image_size, dataset.channels)
    images = _decoder.slots.array(place, rows.start * int(np.prod(shape)), (count, *shape))
    arrays = Arrays(images, np.empty(count, np.int64), indices, np.empty(count, np.int64))
    fill(dataset, epoch, arrays, slice(0, count), _decoder.scratch)
    return arrays.labels, arrays.sources
