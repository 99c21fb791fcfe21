"""What every dataset is: numbered images with labels, read by (epoch, index)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.augmentation import Image
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

    def remarks(self) -> list[str]:
        """What a person should know of the dataset before a training on it, one line each."""
        return []

    def path(self, index: int) -> str | None:
        """The file that holds a sample; None for a dataset without a file per sample."""
        del index
        return None


class Arrays(NamedTuple):
    """The samples of a batch."""

    images: NDArray[np.uint8]  # [b, image_size, image_size, 3]
    labels: NDArray[np.int64]  # [b]
    indices: NDArray[np.int64]  # [b]
    sources: NDArray[np.int64]  # [b]


def stack(samples: list[Sample]) -> Arrays:
    """Samples, one after the other, as the arrays of a batch."""
    return Arrays(
        np.stack([sample.image for sample in samples]),
        np.array([sample.label for sample in samples], np.int64),
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.source for sample in samples], np.int64),
    )


class Stream(Iterator[Arrays]):
    """Batches in the order asked for, with an end that can be called early."""

    def close(self) -> None:
        """Release what reads ahead. May be called twice."""
