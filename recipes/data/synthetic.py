"""Random images made on the fly, for benchmarks and smoke tests."""

from __future__ import annotations

import numpy as np

from recipes.config import DatasetConfig, UserError
from recipes.data.base import ImageDataset, Sample
from recipes.data.randomness import sample_rng
from recipes.data.sampler import SampleKey


class SyntheticDataset(ImageDataset):
    """Uniform noise of (seed, index); sample i has label i % num_classes. Nothing to learn here.

    The held-out images are other ones than the training images.
    """

    name = "synthetic"

    def __init__(self, config: DatasetConfig, split: str, seed: int) -> None:
        if not (config.train_size and config.eval_size and config.num_classes):
            raise UserError(
                "dataset=synthetic has no size",
                "set dataset.train_size, dataset.eval_size and dataset.num_classes",
            )
        self.classes = [f"class {label}" for label in range(config.num_classes)]
        self.image_size = config.image_size
        # The mean and standard deviation of a uniform number on 0 .. 255.
        self.mean = np.full(3, 127.5, np.float32)
        self.std = np.full(3, np.sqrt((256**2 - 1) / 12), np.float32)
        self._size = config.train_size if split == "train" else config.eval_size
        self._offset = 0 if split == "train" else config.train_size
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: SampleKey) -> Sample:
        _, index = key
        shape = (self.image_size, self.image_size, self.channels)
        noise = sample_rng(self._seed, 0, self._offset + index).bytes(int(np.prod(shape)))
        image = np.frombuffer(noise, np.uint8).reshape(shape)
        return Sample(image, index % self.num_classes, index, index)
