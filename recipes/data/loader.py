"""Batches of a rank's samples, read in the rank itself or by worker processes.

Both ways give the same bytes. Images stay uint8 on the CPU: the trainer moves and normalises them.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing.util
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig, UserError
from recipes.data.base import ImageDataset, Sample
from recipes.data.sampler import Plan, SampleKey, evaluation_batches

SHARED_MEMORY = Path("/dev/shm")

_MIB = 1 << 20
_HELD_BY_RANK = 2  # the batch in the training step and the one on its way to it
_STOP_TIMEOUT_S = 10.0
_FEEDER_TIMEOUT_S = 1.0
_PR_SET_PDEATHSIG = 1


class Batch(NamedTuple):
    """A micro-batch of b training samples."""

    images: NDArray[np.uint8]  # [b, image_size, image_size, 3], RGB
    labels: NDArray[np.int64]  # [b]
    indices: NDArray[np.int64]  # [b], the samples asked for
    sources: NDArray[np.int64]  # [b], the samples delivered
    step: int  # global batch within the epoch, from 0
    part: int  # 0 .. accumulate-1
    global_count: int  # samples in the whole global batch


class EvaluationBatch(NamedTuple):
    """A batch of b held-out samples; those with label -1 could not be read and do not count."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    sources: NDArray[np.int64]
    batch_number: int


class _Arrays(NamedTuple):
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    sources: NDArray[np.int64]


def train_loader(
    dataset: ImageDataset, plan: Plan, epoch: int, first_step: int, config: DatasetConfig
) -> Generator[Batch, None, None]:
    """This rank's micro-batches of an epoch from `first_step` on, in the plan's order.

    Worker processes, if dataset.workers asks for any, start at the first `next` and end with the
    iterator: when it is exhausted, closed (`contextlib.closing`) or dropped. Iterate in the thread
    that lives as long as the rank: the system ends workers with the thread that started them.

    Raises:
        UserError: a sample cannot be read, or a worker died.
    """
    keys = (micro.keys for micro in plan.micro_batches(epoch, first_step))
    arrays = _read(dataset, keys, config)
    try:
        for micro in plan.micro_batches(epoch, first_step):
            yield Batch(*next(arrays), micro.step, micro.part, micro.global_count)
    finally:
        arrays.close()


def evaluation_loader(
    dataset: ImageDataset, batch_size: int, rank: int, world_size: int, config: DatasetConfig
) -> Iterator[EvaluationBatch]:
    """This rank's evaluation batches, see `evaluation_batches`; otherwise as `train_loader`."""
    mine = list(evaluation_batches(len(dataset), batch_size, rank, world_size))
    arrays = _read(dataset, ([(0, index) for index in indices] for _, indices in mine), config)
    try:
        for number, _ in mine:
            yield EvaluationBatch(*next(arrays), number)
    finally:
        arrays.close()


class SkipCounter:
    """Counts the images of one rank that could not be read and were skipped.

    An image counts once, however many epochs meet it.

    Args:
        dataset: what the batches come from; names the paths.
        limit: dataset.max_skipped.
    """

    def __init__(self, dataset: ImageDataset, limit: int) -> None:
        self._dataset, self._limit = dataset, limit
        self._skipped: set[int] = set()

    @property
    def count(self) -> int:
        """Different images skipped so far."""
        return len(self._skipped)

    def update(self, batch: Batch | EvaluationBatch) -> list[str]:
        """Count a batch's skipped images, and name those that are new.

        Raises:
            UserError: more than `limit` images have been skipped.
        """
        missed = (batch.sources != batch.indices) | (batch.labels < 0)
        new = [i for i in batch.indices[missed].tolist() if i not in self._skipped]
        self._skipped.update(new)
        paths = [self._dataset.path(index) or f"sample {index}" for index in new]
        if self.count > self._limit:
            raise UserError(
                f"{self.count} images could not be read, more than dataset.max_skipped="
                f"{self._limit}; the last is {paths[-1]}",
                "mend the files, or raise dataset.max_skipped",
            )
        return paths


def check_shared_memory(
    config: DatasetConfig,
    batch_size: int,
    ranks_on_node: int,
    folder: Path = SHARED_MEMORY,
) -> None:
    """Refuse a run whose loader processes would fill the node's shared memory.

    A full /dev/shm ends a loader process with a bus error in the middle of training.

    Args:
        batch_size: images in the largest micro-batch of a rank.
        ranks_on_node: processes that share `folder`.

    Raises:
        UserError: naming the need and what is free, both in MiB.
    """
    if config.workers == 0:
        return
    batch_bytes = batch_size * (config.image_size**2 * 3 + 3 * 8)
    batches = config.workers * config.prefetch + _HELD_BY_RANK
    need = ranks_on_node * batches * batch_bytes
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"the loader processes need about {need / _MIB:.0f} MiB in {folder} "
            f"({ranks_on_node} ranks x {batches} batches of {batch_size} images), "
            f"but {free / _MIB:.0f} MiB are free",
            f"start the container with --shm-size={-(-need * 3 // (2 * _MIB))}m or --ipc=host, "
            "or set dataset.workers=0",
        )


class _Stream(Iterator[_Arrays]):
    """Batches of arrays, with an end that can be called early."""

    def close(self) -> None:
        """Release what reads ahead. May be called twice."""


def _read(dataset: ImageDataset, keys: Iterable[list[SampleKey]], config: DatasetConfig) -> _Stream:
    if config.workers == 0:
        return _InProcess(dataset, keys)
    return _InWorkers(dataset, keys, config)


class _InProcess(_Stream):
    """Reads in the rank. Paddle's own loader would use a thread, whose errors hang the reader."""

    def __init__(self, dataset: ImageDataset, keys: Iterable[list[SampleKey]]) -> None:
        self._batches = (_stack([dataset[key] for key in batch]) for batch in keys)

    def __next__(self) -> _Arrays:
        return next(self._batches)


class _InWorkers(_Stream):
    """Reads through `paddle.io.DataLoader`'s worker processes."""

    def __init__(
        self, dataset: ImageDataset, keys: Iterable[list[SampleKey]], config: DatasetConfig
    ) -> None:
        import paddle

        rank_process = os.getpid()
        loader = paddle.io.DataLoader(
            _Caught(dataset),
            batch_sampler=keys,
            collate_fn=_stack_or_failure,
            num_workers=config.workers,
            prefetch_factor=config.prefetch,
            use_shared_memory=True,
            use_buffer_reader=False,  # it would copy each batch once more on the CPU
            places=paddle.CPUPlace(),
            worker_init_fn=lambda _: _set_up_worker(rank_process),
        )
        with _no_collection():
            self._iterator: Any = iter(loader)
        # Before multiprocessing's own exit, which would wait for workers that SIGTERM does not end.
        atexit.register(self.close)

    def __next__(self) -> _Arrays:
        try:
            fields = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except (SystemError, RuntimeError, OSError) as error:
            self.close()
            raise UserError(
                f"a loader process died: {str(error).strip()}",
                "out of memory, or /dev/shm is full: use fewer dataset.workers or a smaller "
                "dataset.prefetch, or start the container with --shm-size=8g or --ipc=host",
            ) from error
        failure = fields[-1]
        if isinstance(failure, Exception):
            self.close()
            raise failure
        # Views of the workers' shared memory, which is freed with the last view of it.
        arrays: list[NDArray[Any]] = [np.from_dlpack(tensor) for tensor in fields[:-1]]
        return _Arrays(*arrays)

    def close(self) -> None:
        """End the workers.

        Dropping Paddle's iterator does not: its reading thread holds a reference to it for as long
        as it runs. Paddle 3.3 has no public call for this.
        """
        iterator, self._iterator = self._iterator, iter(())
        atexit.unregister(self.close)
        if not hasattr(iterator, "_workers"):
            return
        iterator._try_shutdown_all(_STOP_TIMEOUT_S)
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector off; processes forked meanwhile start with it off."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Caught:
    """A dataset whose errors are values.

    Paddle would print a worker's exception with its traceback, and raise another one of the same
    type whose message is that traceback.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: SampleKey) -> Sample | Exception:
        try:
            return self._dataset[key]
        except UserError as error:
            return error
        except Exception:
            epoch, index = key
            return RuntimeError(
                f"reading sample {index} of epoch {epoch} failed\n{traceback.format_exc()}"
            )


def _stack_or_failure(samples: list[Sample | Exception]) -> list[Any]:
    """The fields of a batch and None, or nothing and the first exception."""
    for sample in samples:
        if isinstance(sample, Exception):
            return [np.zeros(1, np.int64), sample]  # Paddle cannot pass a batch without arrays
    return [*_stack(samples), None]  # type: ignore[arg-type]


def _stack(samples: list[Sample]) -> _Arrays:
    return _Arrays(
        np.stack([sample.image for sample in samples]),
        np.array([sample.label for sample in samples], np.int64),
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.source for sample in samples], np.int64),
    )


def _set_up_worker(rank_process: int) -> None:
    """In a new worker: live as long as the rank, use one core, leave nothing in shared memory.

    Paddle's workers look whether their parent lives only when work arrives, so a killed rank would
    leave them waiting for ever. Ctrl-C and SIGTERM reach every process of a job; what they mean is
    the rank's decision, and it needs its workers until it has ended what it does.
    """
    import cv2
    from paddle.base import core

    def end_with_rank(*_: object) -> None:
        if os.getppid() != rank_process:
            core._cleanup_mmap_fds()  # type: ignore[attr-defined]
            os._exit(1)

    def clean_up() -> None:
        # Paddle has cleaned up already, but its queue may have passed another batch since then.
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(_FEEDER_TIMEOUT_S)
        core._cleanup_mmap_fds()  # type: ignore[attr-defined]

    # Garbage of the rank must not be collected here: a reader of an earlier loader would join a
    # C++ thread that a forked process does not have, and abort.
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, end_with_rank)
    signal.signal(signal.SIGTERM, end_with_rank)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    end_with_rank()  # the rank may have died before the call above
    multiprocessing.util.Finalize(None, clean_up, exitpriority=-100)
    cv2.setNumThreads(0)
