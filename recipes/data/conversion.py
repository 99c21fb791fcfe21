"""One source image to what a shard keeps of it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import PIL.Image
import simplejpeg

from recipes.data.augmentation import Image
from recipes.data.decoding import MAX_PIXELS
from recipes.data.jpeg import Scratch, decode_exactly, segments
from recipes.data.jpeg_tiles import interval_for, with_table

_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = (0, 1)  # its values that turn nothing; 0 is what some cameras write for "unknown"
_FINEST = "444"  # every pixel has its own colour
# By colour resolution: OpenCV's sampling factors, and the width of a block in pixels.
_CHROMA = {
    "444": (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444, 8),
    "440": (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440, 8),
    "422": (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422, 16),
    "420": (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, 16),
    "411": (cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411, 32),
}


@dataclass(frozen=True)
class Conversion:
    """How source images are converted.

    Attributes:
        short_side: pixels that the short side is reduced to; 0, or a smaller image: as it is.
        format: "jpeg", or "raw" for pixels.
        quality: of JPEG, 1 to 100.
        chroma: "source" keeps a JPEG's colour resolution (4:4:4 for other formats), "420" halves
            it in both directions.
    """

    short_side: int
    format: str
    quality: int
    chroma: str


class Stored(NamedTuple):
    """An image as a shard keeps it."""

    content: bytes
    height: int
    width: int


def convert(
    content: bytes,
    name: str,
    conversion: Conversion,
    scratch: Scratch,
    max_pixels: int = MAX_PIXELS,
) -> Stored:
    """Convert an image file's content.

    The image is decoded in any case, so that a broken one is found now and not in training. What
    need not change is kept as it is: with format=jpeg, a file that any JPEG decoder gives the same
    upright RGB pixels of, and whose short side is not above `short_side`.

    Args:
        name: what errors call it.
        scratch: of the thread that calls.
        max_pixels: of the image.

    Raises:
        UnreadableImage: naming `name` and the reason.
    """
    pixels = decode_exactly(content, name, scratch, max_pixels)
    height, width = reduced_size(pixels.shape[0], pixels.shape[1], conversion.short_side)
    if conversion.format == "raw":
        return Stored(_reduce(pixels, height, width).tobytes(), height, width)
    if (height, width) == pixels.shape[:2] and is_plain_jpeg(content):
        return Stored(content, height, width)
    chroma = "420" if conversion.chroma == "420" else _chroma(content)
    encoded = _encode(_reduce(pixels, height, width), conversion.quality, chroma)
    return Stored(encoded, height, width)


def reduced_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """The size in pixels after reducing the short side to `short_side`; never larger than before.

    The long side follows in proportion, rounded to whole pixels.
    """
    short = min(height, width)
    if not 0 < short_side < short:
        return height, width
    # Whole numbers: the same result everywhere.
    long = (max(height, width) * short_side * 2 + short) // (2 * short)
    return (short_side, long) if height <= width else (long, short_side)


def is_plain_jpeg(content: bytes) -> bool:
    """Whether it is a sequential 8-bit JPEG of three colours that is not to be turned."""
    with PIL.Image.open(io.BytesIO(content)) as image:
        return (
            image.format == "JPEG"
            and image.mode == "RGB"
            and not image.info.get("progressive")
            and image.getexif().get(_ORIENTATION, 1) in _UPRIGHT
        )


def _reduce(image: Image, height: int, width: int) -> Image:
    """Each new pixel is the mean of the area that it covers, so that nothing is aliased."""
    if image.shape[:2] == (height, width):
        return image
    reduced = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(reduced, np.uint8)


def _encode(image: Image, quality: int, chroma: str) -> bytes:
    """A JPEG of which a part can be decoded by itself, see `recipes.data.jpeg_tiles`."""
    sampling, block = _CHROMA[chroma]
    options = {
        cv2.IMWRITE_JPEG_QUALITY: quality,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: sampling,
        cv2.IMWRITE_JPEG_RST_INTERVAL: interval_for(image.shape[1], block),
    }
    flat = [number for option in options.items() for number in option]
    _, encoded = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), flat)
    content = encoded.tobytes()
    return with_table(content, segments(memoryview(content)))


def _chroma(content: bytes) -> str:
    """The colour resolution of a JPEG; the finest where there is none to keep."""
    try:
        _, _, colours, chroma = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return _FINEST
    return chroma if colours == "YCbCr" and chroma in _CHROMA else _FINEST
