"""Cutting a JPEG: the pixels are those of the whole image, whatever its blocks and the box."""

from __future__ import annotations

import io

import cv2
import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recipes.data.augmentation import CROP_UNIFORMS, Box
from recipes.data.conversion import _CHROMA, _encode
from recipes.data.jpeg import Scratch, decode_random_crop, segments
from recipes.data.jpeg_tiles import Cut, cut, interval_for, with_table

SAMPLINGS = _CHROMA


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Noise on a gradient: many different coefficients in every block."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    base = np.stack([rows * 3, columns * 2, rows + columns], axis=2) % 256
    return np.clip(base + rng.normal(0, 20, base.shape), 0, 255).astype(np.uint8)


def encoded(image: np.ndarray, chroma: str, interval: int, quality: int = 90) -> bytes:
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_RST_INTERVAL, interval]
    if chroma != "Gray":
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[chroma][0]]
    content: bytes = cv2.imencode(".jpg", image, options)[1].tobytes()
    return content


def decoded(content: bytes | bytearray) -> np.ndarray:
    pixels: np.ndarray = simplejpeg.decode_jpeg(
        bytes(content), "RGB", fastdct=True, fastupsample=True
    )
    return pixels


def cut_out(content: bytes, box: Box) -> Cut | None:
    return cut(content, segments(memoryview(content)), box)


@st.composite
def boxes(draw: st.DrawFn, height: int, width: int) -> Box:
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    return Box(top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), chroma=st.sampled_from([*SAMPLINGS, "Gray"]), seed=st.integers(0, 99))
def test_a_part_has_the_pixels_of_the_whole(data: st.DataObject, chroma: str, seed: int) -> None:
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 150))
    block = 8 if chroma == "Gray" else SAMPLINGS[chroma][1]
    blocks = -(-width // block)
    interval = data.draw(st.sampled_from([n for n in range(1, blocks + 1) if blocks % n == 0]))
    image = picture(height, width, seed)
    content = encoded(image[:, :, 0] if chroma == "Gray" else image, chroma, interval)
    box = data.draw(boxes(height, width))
    part = cut_out(content, box)
    if part is None:  # an encoder leaves markers out that part nothing
        assert height <= 16
        assert interval == blocks
        return
    assert part.top <= box.top <= box.top + box.height <= part.top + part.height <= height
    assert part.left <= box.left <= box.left + box.width <= part.left + part.width <= width
    assert (part.top % 8, part.left % block) == (0, 0)
    whole = decoded(content)
    there = whole[part.top : part.top + part.height, part.left : part.left + part.width]
    assert (decoded(part.content) == there).all()
    # A table of the tiles says what looking for them finds.
    tabled = with_table(content, segments(memoryview(content)))
    assert len(tabled) > len(content)
    assert (decoded(tabled) == whole).all()
    same = cut_out(tabled, box)
    assert same is not None
    assert same[1:] == part[1:]
    assert (decoded(same.content) == there).all()


def test_no_more_tiles_than_the_box_needs() -> None:
    content = encoded(picture(160, 320, 0), "420", 2)  # tiles of 16x32
    part = cut_out(content, Box(40, 70, 30, 60))
    assert part is not None
    assert part[1:] == (32, 64, 48, 96)
    assert len(part.content) < len(content) / 4
    whole = cut_out(content, Box(0, 0, 160, 320))
    assert whole is not None
    assert bytes(whole.content) == content


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.tuples(st.integers(8, 200), st.integers(8, 200)),
    side=st.sampled_from([4, 8, 24, 64]),
    chroma=st.sampled_from(list(SAMPLINGS)),
)
def test_a_random_crop_is_the_same_with_markers_and_without(
    seed: int, size: tuple[int, int], side: int, chroma: str
) -> None:
    image = picture(*size, seed % 100)
    uniforms = np.random.default_rng(seed).random(CROP_UNIFORMS)
    crops = []
    for interval in (0, interval_for(size[1], SAMPLINGS[chroma][1])):
        out = np.zeros((side, side, 3), np.uint8)
        decode_random_crop(encoded(image, chroma, interval), "a", uniforms, out, Scratch())
        crops.append(out)
    # Where a large box is decoded to a smaller size first, it is sampled between pixels, and how
    # OpenCV rounds depends on where in the image that is.
    assert np.abs(crops[0].astype(int) - crops[1]).max() <= 1


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32]))
def test_rows_have_whole_tiles(width: int, block: int) -> None:
    interval = interval_for(width, block)
    blocks = -(-width // block)
    assert 1 <= interval <= 4
    assert blocks % interval == 0
    assert blocks == 1 or interval < blocks


@pytest.mark.parametrize("chroma", list(SAMPLINGS))
def test_shards_keep_jpegs_in_tiles(chroma: str) -> None:
    for width in (331, 368, 427):
        content = _encode(picture(60, width, 1), 90, chroma)
        part = cut_out(content, Box(20, 40, 10, 10))
        assert part is not None
        assert part.width <= 4 * SAMPLINGS[chroma][1] * 2


def test_a_jpeg_without_regular_markers_is_left_whole() -> None:
    image, box = picture(64, 80, 3), Box(0, 0, 8, 8)
    assert cut_out(encoded(image, "420", 0), box) is None
    assert cut_out(encoded(image, "420", 3), box) is None  # rows have five blocks
    tiled = encoded(image, "420", 1)
    assert cut_out(tiled, box) is not None
    assert cut_out(tiled[:-2], box) is None  # cut short
    assert cut_out(tiled[: len(tiled) // 2] + b"\xff\xd9", box) is None
    gap = tiled.index(b"\xff\xd3", 600)
    assert cut_out(tiled[:gap] + tiled[gap + 2 :], box) is None  # a marker is missing


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_header_or_scan_is_no_more_than_an_error(place: int, value: int) -> None:
    content = bytearray(encoded(picture(64, 80, 3), "420", 1))
    place %= len(content)
    assume(content[place] != value)
    content[place] = value
    try:
        part = cut_out(bytes(content), Box(20, 20, 30, 30))
    except (ValueError, IndexError):
        return
    if part is not None:
        assert part.content[-2:] == b"\xff\xd9"
        assert len(part.content) <= len(content)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 19), st.integers(0, 255))
def test_a_table_that_is_wrong_is_not_followed(place: int, value: int) -> None:
    content = encoded(picture(64, 80, 3), "420", 1)
    tabled = bytearray(with_table(content, segments(memoryview(content))))
    at = tabled.index(b"tiles\0") + 6 + 2 * place + 1
    assume(tabled[at] != value)
    tabled[at] = value
    box = Box(20, 20, 30, 30)
    part = cut_out(bytes(tabled), box)
    assert part is None


@pytest.mark.parametrize("table", [False, True])
def test_pillow_reads_what_is_cut(table: bool) -> None:
    content = encoded(picture(64, 80, 3), "420", 1)
    if table:
        content = with_table(content, segments(memoryview(content)))
        PIL.Image.open(io.BytesIO(content)).verify()
    part = cut_out(content, Box(20, 20, 30, 30))
    assert part is not None
    with PIL.Image.open(io.BytesIO(part.content)) as image:
        assert image.size == (part.width, part.height)
        assert np.abs(np.asarray(image).astype(int) - decoded(part.content)).mean() < 5
