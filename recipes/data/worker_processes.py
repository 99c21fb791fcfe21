"""Batches read by worker processes: `paddle.io.DataLoader`, whose ends and errors are made ours."""

from __future__ import annotations

import atexit
import math
import multiprocessing
import multiprocessing.util
import os
import shutil
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.config import Config, PassingError, UserError, chosen_loader
from recipes.data.base import Arrays, ImageDataset, Sample, Stream, stack
from recipes.data.forked import live_with_rank, no_collection
from recipes.data.in_hand import Patience
from recipes.data.one_thread import sources_of
from recipes.data.sampler import SampleKey
from recipes.limits import cannot_start

SHARED_MEMORY = Path("/dev/shm")

_MIB = 1 << 20
_HELD_BY_RANK = 2  # the batch in the training step and the one on its way to it
_STOP_TIMEOUT_S = 10.0
_FEEDER_TIMEOUT_S = 1.0
_LOOK_SECONDS = 0.5


def worker_processes(config: Config) -> int:
    """How many worker processes each rank's loader starts."""
    return config.dataset.workers if chosen_loader(config) == "paddle" else 0


def check_shared_memory(config: Config, folder: Path = SHARED_MEMORY) -> None:
    """Refuse a run whose loader processes would fill the node's shared memory.

    A full /dev/shm ends a loader process with a bus error in the middle of training.

    Raises:
        UserError: naming the need and what is free, both in MiB.
    """
    workers = worker_processes(config)
    if workers == 0:
        return
    assert config.batch_size is not None
    batch_size, ranks_on_node = config.batch_size, config.topology.devices
    batch_bytes = batch_size * (config.dataset.image_size**2 * 3 + 3 * 8)
    batches = workers * config.dataset.prefetch + _HELD_BY_RANK
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


class WorkerProcesses(Stream):
    """Reads through `paddle.io.DataLoader`.

    Args:
        dataset: read sample by sample.
        keys: the samples of each batch.
        workers: processes, at least one.
        prefetch: batches that each process prepares ahead.
        deadline: seconds for one image.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        keys: Iterable[list[SampleKey]],
        workers: int,
        prefetch: int,
        deadline: float = math.inf,
    ) -> None:
        import paddle

        rank_process = os.getpid()
        sources = sources_of(dataset)

        def set_up(number: int) -> None:
            for source in sources:
                source.in_hand.number_reader(number + 1)
            _set_up_worker(rank_process)

        loader = paddle.io.DataLoader(
            _Caught(dataset),
            batch_sampler=keys,
            collate_fn=_stack_or_failure,
            num_workers=workers,
            prefetch_factor=prefetch,
            use_shared_memory=True,
            use_buffer_reader=False,  # it would copy each batch once more on the CPU
            places=paddle.CPUPlace(),
            worker_init_fn=set_up,
        )
        others = multiprocessing.active_children()
        try:
            with no_collection():
                self._iterator: Any = iter(loader)
        except (OSError, RuntimeError) as error:
            for process in set(multiprocessing.active_children()).difference(others):
                process.kill()  # it would wait for ever, and Python for it
            raise cannot_start("loader processes", error, "dataset.workers") from error
        self._watchman = Watchman(
            Patience(sources, deadline, partial(_kill, self._iterator)), deadline
        )
        # Before multiprocessing's own exit, which would wait for workers that SIGTERM does not end.
        atexit.register(self.close)

    def __next__(self) -> Arrays:
        try:
            with self._watchman.watching():
                fields = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except (SystemError, RuntimeError, OSError) as error:
            self.close()
            if self._watchman.overdue is not None:
                raise self._watchman.overdue from error
            raise PassingError(
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
        return Arrays(*arrays)

    def close(self) -> None:
        """End the workers.

        Dropping Paddle's iterator does not: its reading thread holds a reference to it for as long
        as it runs. Paddle 3.3 has no public call for this.
        """
        iterator, self._iterator = self._iterator, iter(())
        self._watchman.close()
        atexit.unregister(self.close)
        if not hasattr(iterator, "_workers"):
            return
        iterator._try_shutdown_all(_STOP_TIMEOUT_S)
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _kill(iterator: Any) -> None:
    """End the workers of Paddle's iterator, so that waiting for them ends."""
    for worker in iterator._workers:
        worker.kill()


class Watchman:
    """A thread that looks after readers while the one that waits for them cannot.

    Attributes:
        overdue: the error, once a reader has been at one image for too long.

    Args:
        patience: is out then.
        seconds: for one image.
    """

    def __init__(self, patience: Patience, seconds: float) -> None:
        self.overdue: PassingError | None = None
        self._patience, self._seconds = patience, seconds
        self._waits, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchman", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile the other thread waits."""
        self._waits.set()
        try:
            yield
        finally:
            self._waits.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        ticks = 0  # of waiting; where this very process is halted, that is nobody's delay
        pause = min(_LOOK_SECONDS, self._seconds)
        while not self._closed.wait(pause):
            ticks = ticks + 1 if self._waits.is_set() else 0
            if ticks * pause >= self._seconds:
                try:
                    self._patience.check()
                except PassingError as error:
                    self.overdue = error
                    return


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
    return [*stack(samples), None]  # type: ignore[arg-type]


def _set_up_worker(rank_process: int) -> None:
    """In a new worker: live as long as the rank, leave nothing in shared memory."""
    from paddle.base import core

    def unlink() -> None:
        core._cleanup_mmap_fds()  # type: ignore[attr-defined]

    def clean_up() -> None:
        # Paddle has cleaned up already, but its queue may have passed another batch since then.
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(_FEEDER_TIMEOUT_S)
        unlink()

    live_with_rank(rank_process, unlink)
    multiprocessing.util.Finalize(None, clean_up, exitpriority=-100)
