"""Image files to uint8 RGB, whatever their mode."""

from __future__ import annotations

import io
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps

from recipes.data.augmentation import Image

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif"})


# Pillow warns of odd EXIF data and large images; what it can decode is good enough. Once for the
# process, since `warnings.catch_warnings` around each call is not for threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableImage(Exception):
    """A file that is missing, empty, cut short, or not an image. The message names the path."""

    remedy = "replace or remove the file"


def read_file(path: str) -> bytes:
    """An image file's content.

    Raises:
        UnreadableImage: it is missing, empty, no file or cannot be read, naming the path and the
            reason.
    """
    try:
        content = _content(path)
    except OSError as error:
        raise UnreadableImage(f"{path}: cannot be read: {error.strerror}") from error
    if not content:
        raise UnreadableImage(f"{path}: the file is empty")
    return content


def _content(path: str) -> bytes:
    """What `pathlib.Path.read_bytes` gives, by four calls of the system where it takes seven.

    At each of them threads hand over Python's lock, which is what holds many of them back.
    """
    file = _opened(path)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableImage(f"{path}: it is {_kind(status.st_mode)}, not a file")
        size = status.st_size
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


def read_image(path: str) -> Image:
    """Read and decode an image file, see `read_file` and `decode`."""
    return decode(read_file(path), path)


def decode(content: bytes | memoryview, name: str) -> Image:
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
        with PIL.Image.open(io.BytesIO(content)) as image:
            return _to_rgb(PIL.ImageOps.exif_transpose(image))
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
