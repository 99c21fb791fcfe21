from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data.randomness import sample_rng, sample_uniforms

words = st.integers(0, 2**64 - 1)


@given(words, words, words)
def test_the_same_key_gives_the_same_numbers(seed: int, epoch: int, index: int) -> None:
    first = sample_rng(seed, epoch, index).random(5)
    assert (first == sample_rng(seed, epoch, index).random(5)).all()


@given(st.tuples(words, words, words), st.tuples(words, words, words))
def test_other_keys_give_other_numbers(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    same = (sample_rng(*a).random(8) == sample_rng(*b).random(8)).all()
    assert same == (a == b)


def test_neighbours_do_not_overlap() -> None:
    """10,000 words from each of 6 neighbouring keys: all different."""
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 0, 1)]
    drawn = np.concatenate([sample_rng(*key).bit_generator.random_raw(10_000) for key in keys])
    assert len(np.unique(drawn)) == len(drawn)


def test_first_numbers_are_uniform_over_samples() -> None:
    first = np.array([sample_rng(3, 1, index).random() for index in range(20_000)])
    counts = np.histogram(first, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # chi-square, 49 degrees, p = 0.001
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.025


@settings(deadline=None)
@given(words, words, st.lists(words, max_size=6), st.sampled_from([1, 22, 50]), st.integers(0, 45))
def test_numbers_for_a_batch_are_those_of_its_samples(
    seed: int, epoch: int, some: list[int], times: int, count: int
) -> None:
    indices = [(index + shift) % 2**64 for index in some for shift in range(times)]
    uniforms = sample_uniforms(seed, epoch, indices, count)
    assert uniforms.shape == (len(indices), count)
    assert uniforms.dtype == np.float64
    for row, index in zip(uniforms, indices, strict=True):
        assert row.tobytes() == sample_rng(seed, epoch, index).random(count).tobytes()


@settings(deadline=None)
@given(words, words, st.lists(words, min_size=128, max_size=140), st.integers(0, 8))
def test_numbers_drawn_together_are_those_of_each_sample(
    seed: int, epoch: int, indices: list[int], count: int
) -> None:
    uniforms = sample_uniforms(seed, epoch, indices, count)
    alone = [sample_rng(seed, epoch, index).random(count) for index in indices]
    assert uniforms.tobytes() == np.stack(alone).tobytes()
