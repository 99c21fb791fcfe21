"""Batches of photographs, decoded by NVIDIA DALI: on a GPU, and never on the CPU's side of it.

The random numbers, the order and what happens to images that cannot be read are those of the other
loaders: DALI is given encoded files, boxes and flips. Importing this does not import DALI.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from recipes.config import UserError
from recipes.data.augmentation import CROP_UNIFORMS, choose_crop
from recipes.data.base import Arrays, Stream, stack
from recipes.data.decoding import decode, refuse_large
from recipes.data.decoding_threads import portions
from recipes.data.in_hand import Patience
from recipes.data.jpeg import read_frame
from recipes.data.photographs import PhotoDataset
from recipes.data.randomness import sample_uniforms
from recipes.data.reading_threads import ReadingThreads
from recipes.data.sampler import SampleKey


class _Encoded(NamedTuple):
    """One image as DALI takes it."""

    content: NDArray[np.uint8]  # a file
    height: int
    width: int


class _Chosen(NamedTuple):
    """Some images of a batch, and what is to become of them."""

    contents: list[NDArray[np.uint8]]  # files
    boxes: NDArray[np.int32]  # [n, 4]: top, left, height, width
    flips: NDArray[np.int32]  # [n]: 1, to be mirrored
    sources: NDArray[np.int64]  # [n]


class _Reading(NamedTuple):
    keys: list[SampleKey]
    indices: NDArray[np.int64]  # of the keys
    parts: list[Future[_Chosen]]  # in the order of the samples


class _Pending(NamedTuple):
    keys: list[SampleKey]
    arrays: Arrays  # but for the images
    feeds: dict[str, Any]  # name to what DALI is given


class DaliPipeline(Stream):
    """Reads ahead through a DALI pipeline. For augmented images.

    Files are read by threads of the rank, `prefetch` batches ahead of DALI, which is as many ahead
    of the one asked for. A batch's `images` are a Paddle tensor on the GPU, or with device="cpu" an
    array.

    Args:
        dataset: read as it is kept. What is not an upright JPEG, whole and in colours that nvJPEG
            takes for what they are, is decoded by Pillow and handed on as BMP.
        keys: the samples of each batch, of one epoch; the first batch is the largest.
        threads: of DALI, and as many that read files.
        prefetch: batches ahead of the one asked for.
        device: "gpu", or "cpu" for tests.
        deadline: seconds for one image.
    """

    def __init__(
        self,
        dataset: PhotoDataset,
        keys: Iterable[list[SampleKey]],
        threads: int,
        prefetch: int,
        device: str = "gpu",
        deadline: float = math.inf,
    ) -> None:
        assert dataset.augment
        self._dataset, self._keys, self._device = dataset, iter(keys), device
        self._threads = threads
        self._pool = ReadingThreads(threads, "reading", begin=dataset.in_hand.number_reader)
        self._patience = Patience([dataset.source], deadline, self._pool.leave_behind)
        self._reading: deque[_Reading] = deque()
        self._pending: deque[_Pending] = deque()
        self._pipeline: Any = None
        try:
            for _ in range(2 * prefetch):
                self._read_ahead()
            self._pending.extend(self._read() for _ in range(min(prefetch, len(self._reading))))
        except BaseException:
            self.close()
            raise
        self._start()

    def __next__(self) -> Arrays:
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> Arrays:
        self._read_ahead()
        following = self._read() if self._reading else None
        try:
            (images,) = self._pipeline.share_outputs(self._stream())
            self._pipeline.release_outputs()
        except RuntimeError as error:
            return self._next_without_dali(following, error)
        if following is not None:
            self._pending.append(following)
            self._feed(following)
            self._pipeline.schedule_run()
        return self._pending.popleft().arrays._replace(images=self._taken(images))

    def close(self) -> None:
        """End the threads, and DALI's."""
        self._keys = iter(())
        self._pipeline = None
        self._pending.clear()
        self._reading.clear()
        self._pool.close()

    def _next_without_dali(self, following: _Pending | None, error: RuntimeError) -> Arrays:
        """A batch that DALI has refused, as Pillow sees it; DALI starts anew with the one after it.

        Raises:
            UserError: Pillow cannot read an image either, or there is nothing wrong with them.
        """
        refused = self._pending.popleft()
        samples = [self._dataset[key] for key in refused.keys]
        if all(sample.source == sample.index for sample in samples):
            raise UserError(
                f"NVIDIA DALI cannot decode a batch that Pillow can: {error}", "loader=turbojpeg"
            ) from error
        if following is not None:
            self._pending.append(following)
        self._start()
        return stack(samples)

    def _start(self) -> None:
        """Make a pipeline, and have it begin with all that is pending."""
        if not self._pending:
            return
        self._pipeline = _pipeline(
            device=self._device,
            capacity=len(self._pending[0].keys),
            threads=self._threads,
            depth=len(self._pending),
            size=self._dataset.image_size,
        )
        for pending in self._pending:
            self._feed(pending)
        self._pipeline.schedule_run()  # the first call runs as many batches as it prefetches

    def _feed(self, pending: _Pending) -> None:
        for name, arrays in pending.feeds.items():
            self._pipeline.feed_input(name, arrays)

    def _read_ahead(self) -> None:
        """Have the threads begin to read the next batch, if there is one."""
        keys = next(self._keys, None)
        if keys is None:
            return
        indices = np.array([index for _, index in keys], np.int64)
        parts = [
            self._pool.submit(self._choose, keys[0][0], indices[rows])
            for rows in portions(len(keys), self._threads)
        ]
        self._reading.append(_Reading(keys, indices, parts))

    def _read(self) -> _Pending:
        """The first batch that is being read, once it has been."""
        keys, indices, parts = self._reading.popleft()
        read = [self._patience.result(part) for part in parts]
        boxes = np.concatenate([part.boxes for part in read])
        sources = np.concatenate([part.sources for part in read])
        feeds = {
            "content": [content for part in read for content in part.contents],
            "start": np.ascontiguousarray(boxes[:, :2]),
            "shape": np.ascontiguousarray(boxes[:, 2:]),
            "flip": np.concatenate([part.flips for part in read]),
        }
        no_images = np.empty(0, np.uint8)
        return _Pending(
            keys, Arrays(no_images, self._dataset.labels[sources], indices, sources), feeds
        )

    def _choose(self, epoch: int, indices: NDArray[np.int64]) -> _Chosen:
        """Read some samples, and choose their crops. Runs in a thread."""
        dataset = self._dataset
        uniforms = sample_uniforms(dataset.seed, epoch, indices, CROP_UNIFORMS)
        contents, boxes, sources = [], [], []
        for index, numbers in zip(indices.tolist(), uniforms, strict=True):
            image, source = dataset.read(index, self._encode)
            assert image is not None
            contents.append(image.content)
            boxes.append(choose_crop(numbers[1:], image.height, image.width))
            sources.append(source)
        return _Chosen(
            contents,
            np.array(boxes, np.int32),
            (uniforms[:, 0] < 0.5).astype(np.int32),
            np.array(sources, np.int64),
        )

    def _encode(self, source: int) -> _Encoded:
        content = self._dataset.content(source)
        if not isinstance(content, np.ndarray):
            name, most = self._dataset.path(source), self._dataset.max_pixels
            frame = read_frame(content)
            if frame is not None:
                refuse_large(frame.width, frame.height, name, most)
            if frame is not None and frame.rows_in_order and frame.colours != "RGB":
                return _Encoded(np.frombuffer(content, np.uint8), frame.height, frame.width)
            content = decode(content, name, most)
        bitmap = io.BytesIO()
        PIL.Image.fromarray(content).save(bitmap, "BMP")
        return _Encoded(np.frombuffer(bitmap.getbuffer(), np.uint8), *content.shape[:2])

    def _stream(self) -> Any:
        """Paddle's stream, after whose work on a batch DALI may use the batch's memory again."""
        if self._device == "cpu":
            return None
        import paddle

        return paddle.device.cuda.current_stream().cuda_stream

    def _taken(self, images: Any) -> Any:
        if self._device == "cpu":
            return images.as_array()
        import paddle

        return paddle.utils.dlpack.from_dlpack(images.as_tensor())


def _pipeline(*, device: str, capacity: int, threads: int, depth: int, size: int) -> Any:
    """The graph: decode the box, resize it, mirror it: uint8[b, size, size, 3]."""
    from nvidia.dali import Pipeline, fn, types

    device_id = None
    if device == "gpu":
        import paddle

        device_id = int(paddle.device.get_device().partition(":")[2])

    pipeline: Any = Pipeline(
        batch_size=capacity, num_threads=threads, device_id=device_id, prefetch_queue_depth=depth
    )
    with pipeline:
        content = fn.external_source(name="content", dtype=types.UINT8, ndim=1)
        start = fn.external_source(name="start", dtype=types.INT32, ndim=1)
        shape = fn.external_source(name="shape", dtype=types.INT32, ndim=1)
        flip = fn.external_source(name="flip", dtype=types.INT32, ndim=0)
        box = fn.decoders.image_slice(
            content,
            start=start,
            shape=shape,
            axis_names="HW",
            device="mixed" if device == "gpu" else "cpu",
            output_type=types.RGB,
        )
        resized = fn.resize(
            box, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=False
        )
        pipeline.set_outputs(fn.flip(resized, horizontal=flip))
    pipeline.build()
    return pipeline
