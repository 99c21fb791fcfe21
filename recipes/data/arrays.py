"""Datasets that fit in memory, and their batches, made at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from recipes.data.augmentation import (
    CUTOUT_UNIFORMS,
    SHIFT_UNIFORMS,
    Image,
    choose_cutout,
    choose_shift,
    choose_shifts,
    cut_out,
    resize,
    shift,
    shift_batch,
)
from recipes.data.base import Arrays, ImageDataset, Sample, Stream
from recipes.data.randomness import sample_rng, sample_uniforms
from recipes.data.sampler import SampleKey


class ArrayDataset(ImageDataset):
    """A dataset in memory; augmented by a random shift, mirroring, and Cutout if asked for.

    Images are resized to `image_size` between the shift and Cutout, whose square is filled with
    the mean colour: what is zero after normalisation.

    Args:
        images: uint8[N, H, H, 3].
        labels: int64[N].
        pad: the largest shift in pixels of the original image; None: no augmentation.
        flips: whether augmentation mirrors.
        cutout: the side of Cutout's square in pixels of `image_size`; 0: none.
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
        cutout: int = 0,
    ) -> None:
        self.name, self.classes, self.image_size = name, classes, image_size
        self.labels, self.mean, self.std = labels, mean, std
        self.seed, self.pad, self.flips, self.cutout = seed, pad, flips, cutout
        margin = pad or 0
        self._padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        height, width = images.shape[1:3]
        self.images = self._padded[:, margin : margin + height, margin : margin + width]
        self._colour = mean.round().clip(0, 255).astype(np.uint8)
        self._uniforms = SHIFT_UNIFORMS + (CUTOUT_UNIFORMS if cutout else 0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: SampleKey) -> Sample:
        """One sample by itself: what `batch` is held against."""
        epoch, index = key
        image: Image = self.images[index]
        if self.pad is None:
            image = resize(image, self.image_size, self.image_size)
        else:
            uniforms = sample_rng(self.seed, epoch, index).random(self._uniforms)
            choice = choose_shift(uniforms[:SHIFT_UNIFORMS], self.pad, self.flips)
            image = resize(shift(image, self.pad, choice), self.image_size, self.image_size)
            if self.cutout:
                image = image.copy()
                self._cut_out(image, uniforms)
        return Sample(image, int(self.labels[index]), index, index)

    def batch(self, epoch: int, indices: list[int]) -> Arrays:
        """The samples of an epoch with these indices: the same bytes as one by one."""
        members = np.array(indices, np.int64)
        if self.pad is None:
            images = self._resized(self.images[members])
        else:
            uniforms = sample_uniforms(self.seed, epoch, members, self._uniforms)
            choices = choose_shifts(uniforms[:, :SHIFT_UNIFORMS], self.pad, self.flips)
            images = self._resized(shift_batch(self._padded, members, self.pad, choices))
            if self.cutout:
                for image, numbers in zip(images, uniforms, strict=True):
                    self._cut_out(image, numbers)
        return Arrays(images, self.labels[members], members, members)

    def _resized(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        size = self.image_size
        if images.shape[1:3] == (size, size):
            return images
        return np.stack([resize(image, size, size) for image in images])

    def _cut_out(self, image: Image, uniforms: NDArray[np.float64]) -> None:
        centre = uniforms[SHIFT_UNIFORMS:]
        cut_out(image, choose_cutout(centre, self.cutout, *image.shape[:2]), self._colour)


class BatchesAtOnce(Stream):
    """Batches of a dataset in memory, made in the rank as they are asked for."""

    def __init__(self, dataset: ArrayDataset, keys: Iterable[list[SampleKey]]) -> None:
        self._batches = (
            dataset.batch(batch[0][0], [index for _, index in batch]) for batch in keys
        )

    def __next__(self) -> Arrays:
        return next(self._batches)
