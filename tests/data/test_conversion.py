"""What a shard keeps of an image: as it is, reduced, or encoded anew."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.augmentation import Image
from recipes.data.conversion import Conversion, Stored, is_plain_jpeg, reduced_size
from recipes.data.conversion import convert as convert_with
from recipes.data.decoding import UnreadableImage, decode
from recipes.data.jpeg import Scratch

KEEP_SIZE = Conversion(0, "jpeg", 90, "source")


def smooth(height: int = 60, width: int = 80) -> Image:
    rows, columns = np.mgrid[:height, :width]
    channels = [rows * 200 / height, columns * 200 / width, (rows + columns) % 120 + 60]
    return np.stack(channels, axis=2).astype(np.uint8)


def encoded(kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    adaptive = PIL.Image.Palette.ADAPTIVE  # for mode P
    PIL.Image.fromarray(smooth()).convert(mode, palette=adaptive).save(stream, kind, **options)
    return stream.getvalue()


def convert(content: bytes, name: str, conversion: Conversion) -> Stored:
    return convert_with(content, name, conversion, Scratch())


def turned(orientation: int) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return encoded(exif=exif)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 600))
def test_the_reduced_size_keeps_the_ratio_and_never_grows(
    height: int, width: int, short_side: int
) -> None:
    new_height, new_width = reduced_size(height, width, short_side)
    if short_side == 0 or min(height, width) <= short_side:
        assert (new_height, new_width) == (height, width)
        return
    assert min(new_height, new_width) == short_side
    scale = short_side / min(height, width)
    assert abs(new_height - height * scale) <= 0.5
    assert abs(new_width - width * scale) <= 0.5


@pytest.mark.parametrize("quality", [60, 95])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_a_plain_jpeg_that_is_small_enough_is_kept(quality: int, subsampling: int) -> None:
    content = encoded(quality=quality, subsampling=subsampling)
    for short_side in (0, 60, 61, 1000):
        stored = convert(content, "a", Conversion(short_side, "jpeg", 90, "source"))
        assert stored.content is content
        assert (stored.height, stored.width) == (60, 80)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(encoded("PNG"), id="png"),
        pytest.param(encoded("PNG", "RGBA"), id="alpha"),
        pytest.param(encoded("PNG", "P"), id="palette"),
        pytest.param(encoded("WEBP"), id="webp"),
        pytest.param(encoded(mode="L"), id="grey"),
        pytest.param(encoded(mode="CMYK"), id="cmyk"),
        pytest.param(encoded(progressive=True), id="progressive"),
        *(pytest.param(turned(value), id=f"turned {value}") for value in range(2, 9)),
    ],
)
def test_everything_else_is_encoded_anew_with_the_same_pixels(content: bytes) -> None:
    assert not is_plain_jpeg(content)
    stored = convert(content, "a", KEEP_SIZE)
    assert is_plain_jpeg(stored.content)
    before, after = decode(content, "a"), decode(stored.content, "b")
    assert after.shape == before.shape == (stored.height, stored.width, 3)
    assert np.abs(after.astype(int) - before).mean() < 4


@pytest.mark.parametrize("value", [0, 1])
def test_an_upright_orientation_turns_nothing(value: int) -> None:
    content = turned(value)
    assert convert(content, "a", KEEP_SIZE).content is content


def test_a_large_image_is_reduced_to_the_mean_of_each_area() -> None:
    content = encoded("PNG")
    stored = convert(content, "a", Conversion(30, "raw", 90, "source"))
    pixels = np.frombuffer(stored.content, np.uint8).reshape(stored.height, stored.width, 3)
    means = smooth().reshape(30, 2, 40, 2, 3).mean(axis=(1, 3))
    assert pixels.shape == means.shape
    assert np.abs(pixels - means).max() <= 0.5 + 1e-9
    jpeg = convert(content, "a", Conversion(30, "jpeg", 100, "source"))
    assert np.abs(decode(jpeg.content, "a").astype(int) - means).mean() < 2


def test_raw_pixels_are_those_of_the_decoder() -> None:
    content = encoded()
    stored = convert(content, "a", Conversion(0, "raw", 90, "source"))
    pixels = np.frombuffer(stored.content, np.uint8).reshape(stored.height, stored.width, 3)
    assert (pixels == decode(content, "a")).all()


@pytest.mark.parametrize(
    ("content", "chroma", "expected"),
    [
        (encoded(subsampling=0), "source", "444"),
        (encoded(subsampling=1), "source", "422"),
        (encoded(subsampling=2), "source", "420"),
        (encoded(subsampling=0), "420", "420"),
        (encoded("PNG"), "source", "444"),
        (encoded("PNG"), "420", "420"),
        (encoded(mode="L"), "source", "444"),
        (encoded(mode="CMYK"), "source", "444"),
    ],
)
def test_the_colour_resolution(content: bytes, chroma: str, expected: str) -> None:
    stored = convert(content, "a", Conversion(30, "jpeg", 90, chroma))
    assert simplejpeg.decode_jpeg_header(stored.content)[2:] == ("YCbCr", expected)


def test_quality_decides_the_size() -> None:
    low, high = (convert(encoded(), "a", Conversion(30, "jpeg", q, "source")) for q in (30, 95))
    assert len(low.content) < len(high.content)


@pytest.mark.parametrize("kind", ["jpeg", "raw"])
@pytest.mark.parametrize("content", [b"no image", encoded()[:700], encoded("PNG")[:200]])
def test_a_broken_image_is_named_even_if_it_would_be_kept(content: bytes, kind: str) -> None:
    with pytest.raises(UnreadableImage, match=r"cats/1\.jpg"):
        convert(content, "cats/1.jpg", Conversion(0, kind, 90, "source"))
