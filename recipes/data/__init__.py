"""Datasets, augmentation, sampler, loaders. Importing this imports neither Paddle nor cv2."""

from recipes.data.build import build, prepare
from recipes.data.sampler import (
    MicroBatch,
    Plan,
    SampleKey,
    batch_bounds,
    epoch_order,
    evaluation_batches,
    share_bounds,
)

__all__ = [
    "MicroBatch",
    "Plan",
    "SampleKey",
    "batch_bounds",
    "build",
    "epoch_order",
    "evaluation_batches",
    "prepare",
    "share_bounds",
]
