"""scikit-learn's handwritten digits: real data that needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig
from recipes.data.arrays import ArrayDataset

PIXEL_SCALE = 15  # the pixels are 0 .. 16; times 15 they fill 0 .. 240 and can be resized
HELD_OUT_EVERY = 5
SIDE, NUM_CLASSES = 8, 10


def digits(config: DatasetConfig, split: str, seed: int) -> ArrayDataset:
    """1,797 grey 8x8 images; every fifth (index % 5 == 0: 360) is held out, 1,437 are for training.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998. Augmentation shifts by at most one of the 8 pixels; digits are not
    mirrored.
    """
    pixels, labels = load()
    grey = pixels * np.uint8(PIXEL_SCALE)
    held_out = np.arange(len(grey)) % HELD_OUT_EVERY == 0
    chosen = held_out if split == "eval" else ~held_out
    training = grey[~held_out]
    return ArrayDataset(
        name="digits",
        images=np.repeat(grey[chosen][:, :, :, None], 3, axis=3),
        labels=labels[chosen],
        classes=[str(name) for name in range(NUM_CLASSES)],
        mean=np.full(3, training.mean(), np.float32),
        std=np.full(3, training.std(), np.float32),
        image_size=config.image_size,
        seed=seed,
        pad=1 if split == "train" and config.augment else None,
        flips=False,
        cutout=config.cutout,
    )


def load() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """What `sklearn.datasets.load_digits` gives, from the file that scikit-learn comes with.

    Importing scikit-learn itself takes longer than anything else that a rank does before its first
    step, but for importing Paddle.

    Returns:
        Pixels 0 .. 16 as uint8[1797, 8, 8], and labels int64[1797].
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(
        Path(package.origin).parent / "datasets/data/digits.csv.gz", np.uint8, delimiter=","
    )
    return table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].astype(np.int64)
