"""JPEG by libjpeg-turbo, for training and evaluation at speed.

What it cannot do as well as Pillow is left to `decoding.decode`, which has the last word on every
file: one that is not a JPEG, whose EXIF data turns it, that is CMYK, or that libjpeg-turbo
complains about (a damaged one, too). Every function may run in any thread, and decoding lets
other threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cv2
import numpy as np
import PIL.Image
import simplejpeg
from numpy.typing import NDArray

from recipes.data.augmentation import Box, Image, choose_crop, crop, random_resized_crop
from recipes.data.decoding import MAX_PIXELS, decode, refuse_large
from recipes.data.jpeg_tiles import RESTART_INTERVAL, cut

_COLOURS = ("YCbCr", "RGB", "Gray")  # what becomes RGB without a colour profile or inversion
# Those that libjpeg-turbo has fast code for. At an eighth, colour that is stored at half the width
# alone (4:2:2) would be blurred.
_SCALES = (4, 2)
_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = range(2, 9)  # its values that turn or mirror
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_START_OF_IMAGE, _END_OF_IMAGE = b"\xff\xd8", b"\xff\xd9"
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15
_SEQUENTIAL = (0xC0, 0xC1)  # baseline and extended, Huffman-coded
_LOOK_EVERY = 64  # images
_BLOCK = 16  # rows that are coded together, at most


class Scratch:
    """Memory for one decoded image, for one thread, used again and again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._asked, self._most = 0, 0  # how often, and at most for how much, since the last look

    def of(self, count: int) -> NDArray[np.uint8]:
        """At least `count` bytes: uint8[n]. What was in them before is lost.

        One large image among small ones does not leave its memory here for good.
        """
        self._asked, self._most = self._asked + 1, max(self._most, count)
        too_large = False
        if self._asked == _LOOK_EVERY:
            too_large = len(self._memory) > 2 * self._most
            self._asked, self._most = 0, count
        if len(self._memory) < count or too_large:
            self._memory = np.empty(0, np.uint8)  # given back before more is taken
            self._memory = np.empty(count, np.uint8)
        return self._memory


class Frame(NamedTuple):
    """What a JPEG's header says, where its pixels need no more than decoding."""

    height: int
    width: int
    height_at: int  # where in the file the height stands, as two bytes
    rows_in_order: bool  # the whole file is one sequential frame, with its end
    tiled: bool  # it has restart markers
    colours: str  # as they are kept: YCbCr, RGB or Gray


def decode_exactly(
    content: bytes | memoryview, name: str, scratch: Scratch, max_pixels: int = MAX_PIXELS
) -> Image:
    """The pixels of `decoding.decode`, bit for bit, and its errors; faster for a JPEG.

    Returns:
        uint8[H, W, 3], RGB, contiguous; perhaps in `scratch`.
    """
    frame = read_frame(content)
    if frame is not None:
        refuse_large(frame.width, frame.height, name, max_pixels)
        try:
            buffer = scratch.of(frame.height * frame.width * 3)
            image: Image = simplejpeg.decode_jpeg(content, "RGB", buffer=buffer)
            return image
        except ValueError:
            pass  # Pillow judges
    return decode(content, name, max_pixels)


def decode_random_crop(
    content: bytes | memoryview,
    name: str,
    uniforms: NDArray[np.float64],
    out: Image,
    scratch: Scratch,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """`augmentation.random_resized_crop` of a file's content, within the decoder's tolerance.

    The box and the mirroring are the same. The pixels differ by libjpeg-turbo's fast transform
    and upsampling of colour, and where the box has at least twice the pixels of `out` on both
    sides, by decoding to a half or a quarter of the size first. So a large photograph is
    low-passed before it is sampled, which `augmentation.resize` does not do.

    Args:
        uniforms: float64[CROP_UNIFORMS] in [0, 1).
        out: uint8[size, size, 3], contiguous; takes the result.

    Raises:
        UnreadableImage: as `decode`.
    """
    frame = read_frame(content)
    if frame is not None:
        refuse_large(frame.width, frame.height, name, max_pixels)
        box = choose_crop(uniforms[1:], frame.height, frame.width)
        try:
            scale = _scale(box, len(out))
            part, frame, moved = _cut_out(content, frame, box, scale)
            image = _decode_above(part, frame, moved, scale, scratch)
        except ValueError:
            pass  # Pillow judges
        else:
            _sample(image, moved, scale, out)
            if uniforms[0] < 0.5:
                cv2.flip(out, 1, dst=out)
            return
    out[...] = random_resized_crop(decode(content, name, max_pixels), len(out), uniforms)


def _scale(box: Box, side: int) -> int:
    """By how much smaller a JPEG may be decoded: the box keeps at least `side` on each side."""
    shrunk = min(box.height, box.width) // side
    return next((scale for scale in _SCALES if scale <= shrunk), 1)


def _cut_out(
    content: bytes | memoryview, frame: Frame, box: Box, scale: int
) -> tuple[bytes | bytearray | memoryview, Frame, Box]:
    """Of a JPEG in tiles, those that the box lies in: a smaller JPEG and the box in it."""
    if not frame.tiled:
        return content, frame, box
    # Where the colours of a smaller image are smoothed, the pixels around the box count.
    rim = 0 if scale == 1 else 2 * scale
    top, left = max(0, box.top - rim), max(0, box.left - rim)
    bottom = min(frame.height, box.top + box.height + rim)
    right = min(frame.width, box.left + box.width + rim)
    whole = Box(top, left, bottom - top, right - left)
    part = cut(content, segments(memoryview(content)), whole)
    if part is None:
        return content, frame, box
    frame = frame._replace(height=part.height, width=part.width)
    return part.content, frame, box._replace(top=box.top - part.top, left=box.left - part.left)


def _decode_above(
    content: bytes | bytearray | memoryview, frame: Frame, box: Box, scale: int, scratch: Scratch
) -> Image:
    """A JPEG down to the lower edge of the box, at a `scale`th of its size."""
    rows = frame.height
    if frame.rows_in_order:
        rows = min(rows, -(-(box.top + box.height) // _BLOCK) * _BLOCK)
    lowered = rows < frame.height
    height, width = -(-rows // scale), -(-frame.width // scale)
    image: Image = simplejpeg.decode_jpeg(
        _lower(content, frame, rows) if lowered else content,
        "RGB",
        fastdct=True,
        fastupsample=scale == 1,
        min_height=height,
        min_width=width,
        buffer=scratch.of(height * width * 3),
        strict=not lowered,
    )
    return image


def _sample(image: Image, box: Box, scale: int, out: Image) -> None:
    """`augmentation.resize` of the box to the size of `out`, from an image `scale` times smaller.

    Pixel i of the smaller image stands for those from i * scale on, so the box's edges may lie
    between its pixels.
    """
    if scale == 1:
        cv2.resize(crop(image, box), out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
        return
    step_x, step_y = (length / (len(out) * scale) for length in (box.width, box.height))
    x, y = box.left / scale + step_x / 2 - 0.5, box.top / scale + step_y / 2 - 0.5
    cv2.warpAffine(
        image,
        np.array([[step_x, 0, x], [0, step_y, y]]),
        out.shape[1::-1],
        dst=out,
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )


def _lower(content: bytes | bytearray | memoryview, frame: Frame, rows: int) -> bytearray:
    """The same JPEG said to have fewer rows, so that no more are decoded.

    The decoder then complains of superfluous data, so only its grave errors can count; but that the
    file was not cut short, which is what else it would complain of, its end has shown.
    """
    lowered = bytearray(content)
    lowered[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    return lowered


def read_frame(content: bytes | memoryview) -> Frame | None:
    """The header of an upright JPEG in colours that libjpeg-turbo makes RGB; None for all else.

    An EXIF or XMP orientation is read as Pillow reads it.
    """
    if bytes(content[:2]) != _START_OF_IMAGE:
        return None
    view, height_at, in_order, tiled = memoryview(content), 0, False, False
    try:
        for marker, place, end in segments(view):
            if marker in _FRAMES:
                height_at, in_order = place + 1, marker in _SEQUENTIAL and height_at == 0
            elif marker == RESTART_INTERVAL:
                tiled = True
            elif marker == _APP1 and _turns(bytes(view[place:end])):
                return None
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, IndexError):  # not a whole header
        return None
    if colours not in _COLOURS or height_at == 0:
        return None
    in_order = in_order and bytes(view[-2:]) == _END_OF_IMAGE
    return Frame(int(height), int(width), height_at, in_order, tiled, colours)


def segments(content: memoryview) -> Iterator[tuple[int, int, int]]:
    """The segments before the first scan: marker, and where its content starts and ends.

    Source: ITU-T T.81, B.1.1.4 and B.1.1.2.

    Raises:
        ValueError, IndexError: the content is not made of segments, or ends among them.
    """
    place = 2
    while (marker := content[place + 1]) != _START_OF_SCAN:
        if content[place] != 0xFF or marker in (0x00, 0xFF):
            raise ValueError("no marker where one has to be")
        end = place + 2 + (content[place + 2] << 8 | content[place + 3])
        yield marker, place + 4, end
        place = end


def _turns(segment: bytes) -> bool:
    """Whether EXIF or XMP data ask for turning or mirroring the image, or might."""
    if segment.startswith(_XMP):
        return b"tiff:Orientation" in segment
    if not segment.startswith(_EXIF):
        return False
    tag = _ORIENTATION.to_bytes(2, "big")
    if tag not in segment and tag[::-1] not in segment:
        return False
    exif = PIL.Image.Exif()
    try:
        exif.load(segment)
    except Exception:  # Pillow's parser raises many types on broken data
        return True
    return exif.get(_ORIENTATION) in _TURNS
