"""Batches on their way to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import paddle

from recipes.data.loader import Batch

_IN_FLIGHT = 2  # copies that may be under way: the batch of this step and the one after it


class DeviceBatch(NamedTuple):
    """A micro-batch, and what the step computes with, on the device."""

    batch: Batch
    images: paddle.Tensor  # uint8[b, image_size, image_size, 3]
    labels: paddle.Tensor  # int64[b]


def on_device(batches: Iterable[Batch]) -> Iterator[DeviceBatch]:
    """Each batch with its images and labels as tensors on Paddle's current device.

    On a GPU the copy of a batch is issued before the step ahead of it is, so that it is there when
    that step's kernels have ended, and the rank waits neither for the copy nor for the device.
    """
    if not paddle.get_device().startswith("gpu"):
        for batch in batches:
            yield DeviceBatch(batch, paddle.to_tensor(batch.images), paddle.to_tensor(batch.labels))
        return
    copy = _PinnedCopy()
    ahead: DeviceBatch | None = None
    for batch in batches:
        moved = DeviceBatch(batch, *copy(batch.images, batch.labels))
        if ahead is not None:
            yield ahead
        ahead = moved
    if ahead is not None:
        yield ahead


class _PinnedCopy:
    """Copies through page-locked memory, for which the host does not have to wait.

    The page-locked tensors of a copy are held until it is done, as Paddle may hand their memory out
    again once they are dropped.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Any, list[paddle.Tensor]]] = deque()

    def __call__(self, *arrays: Any) -> list[paddle.Tensor]:
        if len(self._in_flight) == _IN_FLIGHT:
            copied, _ = self._in_flight.popleft()
            copied.synchronize()
        pinned = [paddle.to_tensor(array, place=paddle.CUDAPinnedPlace()) for array in arrays]
        moved = [tensor.cuda(blocking=False) for tensor in pinned]
        copied = paddle.device.cuda.Event()
        copied.record()
        self._in_flight.append((copied, pinned))
        return moved
