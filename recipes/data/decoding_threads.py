"""Batches of photographs, decoded by threads of the rank.

Decoding and resizing let other threads run, so threads use all cores, and there is no process to
start, no copy from one to another, and no shared memory to fill.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from recipes.data.augmentation import CROP_UNIFORMS, Image, central_crop, random_resized_crop
from recipes.data.base import Arrays, Stream
from recipes.data.in_hand import Patience
from recipes.data.jpeg import Scratch, decode_exactly, decode_random_crop
from recipes.data.photographs import UNREADABLE_LABEL, PhotoDataset
from recipes.data.randomness import sample_uniforms
from recipes.data.reading_threads import ReadingThreads
from recipes.data.sampler import SampleKey

# Images that a thread takes at once: few enough to share a batch out, enough to make the 30
# microseconds of handing work to a thread small beside decoding.
_TAKEN = 8


def portions(count: int, workers: int, most: int = _TAKEN) -> Iterator[slice]:
    """The samples of a batch, by what a thread or process takes at once: `most` or fewer."""
    taken = min(most, -(-count // workers))
    for first in range(0, count, taken):
        yield slice(first, min(first + taken, count))


class _Pending(NamedTuple):
    arrays: Arrays
    parts: list[Future[None]]  # in the order of the samples


class DecodingThreads(Stream):
    """Reads ahead in threads.

    The memory of a batch's images is used for another batch once no array refers to it any more.

    Args:
        dataset: read as it is kept; pixels as its `__getitem__` gives them, bit for bit where they
            are not augmented, else within the tolerance of `jpeg.decode_random_crop`.
        keys: the samples of each batch, of one epoch.
        threads: that decode.
        prefetch: batches decoded ahead of the one asked for.
        deadline: seconds for one image.
    """

    def __init__(
        self,
        dataset: PhotoDataset,
        keys: Iterable[list[SampleKey]],
        threads: int,
        prefetch: int,
        deadline: float = math.inf,
    ) -> None:
        cv2.setNumThreads(1)  # the threads here are enough
        self._dataset, self._keys, self._threads = dataset, iter(keys), threads
        self._pool = ReadingThreads(threads, "decoding", begin=dataset.in_hand.number_reader)
        self._patience = Patience([dataset.source], deadline, self._pool.leave_behind)
        self._own = threading.local()
        self._buffers = _Buffers()
        self._pending: deque[_Pending] = deque()
        for _ in range(prefetch):
            self._start_next()

    def __next__(self) -> Arrays:
        self._start_next()
        if not self._pending:
            self.close()
            raise StopIteration
        arrays, parts = self._pending.popleft()
        try:
            for part in parts:
                self._patience.result(part)
        except BaseException:
            self.close()
            raise
        return arrays

    def close(self) -> None:
        """End the threads: what they have begun is finished, what waits is dropped."""
        self._keys = iter(())
        self._pending.clear()
        self._pool.close()

    def _start_next(self) -> None:
        """Have the threads begin with the next batch, if there is one."""
        keys = next(self._keys, None)
        if keys is None:
            return
        size, count = self._dataset.image_size, len(keys)
        arrays = Arrays(
            self._buffers.take((count, size, size, 3)),
            np.empty(count, np.int64),
            np.array([index for _, index in keys], np.int64),
            np.empty(count, np.int64),
        )
        parts = [
            self._pool.submit(self._fill, keys[0][0], arrays, rows)
            for rows in portions(count, self._threads)
        ]
        self._pending.append(_Pending(arrays, parts))

    def _fill(self, epoch: int, batch: Arrays, rows: slice) -> None:
        fill(self._dataset, epoch, batch, rows, self._scratch())

    def _scratch(self) -> Scratch:
        """This thread's own."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        scratch: Scratch = self._own.scratch
        return scratch


def fill(dataset: PhotoDataset, epoch: int, batch: Arrays, rows: slice, scratch: Scratch) -> None:
    """Read some of a batch's `indices` into its other arrays. Runs in any thread.

    Args:
        batch: its images are contiguous.
        scratch: the thread's own.

    Raises:
        UserError: an image cannot be read.
    """
    indices = batch.indices[rows]
    uniforms: Iterable[NDArray[np.float64] | None] = [None] * len(indices)
    if dataset.augment:
        uniforms = sample_uniforms(dataset.seed, epoch, indices, CROP_UNIFORMS)
    for row, index, numbers in zip(
        range(rows.start, rows.stop), indices.tolist(), uniforms, strict=True
    ):
        out = batch.images[row]
        image, source = dataset.read(index, partial(_read, dataset, scratch, out, numbers))
        if image is None:
            out[...] = 0
        batch.labels[row] = UNREADABLE_LABEL if image is None else dataset.labels[source]
        batch.sources[row] = source


def _read(
    dataset: PhotoDataset,
    scratch: Scratch,
    out: Image,
    uniforms: NDArray[np.float64] | None,
    source: int,
) -> Image:
    """Write one image, whatever it is kept as, to `out`: a random crop, or without numbers the
    centre."""
    content = dataset.content(source)
    if uniforms is None:
        if not isinstance(content, np.ndarray):
            name, most = dataset.path(source), dataset.max_pixels
            content = decode_exactly(content, name, scratch, most)
        out[...] = central_crop(content, len(out))
    elif isinstance(content, np.ndarray):
        out[...] = random_resized_crop(content, len(out), uniforms)
    else:
        name, most = dataset.path(source), dataset.max_pixels
        decode_random_crop(content, name, uniforms, out, scratch, most)
    return out


class _Buffers:
    """Arrays for the images of batches, each used again when nothing refers to it any more.

    A view of an array holds a reference to it, and so does all else that uses its memory. The
    system clears fresh memory, page by page, at 15 microseconds an image of 224 pixels a side.
    """

    def __init__(self) -> None:
        self._arrays = [np.empty(0, np.uint8)]
        self._unused = self._references(0)

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Memory of this shape, in which anything may be."""
        for place in range(len(self._arrays)):
            if self._references(place) == self._unused:
                if (
                    self._arrays[place].shape[1:] != shape[1:]
                    or len(self._arrays[place]) < shape[0]
                ):
                    self._arrays[place] = np.empty(shape, np.uint8)
                return self._arrays[place][: shape[0]]
        self._arrays.append(np.empty(shape, np.uint8))
        return self._arrays[-1][:]

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._arrays[place])
