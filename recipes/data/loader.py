"""Batches of a rank's samples, by whichever way suits the data: `loader=`.

A dataset in memory gives a batch at once; photographs are decoded by processes (turbojpeg) or by
DALI; `paddle` reads sample by sample, in the rank or in worker processes. All give the same samples
under the same random numbers, and the same bytes, but for the pixels of photographs under
augmentation, which differ by the decoders' rounding. Images stay uint8: the trainer normalises.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from recipes.config import Config, UserError, chosen_loader
from recipes.cores import cores_of_rank
from recipes.data.arrays import ArrayDataset, BatchesAtOnce
from recipes.data.base import ImageDataset, Stream
from recipes.data.dali import DaliPipeline
from recipes.data.decoding_processes import Decoders, DecodingProcesses
from recipes.data.decoding_threads import DecodingThreads
from recipes.data.in_hand import read_seconds
from recipes.data.one_thread import InOneThread
from recipes.data.photographs import PhotoDataset
from recipes.data.sampler import Plan, SampleKey, evaluation_batches
from recipes.data.worker_processes import WorkerProcesses
from recipes.printable import printable

_MOST_DECODERS = 16  # speed grew up to as many; more has not been measured


class Batch(NamedTuple):
    """A micro-batch of b training samples."""

    images: NDArray[np.uint8]  # [b, image_size, image_size, 3], RGB; loader=dali: a GPU tensor
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


def start_decoders(config: Config, *datasets: ImageDataset) -> Decoders | None:
    """Processes for `train_loader` and `evaluation_loader`, from one epoch to the next.

    Returns:
        None where none of the datasets has use for them.
    """
    count = decoders(config)
    served = [dataset for dataset in datasets if _decoded_here(dataset, config)]
    if count == 1 or not served:
        return None
    assert config.global_batch_size is not None
    shares = config.shape.world_size * config.accumulate
    largest = max(-(-config.global_batch_size // shares), config.eval_batch_size)
    return Decoders(served, count, config.dataset.prefetch, largest, read_seconds(config.deadlines))


def train_loader(
    dataset: ImageDataset,
    plan: Plan,
    epoch: int,
    first_step: int,
    config: Config,
    processes: Decoders | None = None,
) -> Generator[Batch, None, None]:
    """This rank's micro-batches of an epoch from `first_step` on, in the plan's order.

    What reads ahead (threads, worker processes) starts at the first `next` and ends with the
    iterator: when it is exhausted, closed (`contextlib.closing`) or dropped. Iterate in the thread
    that lives as long as the rank: the system ends workers with the thread that started them.
    `processes`, see `start_decoders`, are there before and after it.

    A batch's images are the caller's until no array or tensor refers to their memory any more; what
    copies them elsewhere without waiting for the copy has to hold on to them until it is done.

    Raises:
        UserError: a sample cannot be read, or a worker died.
    """
    keys = (micro.keys for micro in plan.micro_batches(epoch, first_step))
    arrays = _read(dataset, keys, config, processes)
    try:
        for micro in plan.micro_batches(epoch, first_step):
            yield Batch(*next(arrays), micro.step, micro.part, micro.global_count)
    finally:
        arrays.close()


def evaluation_loader(
    dataset: ImageDataset,
    batch_size: int,
    rank: int,
    world_size: int,
    config: Config,
    processes: Decoders | None = None,
) -> Iterator[EvaluationBatch]:
    """This rank's evaluation batches, see `evaluation_batches`; otherwise as `train_loader`."""
    mine = list(evaluation_batches(len(dataset), batch_size, rank, world_size))
    keys = ([(0, index) for index in indices] for _, indices in mine)
    arrays = _read(dataset, keys, config, processes)
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
        paths = [printable(self._dataset.path(index) or f"sample {index}", 4096) for index in new]
        if self.count > self._limit:
            raise UserError(
                f"{self.count} images could not be read, more than dataset.max_skipped="
                f"{self._limit}; the last is {paths[-1]}",
                "mend the files, or raise dataset.max_skipped",
            )
        return paths


def decoders(config: Config) -> int:
    """How many threads, or processes, decode photographs in each rank.

    dataset.workers, or the rank's share of the cores.
    """
    if config.dataset.workers:
        return config.dataset.workers
    split = config.affinity == "split"
    share = config.threads or cores_of_rank(config.topology.devices, split=split)
    return min(share, _MOST_DECODERS)


def _decoded_here(dataset: ImageDataset, config: Config) -> TypeGuard[PhotoDataset]:
    """Whether a dataset's images are decoded by this project's own decoders."""
    loader = chosen_loader(config)
    if loader not in ("turbojpeg", "dali"):
        return False
    assert isinstance(dataset, PhotoDataset)
    # Without augmentation images are decoded exactly, so that scores do not depend on `loader`.
    return loader == "turbojpeg" or not dataset.augment


def _read(
    dataset: ImageDataset,
    keys: Iterable[list[SampleKey]],
    config: Config,
    processes: Decoders | None,
) -> Stream:
    workers, prefetch = config.dataset.workers, config.dataset.prefetch
    deadline = read_seconds(config.deadlines)
    if _decoded_here(dataset, config):
        if processes is not None and dataset in processes:
            return processes.stream(dataset, keys)
        count = decoders(config)
        decoding = DecodingThreads if count == 1 else DecodingProcesses
        return decoding(dataset, keys, count, prefetch, deadline)
    match chosen_loader(config):
        case "dali":
            assert isinstance(dataset, PhotoDataset)
            return DaliPipeline(dataset, keys, decoders(config), prefetch, deadline=deadline)
        case "memory":
            assert isinstance(dataset, ArrayDataset)
            return BatchesAtOnce(dataset, keys)
    if workers == 0:
        return InOneThread(dataset, keys, deadline)
    return WorkerProcesses(dataset, keys, workers, prefetch, deadline)
