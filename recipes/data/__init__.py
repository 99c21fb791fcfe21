"""Datasets, augmentation, sampler, loaders. Importing this imports neither Paddle nor cv2."""

from recipes.data.build import build, check_classes, prepare
from recipes.data.known import Known, known
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
    "Known",
    "MicroBatch",
    "Plan",
    "SampleKey",
    "batch_bounds",
    "build",
    "check_classes",
    "epoch_order",
    "evaluation_batches",
    "known",
    "prepare",
    "share_bounds",
]
