"""scikit-learn's handwritten digits: real data that needs no download."""

from __future__ import annotations

import numpy as np
import sklearn.datasets

from recipes.config import DatasetConfig
from recipes.data.arrays import ArrayDataset

PIXEL_SCALE = 15  # the pixels are 0 .. 16; times 15 they fill 0 .. 240 and can be resized
HELD_OUT_EVERY = 5


def digits(config: DatasetConfig, split: str, seed: int) -> ArrayDataset:
    """1,797 grey 8x8 images; every fifth (index % 5 == 0: 360) is held out, 1,437 are for training.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998. Augmentation shifts by at most one of the 8 pixels; digits are not
    mirrored.
    """
    data = sklearn.datasets.load_digits()
    grey = (data.images * PIXEL_SCALE).astype(np.uint8)
    held_out = np.arange(len(grey)) % HELD_OUT_EVERY == 0
    chosen = held_out if split == "eval" else ~held_out
    training = grey[~held_out]
    return ArrayDataset(
        name="digits",
        images=np.repeat(grey[chosen][:, :, :, None], 3, axis=3),
        labels=data.target[chosen].astype(np.int64),
        classes=[str(name) for name in data.target_names],
        mean=np.full(3, training.mean(), np.float32),
        std=np.full(3, training.std(), np.float32),
        image_size=config.image_size,
        seed=seed,
        pad=1 if split == "train" and config.augment else None,
        flips=False,
        cutout=config.cutout,
    )
