"""Image files to uint8 RGB, whatever their mode."""

from __future__ import annotations

import errno
import io
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps

from recipes import limits
from recipes.config import DatasetConfig
from recipes.data.augmentation import Image
from recipes.printable import printable

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif"})


# What is tried, by what a file holds and not by its name. Others of Pillow's would start programs
# (EPS) or hold images of other sizes than they say.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = DatasetConfig.max_pixels

# Pillow warns of odd EXIF data and large images; what it can decode is good enough. Once for the
# process, since `warnings.catch_warnings` around each call is not for threads.
warnings.filterwarnings("ignore", module=r"PIL\.")
PIL.Image.MAX_IMAGE_PIXELS = None  # dataset.max_pixels is the limit, in every loader


# What a network mount answers while its server does not.
_OF_A_MOUNT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)
_MOST_BYTES_A_PIXEL = 8  # four channels of 16 bits
_LONGEST_MESSAGE = 8192  # characters; a path has half as many
_MOST_BESIDE = 1 << 26  # of a file: headers, colour profiles, previews


class UnreadableImage(Exception):
    """A file that is missing, empty, cut short, or not an image. The message names the path."""

    remedy = "replace or remove the file"
    may_pass = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST_MESSAGE))


class NoAnswer(UnreadableImage):
    """A file whose disk or network mount does not give it, for now."""

    remedy = "see whether its disk or network mount answers"
    may_pass = True


class TooLarge(UnreadableImage):
    """An image that says it has more pixels than the limit, or a file that is longer than any."""

    remedy = "replace or remove the file, or raise dataset.max_pixels"


def read_file(path: str, max_pixels: int = MAX_PIXELS) -> bytes:
    """An image file's content.

    Args:
        max_pixels: of the image; a file that is longer than so many could be is not read.

    Raises:
        UnreadableImage: it is missing, empty, no file or cannot be read, naming the path and the
            reason.
        UserError: this process may open no more files.
    """
    try:
        content = _content(path, max_pixels)
    except OSError as error:
        if (reached := limits.told(error)) is not None:
            raise reached from error  # no fault of the image's
        kind = NoAnswer if error.errno in _OF_A_MOUNT else UnreadableImage
        raise kind(f"{path}: cannot be read: {error.strerror}") from error
    if not content:
        raise UnreadableImage(f"{path}: the file is empty")
    return content


def _content(path: str, max_pixels: int) -> bytes:
    """What `pathlib.Path.read_bytes` gives, by four calls of the system where it takes seven.

    At each of them threads hand over Python's lock, which is what holds many of them back.
    """
    file = _opened(path)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableImage(f"{path}: it is {_kind(status.st_mode)}, not a file")
        size = status.st_size
        if size > max_pixels * _MOST_BYTES_A_PIXEL + _MOST_BESIDE:
            raise TooLarge(
                f"{path}: {size} bytes, more than an image of dataset.max_pixels={max_pixels} has"
            )
        content = os.read(file, size)
        while len(content) < size and (more := os.read(file, size - len(content))):
            content += more  # a call reads 2 GB at most
    finally:
        os.close(file)
    return content


def _opened(path: str) -> int:
    """A file, or what else is there, without waiting for who writes to a FIFO."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except BlockingIOError:  # another program holds a lease on it (fcntl(2)), and is told
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def what_is_at(path: Path) -> str:
    """What a path leads to, in words."""
    try:
        return _kind(path.stat().st_mode)
    except OSError as error:
        return f"nothing that can be looked at ({error.strerror})"


def _kind(mode: int) -> str:
    for holds, words in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if holds(mode):
            return words
    return "something else"


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> Image:
    """Read and decode an image file, see `read_file` and `decode`."""
    return decode(read_file(path, max_pixels), path, max_pixels)


def refuse_large(width: int, height: int, name: str, max_pixels: int) -> None:
    """See that an image is not larger than the limit, before memory is taken for it.

    Raises:
        UnreadableImage: naming `name`.
    """
    if width * height > max_pixels:
        raise TooLarge(
            f"{name}: it says that it has {width} x {height} pixels, more than "
            f"dataset.max_pixels={max_pixels}"
        )


def decode(content: bytes | memoryview, name: str, max_pixels: int = MAX_PIXELS) -> Image:
    """Decode an image file's content.

    Grey, palette, CMYK and 16-bit images become RGB; an alpha channel is dropped, not blended (as
    OpenCV and PaddleClas do); the EXIF orientation is applied (as they do, too). Pillow decodes,
    since it refuses a file that is cut short, where OpenCV fills the rest with grey and goes on.

    Args:
        name: what errors call it.

    Returns:
        uint8[H, W, 3], RGB, contiguous.

    Raises:
        UnreadableImage: naming `name` and the reason.
    """
    try:
        with PIL.Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            refuse_large(*image.size, name, max_pixels)
            return _to_rgb(PIL.ImageOps.exif_transpose(image))
    except UnreadableImage:
        raise
    except PIL.UnidentifiedImageError:
        raise UnreadableImage(f"{name}: not an image that can be read") from None
    except Exception as error:  # Pillow's decoders raise many types on broken input
        raise UnreadableImage(f"{name}: {type(error).__name__}: {error}") from error


def _to_rgb(image: PIL.Image.Image) -> Image:
    if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip at 255
        deep = np.asarray(image).astype(np.int64)
        grey = np.clip(deep >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"), dtype=np.uint8)
