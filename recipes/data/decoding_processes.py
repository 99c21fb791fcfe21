"""Batches of photographs, decoded by processes forked from the rank.

A thread takes Python's lock about ten times an image, and the more there are, the longer each waits
for it: on 16 cores, 16 threads are slower than 8 (docs/data.md), and the training loop waits with
them. A process has a lock of its own. Images are written into memory that was mapped before the
fork, so nothing is copied, and /dev/shm is not used.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import connection
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import PassingError
from recipes.data.base import Arrays, Stream
from recipes.data.decoding_threads import fill, portions
from recipes.data.forked import live_with_rank, no_collection
from recipes.data.in_hand import Patience
from recipes.data.jpeg import Scratch
from recipes.data.photographs import PhotoDataset
from recipes.data.sampler import SampleKey
from recipes.limits import NO_THREAD, cannot_start, see_that_threads_start

# A process takes as much of a batch at once as makes its messages small beside decoding.
_TAKEN = 32
_LOOK_SECONDS = 0.2
_THREADS_NEEDED = 8
_ENDING_SECONDS = 1.0  # for a killed process to end
_HELD_BY_RANK = 3  # the batch asked for, the one in the training step, the one on its way to it


class _Part(NamedTuple):
    rows: slice
    read: Future[tuple[NDArray[np.int64], NDArray[np.int64]]]  # labels, sources


class _Task(NamedTuple):
    """What all parts of a batch have in common."""

    stream: int  # its number
    epoch: int
    place: int  # of the images


class _Pending(NamedTuple):
    arrays: Arrays
    parts: list[_Part]


class Decoders:
    """Processes that decode, for one stream of batches after another.

    They are forked when this is made; early is best: what the rank allocates later is not theirs.
    They end with `close`, when nothing refers to this any more, or with the thread that made it.

    Args:
        datasets: read as they are kept. The processes see them as they are now.
        processes: that decode.
        prefetch: batches decoded ahead of the one asked for.
        largest: samples in the largest batch.
        deadline: seconds for one image.

    Raises:
        UserError: the system does not let them start.
    """

    def __init__(
        self,
        datasets: Sequence[PhotoDataset],
        processes: int,
        prefetch: int,
        largest: int,
        deadline: float = math.inf,
    ) -> None:
        self._datasets, self.processes, self.prefetch = tuple(datasets), processes, prefetch
        image = max(dataset.image_size**2 * dataset.channels for dataset in datasets)
        # A stream needs one more than it reads ahead, whatever the rank still holds of others.
        self.slots = _Slots(prefetch + 1 + _HELD_BY_RANK, largest * image)
        self._streams = 0  # begun so far
        self._dropped = np.frombuffer(mmap.mmap(-1, 8), np.int64)  # up to which stream: shared
        self._context = _Context()
        sources = [dataset.source for dataset in datasets]
        self.patience = Patience(sources, deadline, self._context.give_up)
        self._pool = self._start(_Decoder(self._datasets, self.slots, self._dropped))

    def _start(self, decoder: _Decoder) -> ProcessPoolExecutor:
        others = set(threading.enumerate())
        try:
            pool = ProcessPoolExecutor(
                self.processes, self._context, _set_up, (os.getpid(), decoder)
            )
            with no_collection():
                first = pool.submit(int)  # forks them all
            _await_start(first, set(threading.enumerate()) - others)
        except (OSError, RuntimeError) as error:
            self._context.kill()  # those that have started would wait for ever, and Python for them
            self._context.release()  # for the messages and files that follow
            number = min(len(self._context.started) + 1, self.processes)
            what = f"decoding process {number} of {self.processes}"
            raise cannot_start(what, error, "dataset.workers") from error
        with self.death_told():
            first.result()
        return pool

    def __contains__(self, dataset: object) -> bool:
        return any(dataset is known for known in self._datasets)

    def stream(self, dataset: PhotoDataset, keys: Iterable[list[SampleKey]]) -> DecodedStream:
        """Batches of a dataset that is contained. One stream at a time."""
        self._streams += 1
        return DecodedStream(self, self._streams, dataset, keys)

    def submit(
        self, dataset: PhotoDataset, task: _Task, indices: NDArray[np.int64], rows: slice
    ) -> _Part:
        """Have a process decode some rows of a batch, which has these samples.

        Raises:
            UserError: a process has died.
        """
        number = next(n for n, known in enumerate(self._datasets) if dataset is known)
        with self.death_told():
            return _Part(rows, self._pool.submit(_decode, task, number, indices[rows], rows.start))

    def drop(self, stream: int) -> None:
        """Let what has not begun of this stream, and of those before it, end at once.

        Futures that wait are not cancelled: where a process dies just then, Python's executor
        would not survive it, and leave the others unfinished.
        """
        self._dropped[0] = stream

    def close(self) -> None:
        """End the processes: what they have begun is finished, what waits is dropped."""
        self._pool.shutdown(wait=not self._context.given_up, cancel_futures=True)

    @contextmanager
    def death_told(self) -> Iterator[None]:
        """Name the image and the usual cause where a process has died."""
        try:
            yield
        except BrokenProcessPool as error:
            died = [each for each in self._context.started if each.died_by_itself]
            hands = [self._in_hand_of(process.number) for process in died]
            how = "".join(f" ({_end_of(each)})" for each in died[:1])
            images = ", ".join(image for image in hands if image is not None)
            raise PassingError(
                f"a decoding process died{how}" + (f" at {images}" if images else ""),
                "out of memory? Use fewer dataset.workers, or a smaller dataset.prefetch or "
                "dataset.max_pixels; where it is always the same image, replace or remove it",
            ) from error

    def _in_hand_of(self, number: int) -> str | None:
        """The image that a process was at when it died."""
        for in_hand, place in (dataset.source for dataset in self._datasets):
            index = in_hand.of(number)
            if index is not None:
                return place(index)
        return None


class DecodedStream(Stream):
    """Reads ahead by `Decoders`. The samples and pixels are those of `DecodingThreads`.

    The memory of a batch's images is used for another batch once no array refers to it any more;
    where the caller holds on to many, it is given copies.

    Args:
        decoders: which are this stream's alone until it is closed.
        number: of this stream among theirs.
        dataset: one of theirs.
        keys: the samples of each batch, of one epoch.
    """

    def __init__(
        self,
        decoders: Decoders,
        number: int,
        dataset: PhotoDataset,
        keys: Iterable[list[SampleKey]],
    ) -> None:
        self._decoders, self._number = decoders, number
        self._dataset, self._keys = dataset, iter(keys)
        self._pending: deque[_Pending] = deque()
        for _ in range(decoders.prefetch):
            self._start_next()

    def __next__(self) -> Arrays:
        self._start_next()
        if not self._pending:
            raise StopIteration
        arrays, parts = self._pending.popleft()
        try:
            with self._decoders.death_told():
                for rows, read in parts:
                    found = self._decoders.patience.result(read)
                    arrays.labels[rows], arrays.sources[rows] = found
        except BaseException:
            self.close()
            self._wait(parts)
            raise
        # Where the rank holds on to more than it should need, the next stream would find no place.
        if self._decoders.slots.free() + len(self._pending) <= self._decoders.prefetch:
            arrays = arrays._replace(images=arrays.images.copy())
        return arrays

    def close(self) -> None:
        """Drop what waits, and let the processes finish what they have begun."""
        self._keys = iter(())
        self._decoders.drop(self._number)
        while self._pending:
            self._wait(self._pending.popleft().parts)

    def _wait(self, parts: list[_Part]) -> None:
        # A place is free for another batch only when nothing is written to it any more.
        wait([part.read for part in parts])

    def _start_next(self) -> None:
        """Have the processes begin with the next batch, if there is one."""
        keys = next(self._keys, None)
        if keys is None:
            return
        size, count = self._dataset.image_size, len(keys)
        place, images = self._decoders.slots.take((count, size, size, self._dataset.channels))
        indices = np.array([index for _, index in keys], np.int64)
        arrays = Arrays(images, np.empty(count, np.int64), indices, np.empty(count, np.int64))
        task = _Task(self._number, keys[0][0], place)
        parts = [
            self._decoders.submit(self._dataset, task, indices, rows)
            for rows in portions(count, self._decoders.processes, _TAKEN)
        ]
        self._pending.append(_Pending(arrays, parts))


def _await_start(first: Future[int], managers: set[threading.Thread]) -> None:
    """Wait for the first answer of an executor.

    Raises:
        RuntimeError: the thread that manages it has ended, which nothing else would tell.
    """
    while not wait([first], _LOOK_SECONDS).done:
        if not any(thread.is_alive() for thread in managers) and not first.done():
            raise RuntimeError(NO_THREAD)


def _end_of(process: _Process) -> str:
    """How a process has ended, in words."""
    process.join(_ENDING_SECONDS)
    code = process.exitcode
    if code is None or code >= 0:
        return f"status {code}"
    return signal.Signals(-code).name


class DecodingProcesses(Stream):
    """A stream with `Decoders` of its own, which end with it.

    Args:
        dataset: read as it is kept.
        keys: the samples of each batch, of one epoch; the first batch is the largest.
        processes, prefetch, deadline: see `Decoders`.
    """

    def __init__(
        self,
        dataset: PhotoDataset,
        keys: Iterable[list[SampleKey]],
        processes: int,
        prefetch: int,
        deadline: float = math.inf,
    ) -> None:
        rest = iter(keys)
        first = next(rest, [])
        self._decoders = Decoders([dataset], processes, prefetch, len(first), deadline)
        self._stream = self._decoders.stream(dataset, chain([first] if first else [], rest))

    def __next__(self) -> Arrays:
        try:
            return next(self._stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        self._stream.close()
        self._decoders.close()


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
        place = next((place for place in range(len(self._flat)) if self._is_free(place)), None)
        if place is None:
            raise RuntimeError("no place is free: two streams of the same decoders are open")
        return place, self.array(place, 0, shape)

    def free(self) -> int:
        """How many places no array refers to."""
        return sum(self._is_free(place) for place in range(len(self._flat)))

    def array(self, place: int, start: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An array in a place, `start` bytes from its beginning."""
        return self._flat[place][start : start + int(np.prod(shape))].reshape(shape)

    def _is_free(self, place: int) -> bool:
        return self._references(place) == self._unused

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._flat[place])


class _Process(ForkProcess):
    """A process that the executor can end, when another one of its has died: SIGTERM would not, see
    `forked`, and the executor would wait for it for ever."""

    number = 0  # among those of its executor, from 1 on
    _killed = False  # because of another one

    def start(self) -> None:
        super().start()
        # Python's executor and Paddle need them later, and do not survive being denied one.
        see_that_threads_start(_THREADS_NEEDED)

    def terminate(self) -> None:
        self._killed = not self._has_ended()
        self.kill()

    @property
    def died_by_itself(self) -> bool:
        """Whether it is this one that broke the executor."""
        return self.pid is not None and not self._killed and self._has_ended()

    def _has_ended(self) -> bool:
        # Its files are closed a moment before the system tells its exit status.
        return bool(connection.wait([self.sentinel], 0))


class _Context(ForkContext):
    """Makes an executor's processes, and knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []
        self.given_up = False  # nothing is to wait for their ends

    def Process(self, *arguments: Any, **named: Any) -> _Process:  # type: ignore[override]
        process = _Process(*arguments, **named)
        process.number = len(self.started) + 1
        self.started.append(process)
        return process

    def give_up(self) -> None:
        """A process is held by the system, perhaps so that even being killed has to wait."""
        self.given_up = True
        self.kill()

    def release(self) -> None:
        """Close the files by which the ends of killed processes are seen."""
        for process in self.started:
            if process.pid is not None:
                process.join(_ENDING_SECONDS)
                with suppress(ValueError):  # it has not ended
                    process.close()

    def kill(self) -> None:
        """End those that have started, at once."""
        for process in self.started:
            if process.pid is not None:
                process.kill()


class _Decoder:
    """What a process is forked with, and memory of its own.

    Args:
        datasets, slots: see `Decoders`.
        dropped: int64[1], shared: streams up to this number need nothing any more.
    """

    def __init__(
        self, datasets: Sequence[PhotoDataset], slots: _Slots, dropped: NDArray[np.int64]
    ) -> None:
        self.datasets, self.slots, self.dropped, self.scratch = datasets, slots, dropped, Scratch()


_decoder: _Decoder | None = None  # set once in each process, and never in the rank


def _set_up(rank_process: int, decoder: _Decoder) -> None:
    global _decoder
    live_with_rank(rank_process)
    process = multiprocessing.current_process()
    assert isinstance(process, _Process)
    for dataset in decoder.datasets:
        dataset.in_hand.number_reader(process.number)
    _decoder = decoder


def _decode(
    task: _Task, number: int, indices: NDArray[np.int64], first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode samples into the rows of a batch from `first` on. Runs in a process.

    Args:
        number: of the dataset.
        indices: of its samples.

    Returns:
        Their labels and sources, undefined where the stream was dropped.
    """
    assert _decoder is not None
    dataset, count = _decoder.datasets[number], len(indices)
    shape = (dataset.image_size, dataset.image_size, dataset.channels)
    images = _decoder.slots.array(task.place, first * int(np.prod(shape)), (count, *shape))
    arrays = Arrays(images, np.empty(count, np.int64), indices, np.empty(count, np.int64))
    if task.stream > _decoder.dropped[0]:
        fill(dataset, task.epoch, arrays, slice(0, count), _decoder.scratch)
    return arrays.labels, arrays.sources
