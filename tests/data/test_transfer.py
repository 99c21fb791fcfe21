"""Batches on the device are the loader's, in its order, even where its memory is used again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from recipes.data.loader import Batch
from recipes.data.transfer import on_device

HAS_GPU = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
COUNT = 7


def batches(read: list[int]) -> Iterator[Batch]:
    """Batches whose images all lie in one array, which changes as soon as the next is asked for."""
    images = np.zeros((2, 3, 3, 3), np.uint8)
    for step in range(COUNT):
        images[...] = step
        read.append(step)
        indices = np.array([step, step + 1], np.int64)
        yield Batch(images, indices % 5, indices, indices, step, 0, 2)


def check_batches(most_ahead: int) -> None:
    read: list[int] = []
    ahead = []
    for step, (batch, images, labels) in enumerate(on_device(batches(read))):
        assert batch.step == step
        assert images.dtype == paddle.uint8
        assert (images.numpy() == step).all()
        assert labels.tolist() == [step % 5, (step + 1) % 5]
        ahead.append(len(read) - 1 - step)
    assert len(ahead) == COUNT
    assert max(ahead) == most_ahead


def test_batches_arrive_as_they_are() -> None:
    paddle.set_device("cpu")
    check_batches(0)


def test_no_batches_are_no_error() -> None:
    assert list(on_device(iter(()))) == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU and a GPU build of Paddle")
def test_batches_arrive_on_the_gpu() -> None:
    paddle.set_device("gpu")
    try:
        check_batches(1)  # the next one is on its way
        _, images, _ = next(on_device(batches([])))
        assert images.place.is_gpu_place()
    finally:
        paddle.set_device("cpu")
