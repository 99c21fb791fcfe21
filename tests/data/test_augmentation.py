"""Each augmentation against a slow, independent one on the same numbers, and its statistics."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipes.data.augmentation import (
    CROP_UNIFORMS,
    SHIFT_UNIFORMS,
    Box,
    Image,
    central_crop,
    choose_crop,
    choose_shift,
    crop,
    random_resized_crop,
    resize,
    shift,
)
from recipes.data.randomness import sample_rng


def noise(seed: int, height: int, width: int) -> Image:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> Image:
    rows, columns = np.mgrid[:height, :width]
    channels = [127 + 120 * np.sin(rows / 9 + k) * np.cos(columns / 11 - k) for k in range(3)]
    return np.stack(channels, axis=2).astype(np.uint8)


def slow_resize(image: Image, height: int, width: int) -> NDArray[np.float64]:
    """Bilinear between the four nearest pixel centres, pixel by pixel."""
    rows, columns = image.shape[:2]
    out = np.zeros((height, width, 3))
    for y in range(height):
        for x in range(width):
            fy = min(max((y + 0.5) * rows / height - 0.5, 0.0), rows - 1.0)
            fx = min(max((x + 0.5) * columns / width - 0.5, 0.0), columns - 1.0)
            y0, x0 = math.floor(fy), math.floor(fx)
            y1, x1 = min(y0 + 1, rows - 1), min(x0 + 1, columns - 1)
            top = image[y0, x0] * (1 - (fx - x0)) + image[y0, x1] * (fx - x0)
            bottom = image[y1, x0] * (1 - (fx - x0)) + image[y1, x1] * (fx - x0)
            out[y, x] = top * (1 - (fy - y0)) + bottom * (fy - y0)
    return out


def slow_shift(image: Image, pad: int, u: list[float], flips: bool) -> list[list[list[int]]]:
    height, width = image.shape[:2]
    down = math.floor(u[0] * (2 * pad + 1)) - pad
    right = math.floor(u[1] * (2 * pad + 1)) - pad
    out = []
    for y in range(height):
        row = []
        for x in range(width):
            across = width - 1 - x if flips and u[2] < 0.5 else x
            sy, sx = y + down, across + right
            inside = 0 <= sy < height and 0 <= sx < width
            row.append(image[sy, sx].tolist() if inside else [0, 0, 0])
        out.append(row)
    return out


def slow_crop_box(u: list[float], height: int, width: int) -> tuple[int, int, int, int]:
    """(y, x, height, width) after Inception's description, written down on its own."""
    for attempt in range(10):
        a, r, y, x = u[4 * attempt : 4 * attempt + 4]
        wanted = (0.08 + 0.92 * a) * height * width
        aspect = (3 / 4) * ((4 / 3) / (3 / 4)) ** r
        w, h = round((wanted * aspect) ** 0.5), round((wanted / aspect) ** 0.5)
        if 1 <= w <= width and 1 <= h <= height:
            return math.floor(y * (height - h + 1)), math.floor(x * (width - w + 1)), h, w
    if 4 * width < 3 * height:
        h, w = max(1, round(width / 0.75)), width
    elif 3 * width > 4 * height:
        h, w = height, max(1, round(height * 4 / 3))
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


def two_sample_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The Kolmogorov-Smirnov statistic: the largest gap between two empirical distributions."""
    points = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def distance_from_uniform(a: NDArray[np.float64]) -> float:
    """The same, of one sample from the uniform distribution on [0, 1]."""
    values, count = np.sort(a), len(a)
    steps = np.arange(count + 1) / count
    return float(max((steps[1:] - values).max(), (values - steps[:-1]).max()))


KS_P001 = 1.95  # over the root of the count: the critical distance at p = 0.001

uniforms = st.floats(0, 1, exclude_max=True)


@settings(deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 4),
    st.lists(uniforms, min_size=SHIFT_UNIFORMS, max_size=SHIFT_UNIFORMS),
    st.booleans(),
)
def test_shift_is_the_slow_one(size: int, pad: int, u: list[float], flips: bool) -> None:
    image = noise(size, size, size)
    fast = shift(image, pad, choose_shift(np.array(u), pad, flips))
    assert fast.tolist() == slow_shift(image, pad, u, flips)


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.lists(uniforms, min_size=CROP_UNIFORMS - 1, max_size=CROP_UNIFORMS - 1),
)
def test_crop_box_fits(height: int, width: int, u: list[float]) -> None:
    box = choose_crop(np.array(u), height, width)
    assert box.top >= 0
    assert box.left >= 0
    assert box.top + box.height <= height
    assert box.left + box.width <= width
    assert min(box.height, box.width) >= 1


def test_crop_boxes_are_the_slow_ones_for_real_random_numbers() -> None:
    for index in range(500):
        u = sample_rng(1, 2, index).random(CROP_UNIFORMS - 1)
        assert tuple(choose_crop(u, 375, 500)) == slow_crop_box(u.tolist(), 375, 500)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (10, 1000, Box(0, 493, 10, 13)),
        (1000, 10, Box(493, 0, 13, 10)),
    ],
)
def test_an_image_too_narrow_for_any_attempt_gives_its_centre(
    height: int, width: int, box: Box
) -> None:
    assert choose_crop(np.full(CROP_UNIFORMS - 1, 0.99), height, width) == box


@pytest.mark.parametrize("out", [(7, 13), (40, 24), (64, 64)])
def test_resize_is_bilinear(out: tuple[int, int]) -> None:
    image = noise(5, 31, 22)
    difference = np.abs(resize(image, *out) - slow_resize(image, *out))
    assert difference.max() <= 1.5  # cv2 computes in fixed point


def test_random_resized_crop_is_the_slow_one() -> None:
    image = smooth(75, 100)
    flips = 0
    for index in range(8):
        u = sample_rng(9, 0, index).random(CROP_UNIFORMS)
        y, x, h, w = slow_crop_box(u[1:].tolist(), 75, 100)
        expected = slow_resize(image[y : y + h, x : x + w], 24, 24)
        if u[0] < 0.5:
            flips += 1
            expected = expected[:, ::-1]
        assert np.abs(random_resized_crop(image, 24, u) - expected).max() <= 1.5
    assert 0 < flips < 8


@pytest.mark.parametrize("shape", [(75, 100), (100, 75), (256, 256), (10, 7)])
def test_central_crop_is_the_middle_of_the_resized_image(shape: tuple[int, int]) -> None:
    image = smooth(*shape)
    out = central_crop(image, 28)
    assert out.shape == (28, 28, 3)
    scale = 32 / min(shape)
    height, width = round(shape[0] * scale), round(shape[1] * scale)
    top, left = (height - 28) // 2, (width - 28) // 2
    expected = slow_resize(image, height, width)[top : top + 28, left : left + 28]
    assert np.abs(out - expected).max() <= 1.5


def test_shifts_and_flips_are_uniform() -> None:
    choices = [
        choose_shift(sample_rng(0, 0, i).random(SHIFT_UNIFORMS), 4, True) for i in range(16_200)
    ]
    cells = np.bincount([c.top * 9 + c.left for c in choices], minlength=81)
    assert len(cells) == 81
    assert ((cells - 200) ** 2 / 200).sum() < 124.8  # chi-square, 80 degrees, p = 0.001
    assert abs(np.mean([c.flip for c in choices]) - 0.5) < 0.013  # 3.3 standard deviations


def test_crops_have_the_distribution_of_a_simulation() -> None:
    """Area, aspect ratio and place on a 375x500 image, against draws by Python's own generator."""
    height, width, count = 375, 500, 4000
    boxes = [
        choose_crop(sample_rng(4, 0, i).random(CROP_UNIFORMS)[1:], height, width)
        for i in range(count)
    ]
    other = random.Random(11)
    simulated = [
        Box(*slow_crop_box([other.random() for _ in range(40)], height, width))
        for _ in range(count)
    ]
    ours, theirs = (
        np.array(
            [
                (
                    b.height * b.width,
                    b.width / b.height,
                    b.top / (height - b.height + 1),
                    b.left / (width - b.width + 1),
                )
                for b in which
            ]
        )
        for which in (boxes, simulated)
    )
    for feature in range(4):
        assert two_sample_distance(ours[:, feature], theirs[:, feature]) < KS_P001 * math.sqrt(
            2 / count
        )


def test_small_crops_are_uniform_in_area_and_in_log_ratio() -> None:
    """Up to 0.7 of a square every ratio fits, so nothing is rejected there."""
    side = 2000
    boxes = [
        choose_crop(sample_rng(5, 0, i).random(CROP_UNIFORMS - 1), side, side) for i in range(4000)
    ]
    areas = np.array([b.height * b.width / side**2 for b in boxes])
    ratios = np.array([math.log(b.width / b.height) for b in boxes])
    small = (areas > 0.081) & (areas < 0.7)
    assert small.sum() > 2000
    limit = KS_P001 / math.sqrt(small.sum())
    half = math.log(4 / 3)
    assert distance_from_uniform((areas[small] - 0.081) / 0.619) < limit
    assert distance_from_uniform((ratios[small] + half) / (2 * half)) < limit


def test_crop_is_the_rectangle() -> None:
    image = noise(0, 6, 5)
    assert (crop(image, Box(1, 2, 3, 2)) == image[1:4, 2:4]).all()
