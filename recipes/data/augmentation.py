"""Standard augmentations, each split in two: numbers chosen from uniforms, and the pixels' work.

A choice is a pure function of uniform numbers in [0, 1), a fixed count of them, so that any
implementation (per image, a batch at once, on another device) can be held against this one.
Images are uint8[H, W, 3].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

SHIFT_UNIFORMS = 3  # top, left, flip
CUTOUT_UNIFORMS = 2  # row and column of the centre; they follow the shift's
CROP_ATTEMPTS = 10
CROP_UNIFORMS = 1 + 4 * CROP_ATTEMPTS  # flip, then (area, ratio, top, left) of each attempt
CROP_SCALE = (0.08, 1.0)  # share of the image's area
CROP_RATIO = (3 / 4, 4 / 3)  # width / height


class Shift(NamedTuple):
    """Where the output starts in the padded image, and whether it is mirrored."""

    top: int
    left: int
    flip: bool


class Shifts(NamedTuple):
    """`Shift` for each of b images."""

    top: NDArray[np.int64]  # [b]
    left: NDArray[np.int64]  # [b]
    flip: NDArray[np.bool_]  # [b]


class Box(NamedTuple):
    """A rectangle in pixels."""

    top: int
    left: int
    height: int
    width: int


def choose_shift(uniforms: NDArray[np.float64], pad: int, flips: bool) -> Shift:
    """One of the (2 * pad + 1)**2 places with equal probability; mirrored half the time.

    Args:
        uniforms: float64[SHIFT_UNIFORMS] in [0, 1).
        pad: pixels added on each side.
        flips: whether mirroring keeps the meaning of an image.
    """
    top, left = (int(u * (2 * pad + 1)) for u in uniforms[:2])
    return Shift(top, left, flips and bool(uniforms[2] < 0.5))


def choose_shifts(uniforms: NDArray[np.float64], pad: int, flips: bool) -> Shifts:
    """`choose_shift` for a batch at once.

    Args:
        uniforms: float64[b, SHIFT_UNIFORMS] in [0, 1).
        pad, flips: as there.
    """
    top, left = (uniforms[:, :2] * (2 * pad + 1)).astype(np.int64).T
    return Shifts(top, left, (uniforms[:, 2] < 0.5) & flips)


def shift(image: Image, pad: int, choice: Shift) -> Image:
    """Pad by zeros (black) on each side, cut the original size out, and mirror if chosen."""
    height, width, channels = image.shape
    padded = np.zeros((height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[pad : pad + height, pad : pad + width] = image
    cut = padded[choice.top : choice.top + height, choice.left : choice.left + width]
    return mirror(cut) if choice.flip else cut


def shift_batch(
    padded: NDArray[np.uint8], members: NDArray[np.int64], pad: int, choices: Shifts
) -> NDArray[np.uint8]:
    """`shift` for a batch at once.

    Args:
        padded: uint8[N, H + 2 * pad, W + 2 * pad, 3], images padded by zeros.
        members: int64[b], which of them make the batch.

    Returns:
        uint8[b, H, W, 3].
    """
    height, width = (side - 2 * pad for side in padded.shape[1:3])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    places = windows.transpose(0, 1, 2, 4, 5, 3)  # [N, top, left, H, W, 3], a view
    batch: NDArray[np.uint8] = places[members, choices.top, choices.left]
    mirrored = batch[choices.flip]
    if mirrored.size:
        # One call for all: the images stand one below the other.
        rows = mirrored.reshape(-1, width, mirrored.shape[-1])
        cv2.flip(rows, 1, dst=rows)
        batch[choices.flip] = mirrored
    return batch


def choose_cutout(uniforms: NDArray[np.float64], side: int, height: int, width: int) -> Box:
    """The square of Cutout (DeVries and Taylor 2017, arXiv:1708.04552), cut off at the edges.

    Its centre is any pixel of the image with equal probability, so it may lie partly outside.

    Args:
        uniforms: float64[CUTOUT_UNIFORMS] in [0, 1).
        side: of the square, in pixels.
        height, width: of the image, in pixels.
    """
    (top, bottom), (left, right) = (
        (max(0, start), min(length, start + side))
        for length, start in (
            (length, int(u * length) - side // 2)
            for u, length in zip(uniforms, (height, width), strict=True)
        )
    )
    return Box(top, left, bottom - top, right - left)


def cut_out(image: Image, box: Box, colour: NDArray[np.uint8]) -> None:
    """Fill the box with one colour, uint8[3], in place."""
    crop(image, box)[...] = colour


def choose_crop(uniforms: NDArray[np.float64], height: int, width: int) -> Box:
    """The random resized crop of Inception (Szegedy et al., "Going Deeper with Convolutions",
    CVPR 2015, section 6), with the usual fallback.

    Each attempt draws the area uniformly and the aspect ratio log-uniformly, and is taken if the
    rectangle fits. After the last attempt: the largest centred crop whose ratio is in range.

    Args:
        uniforms: float64[4 * CROP_ATTEMPTS] in [0, 1).
        height, width: of the image, in pixels.
    """
    log_low, log_high = (math.log(ratio) for ratio in CROP_RATIO)
    for area_u, ratio_u, top_u, left_u in uniforms.reshape(CROP_ATTEMPTS, 4).tolist():
        area = height * width * (CROP_SCALE[0] + area_u * (CROP_SCALE[1] - CROP_SCALE[0]))
        ratio = math.exp(log_low + ratio_u * (log_high - log_low))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(top_u * (height - crop_height + 1))
            left = int(left_u * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    ratio = min(max(width / height, CROP_RATIO[0]), CROP_RATIO[1])
    crop_width = max(1, min(width, round(height * ratio)))
    crop_height = max(1, min(height, round(width / ratio)))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def crop(image: Image, box: Box) -> Image:
    """The part of the image inside the box (a view)."""
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


def resize(image: Image, height: int, width: int) -> Image:
    """Bilinear, pixel centres aligned, no low-pass filter before it (as PaddleClas trains)."""
    if image.shape[:2] == (height, width):
        return image
    resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return np.asarray(resized, dtype=np.uint8)


def mirror(image: Image) -> Image:
    """Left and right exchanged (a view)."""
    return image[:, ::-1]


def random_resized_crop(image: Image, size: int, uniforms: NDArray[np.float64]) -> Image:
    """Random resized crop and mirroring: uint8[size, size, 3].

    Args:
        uniforms: float64[CROP_UNIFORMS] in [0, 1).
    """
    box = choose_crop(uniforms[1:], *image.shape[:2])
    cut = resize(crop(image, box), size, size)
    return mirror(cut) if uniforms[0] < 0.5 else cut


def central_crop(image: Image, size: int) -> Image:
    """Short side resized to round(size * 256 / 224), then the centre: uint8[size, size, 3]."""
    height, width = image.shape[:2]
    short = round(size * 256 / 224)
    scale = short / min(height, width)
    whole = resize(image, max(short, round(height * scale)), max(short, round(width * scale)))
    top, left = ((side - size) // 2 for side in whole.shape[:2])
    return crop(whole, Box(top, left, size, size))
