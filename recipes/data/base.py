"""What every dataset is: numbered images with labels, read by (epoch, index)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.data.augmentation import (
    SHIFT_UNIFORMS,
    Image,
    choose_shift,
    resize,
    shift,
)
from recipes.data.randomness import sample_rng
from recipes.data.sampler import SampleKey


@dataclass(frozen=True, slots=True)
class Sample:
    """One image, as a batch holds it."""

    image: Image  # uint8[image_size, image_size, 3], RGB; normalisation happens on the device
    label: int  # -1: could not be read, and does not count (evaluation only)
    index: int  # the sample asked for
    source: int  # the sample delivered: another one where a corrupt training image was replaced


class ImageDataset(ABC):
    """A map-style dataset: ``dataset[epoch, index]`` is a `Sample`, ``len(dataset)`` their number.

    `paddle.io.DataLoader` takes it as it is. What a sample holds depends on the dataset's seed, the
    epoch and the index only, so any process may read it.

    Attributes:
        name: the configuration's name for it.
        classes: one name per label.
        mean, std: float32[3] on the scale of the images' pixels, for normalisation.
        image_size: pixels a side of what `__getitem__` gives.
        channels: always 3; grey is repeated.
    """

    name: str
    classes: list[str]
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    image_size: int
    channels: int = 3

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.classes)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, key: SampleKey) -> Sample: ...

    def path(self, index: int) -> str | None:
        """The file that holds a sample; None for a dataset without a file per sample."""
        del index
        return None


class ArrayDataset(ImageDataset):
    """A dataset that fits in memory; augmented by a random shift and mirroring, then resized.

    Args:
        images: uint8[N, H, H, 3].
        labels: int64[N].
        pad: the largest shift in pixels of the original image; None: no augmentation.
        flips: whether augmentation mirrors.
    """

    def __init__(
        self,
        *,
        name: str,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        classes: list[str],
        mean: NDArray[np.float32],
        std: NDArray[np.float32],
        image_size: int,
        seed: int,
        pad: int | None,
        flips: bool,
    ) -> None:
        self.name, self.classes, self.image_size = name, classes, image_size
        self.images, self.labels = images, labels
        self.mean, self.std = mean, std
        self.seed, self.pad, self.flips = seed, pad, flips

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: SampleKey) -> Sample:
        epoch, index = key
        image: Image = self.images[index]
        if self.pad is not None:
            uniforms = sample_rng(self.seed, epoch, index).random(SHIFT_UNIFORMS)
            image = shift(image, self.pad, choose_shift(uniforms, self.pad, self.flips))
        image = resize(image, self.image_size, self.image_size)
        return Sample(image, int(self.labels[index]), index, index)
