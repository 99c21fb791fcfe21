"""Which samples make which batch: pure functions of (size, seed, epoch) and of the topology.

A global batch has the same members on any topology. It is cut in as many contiguous shares as
there are devices times accumulated micro-batches, so one process that accumulates k shares reads
exactly what k processes read. Nothing here imports Paddle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import Config, UserError
from recipes.topology import Place

SampleKey = tuple[int, int]
"""(epoch, index): all that a sample's augmentation depends on, besides the run's seed."""

_ORDER_PURPOSE = 0x6F72646572  # keeps this random stream apart from others of the same seed


class MicroBatch(NamedTuple):
    """What one process reads for one forward and backward pass."""

    keys: list[SampleKey]
    step: int  # global batch within the epoch, from 0
    part: int  # 0 .. accumulate-1; the optimizer steps after the last one
    global_count: int  # samples in the whole global batch, over all ranks and parts


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """The order in which an epoch visits its samples.

    The order sorts `size` raw 64-bit words of a Philox generator that is seeded by
    SeedSequence(purpose, size, seed, epoch). NumPy promises raw words never to change between
    versions (NEP 19), which it does not promise for `Generator.permutation`.

    Returns:
        int64[size], a permutation of 0 .. size-1; ascending without `shuffle`.
    """
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    words = np.random.Philox(np.random.SeedSequence([_ORDER_PURPOSE, size, seed, epoch]))
    return np.argsort(words.random_raw(size), kind="stable").astype(np.int64, copy=False)


def batch_bounds(size: int, global_batch: int) -> NDArray[np.int64]:
    """Where an epoch of `size` samples is cut into global batches.

    All batches hold `global_batch` samples, but a tail smaller than half of that shares with the
    batch before it: the two are made as equal as possible, the larger one first. So no batch is
    smaller than half of the others, which batch statistics and the learning rate rely on.

    Returns:
        int64[steps + 1] with steps = ceil(size / global_batch); batch i is the samples from
        bounds[i] up to, not including, bounds[i + 1].
    """
    steps = math.ceil(size / global_batch)
    bounds = np.minimum(np.arange(steps + 1, dtype=np.int64) * global_batch, size)
    tail = size - (steps - 1) * global_batch
    if steps > 1 and 2 * tail < global_batch:
        bounds[-2] = bounds[-3] + (global_batch + tail + 1) // 2
    return bounds


def share_bounds(count: int, shares: int) -> NDArray[np.int64]:
    """Where `count` samples are cut into contiguous shares whose sizes differ by at most one.

    Returns:
        int64[shares + 1]; the larger shares come first.
    """
    part, larger = divmod(count, shares)
    numbers = np.arange(shares + 1, dtype=np.int64)
    return numbers * part + np.minimum(numbers, larger)


@dataclass(frozen=True)
class Plan:
    """The training batches of one rank.

    Raises:
        UserError: the dataset is smaller than a global batch, or some share of one would be empty.
    """

    size: int  # samples in the dataset
    global_batch: int  # samples per optimizer step, over all ranks
    seed: int
    rank: int
    world_size: int
    accumulate: int = 1  # micro-batches per optimizer step on each rank
    shuffle: bool = True

    def __post_init__(self) -> None:
        shares = self.world_size * self.accumulate
        if self.size < 1:
            raise UserError("the training set is empty", "check dataset.path")
        if self.size < self.global_batch:
            raise UserError(
                f"the training set has {self.size} images, fewer than the {self.global_batch} of "
                "one global batch",
                f"batch_size=null global_batch_size={self.size} or less, or a larger dataset "
                "(is dataset.path the right one?)",
            )
        smallest = int(np.diff(batch_bounds(self.size, self.global_batch)).min())
        if smallest < shares:
            raise UserError(
                f"the training set of {self.size} samples with global_batch_size="
                f"{self.global_batch} has a batch of {smallest}, too few for the {shares} shares "
                f"of {self.world_size} ranks x accumulate={self.accumulate}",
                "use fewer devices, a smaller accumulate, a larger global_batch_size "
                "or a larger dataset",
            )

    @classmethod
    def of(cls, config: Config, size: int, place: Place) -> Plan:
        """The plan of a rank in a configured training.

        Args:
            config: checked, with its batch sizes filled in.
            size: samples in the training set.
            place: the rank.
        """
        assert config.global_batch_size is not None
        return cls(
            size=size,
            global_batch=config.global_batch_size,
            seed=config.seed,
            rank=place.rank,
            world_size=place.world_size,
            accumulate=config.accumulate,
            shuffle=config.dataset.shuffle,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch: ceil(size / global_batch)."""
        return math.ceil(self.size / self.global_batch)

    def micro_batches(self, epoch: int, first_step: int = 0) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an epoch, from global batch `first_step` on.

        Rank r reads shares [r * accumulate, (r + 1) * accumulate) of each global batch, in order.
        """
        order = epoch_order(self.size, self.seed, epoch, self.shuffle)
        bounds = batch_bounds(self.size, self.global_batch)
        for step in range(first_step, self.steps_per_epoch):
            members = order[bounds[step] : bounds[step + 1]]
            cuts = share_bounds(len(members), self.world_size * self.accumulate)
            for part in range(self.accumulate):
                share = self.rank * self.accumulate + part
                indices = members[cuts[share] : cuts[share + 1]].tolist()
                keys = [(epoch, index) for index in indices]
                yield MicroBatch(keys, step, part, len(members))


def evaluation_batches(
    size: int, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[int, range]]:
    """This rank's evaluation batches as (batch number, sample indices).

    The dataset is cut in order, the last batch is short, and batch b belongs to rank
    b % world_size: what a batch holds never depends on the world size, and no sample is read twice.
    A rank may get one batch fewer than another, or none.
    """
    for number in range(rank, math.ceil(size / batch_size), world_size):
        yield number, range(number * batch_size, min((number + 1) * batch_size, size))
