"""Batches made at once against samples made one by one, and Cutout against the paper's words."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data.arrays import ArrayDataset
from recipes.data.augmentation import (
    CUTOUT_UNIFORMS,
    SHIFT_UNIFORMS,
    Box,
    choose_cutout,
    choose_shift,
    choose_shifts,
)
from recipes.data.base import stack

units = st.floats(0, 1, exclude_max=True)


def dataset(
    size: int, image_size: int, pad: int | None, flips: bool, cutout: int, seed: int = 3
) -> ArrayDataset:
    rng = np.random.default_rng(size)
    return ArrayDataset(
        name="noise",
        images=rng.integers(0, 256, (9, size, size, 3), dtype=np.uint8),
        labels=np.arange(9, dtype=np.int64) % 4,
        classes=list("abcd"),
        mean=np.array([10.4, 20.6, 250.0], np.float32),
        std=np.ones(3, np.float32),
        image_size=image_size,
        seed=seed,
        pad=pad,
        flips=flips,
        cutout=cutout,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(4, 9),
    st.integers(4, 9),
    st.none() | st.integers(0, 4),
    st.booleans(),
    st.integers(0, 12),
    st.lists(st.integers(0, 8), min_size=1, max_size=12),
    st.integers(0, 2**64 - 1),
)
def test_a_batch_is_its_samples(
    size: int,
    image_size: int,
    pad: int | None,
    flips: bool,
    cutout: int,
    indices: list[int],
    epoch: int,
) -> None:
    data = dataset(size, image_size, pad, flips, cutout)
    before = data.images.copy()
    batch = data.batch(epoch, indices)
    alone = stack([data[epoch, index] for index in indices])
    for field in batch._fields:
        ours, expected = getattr(batch, field), getattr(alone, field)
        assert ours.dtype == expected.dtype
        assert ours.shape == expected.shape
        assert ours.tobytes() == expected.tobytes()
    batch.images[...] = 0
    assert (data.images == before).all()


@given(st.lists(st.tuples(units, units, units), min_size=1), st.integers(0, 8), st.booleans())
def test_shifts_are_chosen_as_one_by_one(
    uniforms: list[tuple[float, float, float]], pad: int, flips: bool
) -> None:
    together = choose_shifts(np.array(uniforms), pad, flips)
    alone = [choose_shift(np.array(row), pad, flips) for row in uniforms]
    assert list(zip(*(field.tolist() for field in together), strict=True)) == alone


@given(units, units, st.integers(1, 20), st.integers(1, 12), st.integers(1, 12))
def test_cutout_covers_the_square_around_its_centre(
    u: float, v: float, side: int, height: int, width: int
) -> None:
    box = choose_cutout(np.array([u, v]), side, height, width)
    covered = {
        (y, x)
        for y in range(box.top, box.top + box.height)
        for x in range(box.left, box.left + box.width)
    }
    y0, x0 = int(u * height) - side // 2, int(v * width) - side // 2
    assert covered == {
        (y, x)
        for y in range(height)
        for x in range(width)
        if y0 <= y < y0 + side and x0 <= x < x0 + side
    }
    assert (int(u * height), int(v * width)) in covered


def test_cutout_fills_one_square_with_the_mean_colour_and_leaves_the_shift_as_it_was() -> None:
    plain, cut = (dataset(8, 8, 2, True, cutout) for cutout in (0, 4))
    areas = []
    for epoch in range(50):
        a, b = (data.batch(epoch, list(range(9))).images for data in (plain, cut))
        for before, after in zip(a, b, strict=True):
            changed = (before != after).any(axis=2)
            assert (after[changed] == [10, 21, 250]).all()
            rows, columns = np.nonzero(changed)
            areas.append(changed.sum())
            assert np.ptp(rows) < 4
            assert np.ptp(columns) < 4
    assert max(areas) == 16
    assert 4 <= min(areas) < 16  # cut off at a corner


def test_cutout_centres_are_spread_evenly() -> None:
    places = np.random.default_rng(0).random((8000, CUTOUT_UNIFORMS))
    boxes = [choose_cutout(place, 1, 4, 4) for place in places]
    counts = np.unique([box.top * 4 + box.left for box in boxes], return_counts=True)[1]
    assert all(box == Box(box.top, box.left, 1, 1) for box in boxes)
    assert len(counts) == 16
    assert ((counts - 500) ** 2 / 500).sum() < 37.7  # chi-square, 15 degrees, p = 0.001


def test_held_out_images_are_as_they_are() -> None:
    data = dataset(6, 6, None, True, cutout=3)
    assert (data.batch(5, [4, 2]).images == data.images[[4, 2]]).all()


def test_epochs_and_seeds_differ() -> None:
    views = [
        dataset(8, 8, 4, True, 0, seed).batch(epoch, list(range(9))).images.tobytes()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(a != b for a, b in pairwise([*views, views[0]]))
    assert SHIFT_UNIFORMS == 3  # results on record rest on it
