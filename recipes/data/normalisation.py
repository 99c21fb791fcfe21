"""From a loader's uint8 batch to what the model takes, on the device."""

from __future__ import annotations

import numpy as np
import paddle
from numpy.typing import NDArray

from recipes.data.base import ImageDataset


class Normalise:
    """``(pixel - mean) / std`` per channel, on the device.

    So a batch travels there as uint8, a quarter of float32's bytes.

    Args:
        dataset: gives float32[3] mean and std on the scale of its pixels.
        dtype: float32 or float64.
    """

    def __init__(self, dataset: ImageDataset, dtype: str) -> None:
        self.dtype = dtype
        self._scale = paddle.to_tensor(1.0 / dataset.std.astype(np.float64), dtype=dtype)
        self._shift = paddle.to_tensor(dataset.mean.astype(np.float64), dtype=dtype)

    def __call__(self, images: NDArray[np.uint8] | paddle.Tensor) -> paddle.Tensor:
        """
        Args:
            images: uint8[b, height, width, 3], on the device or not.

        Returns:
            A tensor [b, 3, height, width] of `dtype`.
        """
        tensor = images if isinstance(images, paddle.Tensor) else paddle.to_tensor(images)
        pixels = tensor.astype(self.dtype)
        return ((pixels - self._shift) * self._scale).transpose([0, 3, 1, 2])
