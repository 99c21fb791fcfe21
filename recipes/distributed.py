"""One process of the job: starting Fleet, its device, and reductions over all ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from recipes.config import Config, GradientsConfig, UserError, uses_gpu
from recipes.topology import Place

# Seconds that a rank waits for rank 0's store when the job starts.
STORE_DEADLINE = 60.0
# Paddle's flags for kernels that add in a fixed order. Searching for the fastest convolution at run
# time may choose another one each time; Paddle refuses it together with the first flag.
DETERMINISTIC_FLAGS = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_embedding_deterministic": 1,
}


def start(config: Config, place: Place) -> None:
    """Choose this process's device and form the collective group with `fleet.init`.

    Raises:
        UserError: the job has another size than the configured topology, or Paddle has no
            support for the configured device.
    """
    expected = config.shape.world_size
    if place.world_size != expected:
        raise UserError(
            f"topology {config.shape} has {expected} processes, "
            f"but the launcher started {place.world_size}",
            "give the launcher --nnodes and --nproc_per_node to match, or change topology",
        )
    choose_device(config, place)
    paddle.set_default_dtype(config.dtype)
    if place.rank != 0:
        wait_for_store(os.environ["PADDLE_MASTER"], STORE_DEADLINE, place)
    strategy = fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = config.gradients.bucket_mib
    with quiet_paddle(), one_gloo_group():
        fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")


def wait_for_store(address: str, deadline: float, place: Place) -> None:
    """Return once rank 0's TCP store accepts connections, or raise after ``deadline`` seconds.

    A rank that tries the store before it listens sleeps three seconds inside Paddle before it
    tries again; asking the port first saves most of them.
    """
    host, port = address.rsplit(":", 1)
    end = time.monotonic() + deadline
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"{place.tag} rank 0's store at {address} did not answer within "
                    f"{deadline:.0f} s: {error}",
                    "see rank 0's log; check that the port is reachable from this node",
                ) from None
            time.sleep(0.05)


def choose_device(config: Config, place: Place) -> None:
    """Set Paddle's device: the launcher's choice of GPU, or the CPU.

    Raises:
        UserError: a GPU is wanted and this Paddle has none.
    """
    if not uses_gpu(config):
        paddle.set_device("cpu")
        return
    if not paddle.device.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0:
        raise UserError(
            f"device={config.device} wants a GPU, but Paddle {paddle.__version__} sees none",
            "install paddlepaddle-gpu and the NVIDIA driver, or set device=cpu",
        )
    # `paddle.distributed.launch` names the device relative to CUDA_VISIBLE_DEVICES.
    number = os.environ.get("FLAGS_selected_gpus", str(place.local_rank))  # noqa: SIM112
    paddle.set_device(f"gpu:{number}")
    if config.deterministic:
        # Only GPU builds know these flags. On CPU a rerun on the same threads is bit-identical.
        paddle.set_flags(DETERMINISTIC_FLAGS)


@contextlib.contextmanager
def one_gloo_group() -> Iterator[None]:
    """Give Fleet the default group wherever it asks for a gloo group of all ranks.

    Paddle 3.3.1 forms every gloo group over the same store keys (each rank's number, without the
    group's), so a rank that comes early to a second group reads the address that another rank
    left there for the first one: it is refused, or waits for ever. Fleet's data-parallel group
    and its check group have the members of the default group, and gloo runs one collective after
    the other in any case, so they share it.
    """
    form_group = dist.new_group

    def form_or_reuse(ranks: list[int] | None = None, **options: Any) -> Any:
        everyone = ranks is None or len(ranks) == dist.get_world_size() > 1
        if everyone and dist.get_backend() == "GLOO":
            return dist.get_group(0)
        return form_group(ranks, **options)

    dist.new_group = form_or_reuse
    try:
        yield
    finally:
        dist.new_group = form_group


@contextlib.contextmanager
def quiet_paddle() -> Iterator[None]:
    """Hold back what Paddle says of things that are meant: its flags, one process, and groups
    that this rank is not in."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        for message in (
            ".*not a parallel execution environment.*",
            ".*return to single-card operation.*",
            ".*is not in group.*",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


def data_parallel(model: paddle.nn.Layer) -> paddle.nn.Layer:
    """`fleet.distributed_model`: rank 0's parameters everywhere, gradients averaged in backward.

    The model must be complete (sync-BN, AMP) by now. One process needs no wrapper, and Paddle
    3.3.1's `fleet.distributed_model` refuses to make one there.
    """
    return fleet.distributed_model(model) if dist.get_world_size() > 1 else model


def sum_over_ranks(tensor: paddle.Tensor) -> paddle.Tensor:
    """The element-wise sum of a tensor over all ranks, on the device, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(tensor: paddle.Tensor) -> np.ndarray:
    """Every rank's tensor of one shape, [world size, *shape], on every rank."""
    if dist.get_world_size() == 1:
        return np.stack([tensor.numpy()])
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, tensor.detach())
    return np.stack([part.numpy() for part in parts])


def average_over_ranks(tensors: Iterable[paddle.Tensor]) -> None:
    """Set each tensor to its mean over all ranks."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        mean = sum_over_ranks(tensor.detach().clone()) / dist.get_world_size()
        tensor.set_value(mean.astype(tensor.dtype))


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON-able value, on every rank."""
    if dist.get_world_size() == 1:
        return value
    data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    return json.loads(_broadcast_bytes(data).tobytes())


def broadcast_arrays(arrays: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Rank 0's named arrays of any dtype and shape, on every rank; the others give None."""
    if dist.get_world_size() == 1:
        assert arrays is not None
        return arrays
    described = [(name, str(a.dtype), list(a.shape)) for name, a in (arrays or {}).items()]
    layout: list[tuple[str, str, list[int]]] = broadcast_json(described)
    received = {}
    for name, dtype, shape in layout:
        sent = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) if arrays else None
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        data = _broadcast_bytes(sent, size) if size else np.empty(0, np.uint8)
        received[name] = data.view(dtype).reshape(shape)
    return received


def _broadcast_bytes(data: np.ndarray | None, size: int | None = None) -> np.ndarray:
    """Rank 0's uint8 array on every rank; the length travels first where it is not known."""
    if size is None:
        length = paddle.to_tensor([len(data) if data is not None else 0], dtype="int64")
        dist.broadcast(length, src=0)
        size = int(length.item())
    mine = dist.get_rank() == 0
    tensor = paddle.to_tensor(data) if mine else paddle.zeros([size], dtype="uint8")
    dist.broadcast(tensor, src=0)
    return np.ascontiguousarray(tensor.numpy())


@contextlib.contextmanager
def gradient_sync(
    network: paddle.nn.Layer, gradients: GradientsConfig, *, enabled: bool
) -> Iterator[None]:
    """The context of a forward and backward pass whose gradients are averaged over the ranks,
    or, where not enabled, stay on this rank and add to those of the next pass.

    Fleet averages a bucket as soon as backward has filled it. With `gradients.dtype` they are
    averaged after backward instead, since Paddle has no place to convert them before.
    """
    if dist.get_world_size() == 1 or (enabled and gradients.dtype is None):
        yield
    else:
        with network.no_sync():
            yield
        if enabled:
            average_gradients(network, gradients)


def average_gradients(network: paddle.nn.Layer, gradients: GradientsConfig) -> None:
    """Set each gradient to its mean over the ranks, rounded to `gradients.dtype` on its way.

    They are divided before they are added, so that no sum leaves the range of a 16-bit number.
    """
    every = [p.grad for p in network.parameters() if p.grad is not None]
    for bucket in buckets(every, gradients.bucket_mib << 20):
        flat = paddle.concat([each.flatten() for each in bucket]) / dist.get_world_size()
        mean = sum_over_ranks(flat.astype(gradients.dtype or flat.dtype)).astype(flat.dtype)
        for each, part in zip(bucket, mean.split([each.size for each in bucket]), strict=True):
            paddle.assign(part.reshape(each.shape), each)


def buckets(tensors: Iterable[paddle.Tensor], limit: int) -> Iterator[list[paddle.Tensor]]:
    """The tensors in order, in groups of one dtype that hold up to `limit` bytes, or one tensor."""
    bucket: list[paddle.Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.size * tensor.element_size()
        if bucket and (filled + size > limit or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket
