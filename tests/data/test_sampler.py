from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.config import UserError
from recipes.data.sampler import (
    Plan,
    batch_bounds,
    epoch_order,
    evaluation_batches,
    share_bounds,
)

sizes = st.integers(1, 400)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(size, global batch, world size, accumulate) that leave no share empty."""
    world_size, accumulate = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    global_batch = draw(st.integers(2 * world_size * accumulate, 90))
    size = draw(st.integers(global_batch, 400))
    return size, global_batch, world_size, accumulate


def read(size: int, batch: int, world: int, accumulate: int, epoch: int, rank: int) -> list[object]:
    plan = Plan(size, batch, 7, rank, world, accumulate)
    return [(m.step, m.part, m.keys, m.global_count) for m in plan.micro_batches(epoch)]


@given(sizes, st.integers(0, 2**63), st.integers(0, 2**31))
def test_order_is_a_permutation_that_repeats(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))
    assert (order == epoch_order(size, seed, epoch)).all()
    assert epoch_order(size, seed, epoch, shuffle=False).tolist() == list(range(size))


@given(st.integers(50, 400), st.integers(0, 10**6), st.integers(0, 1000))
def test_order_differs_by_epoch_seed_and_size(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed, epoch).tolist()
    assert order != epoch_order(size, seed, epoch + 1).tolist()
    assert order != epoch_order(size, seed + 1, epoch).tolist()
    assert order != epoch_order(size + 1, seed, epoch).tolist()[:size]


def test_order_is_the_documented_one() -> None:
    seeds = np.random.SeedSequence([0x6F72646572, 6, 3, 2])
    words = [int(np.random.Philox(seeds).random_raw(6)[i]) for i in range(6)]
    assert epoch_order(6, 3, 2).tolist() == sorted(range(6), key=words.__getitem__)


def test_order_is_uniform() -> None:
    """Each sample comes first equally often (chi-square, 9 degrees of freedom, fixed seeds)."""
    first = np.bincount([epoch_order(10, 0, epoch)[0] for epoch in range(5000)], minlength=10)
    assert ((first - 500) ** 2 / 500).sum() < 27.9  # p = 0.001


@given(sizes, st.integers(1, 100))
def test_batches_cover_the_epoch_in_ceil_steps(size: int, batch: int) -> None:
    bounds = batch_bounds(size, batch)
    counts = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == size
    assert len(counts) == -(-size // batch)
    assert counts.max() <= batch
    assert (counts[:-2] == batch).all()
    assert 2 * counts.min() >= min(2 * size, batch)
    if len(counts) > 1 and counts[-2] < batch:
        assert counts[-2] - counts[-1] in (0, 1)


@pytest.mark.parametrize(
    ("size", "batch", "counts"),
    [
        (1437, 64, [64] * 21 + [47, 46]),
        (10, 4, [4, 4, 2]),
        (9, 4, [4, 3, 2]),
        (3, 8, [3]),
        (8, 4, [4, 4]),
    ],
)
def test_batch_counts(size: int, batch: int, counts: list[int]) -> None:
    assert np.diff(batch_bounds(size, batch)).tolist() == counts


@given(st.integers(0, 1000), st.integers(1, 40))
def test_shares_are_even(count: int, shares: int) -> None:
    bounds = share_bounds(count, shares)
    sizes = np.diff(bounds).tolist()
    assert bounds[0] == 0
    assert sum(sizes) == count
    assert len(sizes) == shares
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(plans(), st.integers(0, 100))
def test_ranks_partition_the_same_global_batches(
    plan: tuple[int, int, int, int], epoch: int
) -> None:
    size, batch, world, accumulate = plan
    order, bounds = epoch_order(size, 7, epoch), batch_bounds(size, batch)
    steps: list[list[int]] = [[] for _ in range(len(bounds) - 1)]
    for rank in range(world):
        for m in Plan(size, batch, 7, rank, world, accumulate).micro_batches(epoch):
            assert m.keys
            assert {key[0] for key in m.keys} == {epoch}
            assert m.global_count == bounds[m.step + 1] - bounds[m.step]
            steps[m.step] += [index for _, index in m.keys]
    for step, members in enumerate(steps):
        assert sorted(members) == sorted(order[bounds[step] : bounds[step + 1]].tolist())


@settings(deadline=None)
@given(plans(), st.integers(0, 100))
def test_one_process_accumulating_reads_what_many_read(
    plan: tuple[int, int, int, int], epoch: int
) -> None:
    size, batch, world, accumulate = plan
    one = Plan(size, batch, 7, 0, 1, world * accumulate)
    expected = [(m.step, m.part, m.keys) for m in one.micro_batches(epoch)]
    many = sorted(
        (m.step, rank * accumulate + m.part, m.keys)
        for rank in range(world)
        for m in Plan(size, batch, 7, rank, world, accumulate).micro_batches(epoch)
    )
    assert many == expected


@settings(deadline=None)
@given(plans(), st.integers(0, 12), st.integers(0, 5))
def test_resuming_gives_the_rest(plan: tuple[int, int, int, int], first: int, epoch: int) -> None:
    size, batch, world, accumulate = plan
    rank = world - 1
    whole = Plan(size, batch, 7, rank, world, accumulate)
    rest = list(whole.micro_batches(epoch, first))
    assert rest == [m for m in whole.micro_batches(epoch) if m.step >= first]
    assert len(list(whole.micro_batches(epoch))) == whole.steps_per_epoch * accumulate


@given(sizes, st.integers(1, 60), st.integers(1, 6))
def test_evaluation_reads_each_sample_once(size: int, batch: int, world: int) -> None:
    single = dict(evaluation_batches(size, batch, 0, 1))
    split = [pair for rank in range(world) for pair in evaluation_batches(size, batch, rank, world)]
    assert dict(split) == single
    assert len(split) == len(single)
    assert [index for number in sorted(single) for index in single[number]] == list(range(size))


def test_a_share_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match=r"9 samples.*4 shares of 2 ranks x accumulate=2") as error:
        Plan(size=9, global_batch=4, seed=0, rank=0, world_size=2, accumulate=2)
    assert "remedy: use fewer devices" in str(error.value)


def test_a_dataset_smaller_than_a_global_batch_is_refused() -> None:
    Plan(size=8, global_batch=8, seed=0, rank=0, world_size=2)
    with pytest.raises(UserError, match="has 7 images, fewer than the 8 of one global") as error:
        Plan(size=7, global_batch=8, seed=0, rank=0, world_size=2)
    assert "global_batch_size=7 or less" in error.value.remedy


def test_an_empty_training_set_is_refused() -> None:
    with pytest.raises(UserError, match="training set is empty"):
        Plan(size=0, global_batch=8, seed=0, rank=0, world_size=1)


def test_the_sampler_needs_no_paddle() -> None:
    code = (
        "import sys, recipes.data; print(sorted({'paddle', 'cv2', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
