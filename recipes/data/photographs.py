"""What every set of photographs has in common, wherever its images are kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig, PassingError, UserError
from recipes.data.augmentation import (
    CROP_UNIFORMS,
    Image,
    central_crop,
    random_resized_crop,
)
from recipes.data.base import ImageDataset, Sample
from recipes.data.decoding import UnreadableImage, decode
from recipes.data.in_hand import InHand, Source
from recipes.data.randomness import sample_rng
from recipes.data.sampler import SampleKey
from recipes.printable import SHOWN, printable

# Over ImageNet's training images, on the scale of 0 .. 255; what published weights expect.
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)

UNREADABLE_LABEL = -1

T = TypeVar("T")

Content = bytes | memoryview | NDArray[np.uint8]
"""An encoded file, or pixels uint8[H, W, 3], RGB, ready to be cropped."""


class PhotoDataset(ImageDataset):
    """Photographs. Training: random resized crop and mirroring; evaluation: the centre.

    One that cannot be read raises `UserError` with its path, or with on_corrupt=skip is replaced
    by the next readable image (training) or gets label -1 and a black image (evaluation).

    Args:
        config: image_size, augment, on_corrupt, max_skipped and max_pixels are read.
        split: "train" or "eval".
        labels: int64[N].
        classes: one name per label.

    Attributes:
        labels: int64[N].
        augment: whether images are seen through a random crop, else by their centre.
        train: whether this is the training split, whose images have replacements.
        max_pixels: of an image; one that says it has more cannot be read.
        in_hand: which images are being read.
    """

    name = "imagenet"

    def __init__(
        self,
        config: DatasetConfig,
        split: str,
        seed: int,
        labels: NDArray[np.int64],
        classes: list[str],
    ) -> None:
        self.classes, self.labels = classes, labels
        self.mean, self.std = np.array(MEAN, np.float32), np.array(STD, np.float32)
        self.image_size, self.seed = config.image_size, seed
        self.train, self.augment = split == "train", split == "train" and config.augment
        self.max_pixels, self.in_hand = config.max_pixels, InHand()
        self._skip, self._max_skipped = config.on_corrupt == "skip", config.max_skipped

    @abstractmethod
    def content(self, index: int) -> Content:
        """An image as it is kept: an encoded file, or pixels uint8[H, W, 3].

        Any thread or process may call this.

        Raises:
            UnreadableImage: it cannot be had; the message names the path.
        """

    @abstractmethod
    def path(self, index: int) -> str:
        """The file that holds a sample, and where in it if it holds several."""

    def remarks(self) -> list[str]:
        """Whether there are classes without an image."""
        return remarks_on(self.labels, self.classes)

    def whereabouts(self, index: int) -> str:
        """As `path`, but without reading anything: the disk may not answer."""
        return self.path(index)

    @property
    def source(self) -> Source:
        """For who waits for its readers."""
        return Source(self.in_hand, self.whereabouts)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: SampleKey) -> Sample:
        """One sample by itself, decoded by Pillow: what every faster way is held against."""
        epoch, index = key
        image, source = self.read(index, lambda source: self._view(source, epoch, index))
        if image is None:
            size = self.image_size
            return Sample(np.zeros((size, size, 3), np.uint8), UNREADABLE_LABEL, index, index)
        return Sample(image, int(self.labels[source]), index, source)

    def read(self, index: int, reader: Callable[[int], T]) -> tuple[T | None, int]:
        """What `reader` makes of a sample, or with on_corrupt=skip of the one in its place.

        Args:
            index: the sample asked for.
            reader: called with the sample to read, until it does not raise `UnreadableImage`.

        Returns:
            Its result and the sample that was read. None and `index` where an image for evaluation
            could not be read.

        Raises:
            UserError: the image cannot be read, nor one in its place.
        """
        try:
            return self._read_one(index, reader), index
        except UnreadableImage as error:
            if not self._skip:
                kind = PassingError if error.may_pass else UserError
                raise kind(str(error), f"{error.remedy}, or set dataset.on_corrupt=skip") from None
        return self._next_readable(index, reader) if self.train else (None, index)

    def _read_one(self, source: int, reader: Callable[[int], T]) -> T:
        self.in_hand.take(source)
        try:
            return reader(source)
        finally:
            self.in_hand.put_down()

    def _next_readable(self, index: int, reader: Callable[[int], T]) -> tuple[T, int]:
        tries = min(len(self) - 1, self._max_skipped)
        for step in range(1, tries + 1):
            source = (index + step) % len(self)
            try:
                return self._read_one(source, reader), source
            except UnreadableImage:
                continue
        raise UserError(
            f"{self.path(index)}: cannot be read, nor can the {tries} images after it",
            "check the disk and the files; dataset.max_skipped is the limit",
        )

    def _view(self, source: int, epoch: int, index: int) -> Image:
        """An image under the random numbers of the sample asked for."""
        image = self._pixels(source)
        if not self.augment:
            return central_crop(image, self.image_size)
        uniforms = sample_rng(self.seed, epoch, index).random(CROP_UNIFORMS)
        return random_resized_crop(image, self.image_size, uniforms)

    def _pixels(self, source: int) -> Image:
        content = self.content(source)
        if isinstance(content, np.ndarray):
            return content
        return decode(content, self.path(source), self.max_pixels)


def remarks_on(labels: NDArray[np.int64], classes: list[str]) -> list[str]:
    """What is odd about the labels of a training set, one line each.

    Args:
        labels: int64[N].
        classes: one name per label.
    """
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0).tolist()
    if not empty:
        return []
    names = ", ".join(printable(classes[label]) for label in empty[:SHOWN])
    more = f" and {len(empty) - SHOWN:,} more" if len(empty) > SHOWN else ""
    first = int(labels.min())
    begin = f"; labels are counted from 0, and these begin at {first}" if first else ""
    return [
        f"{len(empty):,} of {len(classes):,} classes have no training image: {names}{more}{begin}"
    ]
