"""libjpeg-turbo against Pillow: the same pixels, crops and refusals.

Tolerances, on 8-bit pixels: where the box is decoded at full size, the mean absolute difference
from Pillow and cv2 is at most 2 (fast transform and plain upsampling of colour), and 99 % of pixels
differ by at most 16; where it is decoded at a smaller scale, at most 1.5 and 12 from the image
averaged over blocks of that scale.
"""

from __future__ import annotations

import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from photographs import encoded, kinds, picture, turned

from recipes.data.augmentation import (
    CROP_UNIFORMS,
    Image,
    choose_crop,
    mirror,
    random_resized_crop,
)
from recipes.data.decoding import UnreadableImage, decode
from recipes.data.jpeg import Scratch, decode_exactly, decode_random_crop, read_frame

KINDS = kinds(picture(90, 130))
FAST = [name for name in KINDS if name.startswith("jpeg") and name != "jpeg cmyk"] + ["turned 1"]
SLOW = [name for name in KINDS if name not in FAST]


def uniforms(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(CROP_UNIFORMS)


def cropped(content: bytes, seed: int, size: int) -> Image:
    out = np.full((3, size, size, 3), 77, np.uint8)
    decode_random_crop(content, "x", uniforms(seed), out[1], Scratch())
    assert (out[[0, 2]] == 77).all()  # written in place, and there alone
    result: Image = out[1]
    return result


def difference(a: Image, b: Image) -> np.ndarray:
    return np.abs(a.astype(int) - b)


@pytest.mark.parametrize("name", FAST)
def test_jpegs_take_the_fast_way(name: str) -> None:
    frame = read_frame(KINDS[name])
    assert frame is not None
    assert (frame.height, frame.width) == (90, 130)
    at = frame.height_at
    assert struct.unpack(">HH", KINDS[name][at : at + 4]) == (90, 130)
    assert frame.rows_in_order == (name != "jpeg progressive")


@pytest.mark.parametrize("name", SLOW)
def test_what_needs_more_than_decoding_is_left_to_pillow(name: str) -> None:
    assert read_frame(KINDS[name]) is None
    expected = random_resized_crop(decode(KINDS[name], name), 32, uniforms(4))
    assert (cropped(KINDS[name], 4, 32) == expected).all()


@pytest.mark.parametrize("name", KINDS)
def test_the_exact_way_gives_pillows_pixels(name: str) -> None:
    expected = decode(KINDS[name], name)
    for content in (KINDS[name], memoryview(KINDS[name])):
        assert (decode_exactly(content, name, Scratch()) == expected).all()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FAST), st.integers(0, 1000), st.integers(30, 100))
def test_a_crop_is_the_reference_within_tolerance(name: str, seed: int, size: int) -> None:
    expected = random_resized_crop(decode(KINDS[name], name), size, uniforms(seed))
    apart = difference(cropped(KINDS[name], seed, size), expected)
    box = choose_crop(uniforms(seed)[1:], 90, 130)
    if min(box.height, box.width) < 2 * size:
        assert apart.mean() <= 2
        assert np.quantile(apart, 0.99) <= 16


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([0, 1, 2]), st.booleans(), st.integers(0, 1000), st.integers(8, 60))
def test_a_large_crop_is_that_of_the_averaged_image(
    subsampling: int, progressive: bool, seed: int, size: int
) -> None:
    content = encoded(picture(301, 403, seed), subsampling=subsampling, progressive=progressive)
    image, u = decode(content, "x"), uniforms(seed)
    box = choose_crop(u[1:], *image.shape[:2])
    fits = min(box.height, box.width) // size
    scale = next((scale for scale in (4, 2) if scale <= fits), 1)
    if scale == 1:
        return
    edges = ((0, -image.shape[0] % scale), (0, -image.shape[1] % scale), (0, 0))
    whole = np.pad(image, edges, "edge")
    blocks = whole.reshape(whole.shape[0] // scale, scale, whole.shape[1] // scale, scale, 3)
    # An output pixel's centre lies at the same place of the photograph as in the reference.
    y = (box.top + (np.arange(size) + 0.5) * box.height / size) / scale - 0.5
    x = (box.left + (np.arange(size) + 0.5) * box.width / size) / scale - 0.5
    columns, rows = (axis.astype(np.float32) for axis in np.meshgrid(x, y))
    expected = cv2.remap(
        blocks.mean(axis=(1, 3)).astype(np.float32),
        columns,
        rows,
        interpolation=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )
    expected = mirror(expected) if u[0] < 0.5 else expected
    apart = np.abs(cropped(content, seed, size) - expected)
    assert apart.mean() <= 1.5
    assert np.quantile(apart, 0.99) <= 12


@pytest.mark.parametrize("name", FAST)
def test_rows_below_the_box_make_no_difference(name: str) -> None:
    """The rows that are decoded are those of a decoder that goes on to the end."""
    content = KINDS[name]
    frame = read_frame(content)
    assert frame is not None
    longer = content + b"\0"  # without its end in place, a file is decoded as a whole
    unordered = read_frame(longer)
    assert unordered is not None
    assert not unordered.rows_in_order
    for seed in range(30):
        assert (cropped(content, seed, 33) == cropped(longer, seed, 33)).all()


@pytest.mark.parametrize("name", ["jpeg 4:2:0", "jpeg progressive", "jpeg restarts", "turned 1"])
def test_a_file_cut_short_is_refused_wherever_it_ends(name: str) -> None:
    content = KINDS[name]
    for length in [*range(0, 700, 23), *range(700, len(content) - 2, 97)]:
        with pytest.raises(UnreadableImage):
            cropped(content[:length], 1, 24)
        with pytest.raises(UnreadableImage):
            decode_exactly(content[:length], "x", Scratch())


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_a_damaged_file_is_judged_as_pillow_judges_it(name: str, data: st.DataObject) -> None:
    content = bytearray(KINDS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    damaged = bytes(content)
    try:
        expected: Image | None = decode(damaged, "x")
    except UnreadableImage:
        expected = None
    if expected is None:
        with pytest.raises(UnreadableImage):
            decode_exactly(damaged, "x", Scratch())
    else:
        assert (decode_exactly(damaged, "x", Scratch()) == expected).all()


def test_an_xmp_orientation_counts_too() -> None:
    note = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    content = encoded(picture(40, 60), xmp=note)
    assert decode(content, "x").shape == (60, 40, 3)
    assert decode_exactly(content, "x", Scratch()).shape == (60, 40, 3)
    assert read_frame(encoded(picture(40, 60), xmp=note.replace(b"tiff:", b"exif:"))) is not None


@pytest.mark.parametrize("value", [0, 1, 9, 255])
def test_an_orientation_that_turns_nothing_takes_the_fast_way(value: int) -> None:
    assert read_frame(turned(picture(40, 60), value)) is not None


def test_scratch_is_used_again() -> None:
    scratch = Scratch()
    first = decode_exactly(KINDS["jpeg 4:2:0"], "x", scratch)
    second = decode_exactly(KINDS["jpeg grey"], "x", scratch)
    assert np.shares_memory(first, second)
    assert scratch.of(10) is scratch.of(90 * 130 * 3)


def test_scratch_shrinks_again_after_a_large_image() -> None:
    scratch = Scratch()
    scratch.of(10**8)
    sizes = [len(scratch.of(1000 + number)) for number in range(200)]
    assert sizes[0] == 10**8
    assert sizes[-1] < 2000


def test_scratch_stays_where_large_images_come_again_and_again() -> None:
    scratch = Scratch()
    kept = scratch.of(10**6)
    assert all(scratch.of(10**6 if n % 20 == 0 else 10) is kept for n in range(300))
