"""``task=smoke``: every collective that a training uses, with the result checked on all ranks.

Each check compares with an answer that every rank can work out alone. The last one trains a tiny
model for a few steps twice, once on all ranks as `trainer` does and once on the rank alone with
the whole batch, and compares losses and weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle.distributed import fleet

from recipes import data, distributed, telemetry
from recipes.batch_norm import convert_sync_batch_norm
from recipes.config import Config, GradientsConfig, UserError
from recipes.data.base import ImageDataset
from recipes.data.loader import train_loader
from recipes.data.normalisation import Normalise
from recipes.pulse import Phase, Pulse
from recipes.topology import Place
from recipes.trainer import cross_entropy

STEPS = 3
SIZE = 1000  # numbers in a message
# Relative to the largest number: sums in another order differ by rounding.
ROUNDING = {"float32": 1e-6, "float64": 1e-10}

_log = logging.getLogger(__name__)


class WrongResult(UserError):
    """A collective gave something else than the known answer."""


def smoke(config: Config, place: Place, pulse: Pulse) -> telemetry.Result:
    """Make all checks; rank 0 prints a line for each.

    Args:
        config: checked, with its batch sizes filled in.
        place: this process in the job, which `distributed.start` has joined.
        pulse: marked once, so that ``deadlines.step`` is the limit for all checks together.

    Raises:
        WrongResult: naming this rank and the check.
    """
    started = time.monotonic()
    pulse.mark(Phase.STEPPING)
    passed = 0
    for name, check in checks(config):
        begun = time.monotonic()
        for what, got, wanted in check(place):
            verify(f"{name}: {what}" if what else name, got, wanted, place)
        passed += 1
        if place.rank == 0:
            _log.info("smoke: %-38s ok  %7.1f ms", name, (time.monotonic() - begun) * 1000)
    total = distributed.sum_over_ranks(paddle.to_tensor([passed], dtype="int64"))
    verify("number of checks passed", total.numpy(), np.array([passed * place.world_size]), place)
    if place.rank == 0:
        _log.info("smoke: all %d checks passed on %d ranks", passed, place.world_size)
    return telemetry.Result.untrained(config.shape, time.monotonic() - started)


Array = NDArray[Any]
# What a check has to say: what it looked at, what came out, and the known answer.
Outcome = tuple[str, Array, Array]
Check = Callable[[Place], Iterator[Outcome]]


def checks(config: Config) -> list[tuple[str, Check]]:
    """The checks by name, in the order in which they are made."""
    return [
        ("all-reduce, float32", lambda place: sum_of(place, "float32")),
        ("all-reduce, float64", lambda place: sum_of(place, "float64")),
        ("all-reduce, int64", lambda place: sum_of(place, "int64")),
        ("broadcast, uint8", broadcast),
        ("all-gather, float64", all_gather),
        ("ranks that come at different times", late_ranks),
        ("gradients averaged over ranks", averaged_gradients),
        ("gradients added up without averaging", accumulated_gradients),
        ("synchronised batch norm", synchronised_batch_norm),
        (f"{STEPS} training steps as on one process", lambda place: training(config, place)),
    ]


def verify(what: str, got: Array, wanted: Array, place: Place) -> None:
    """Compare: whole numbers exactly, others up to the rounding of sums.

    Raises:
        WrongResult: naming the rank, the check, and the first number that is wrong.
    """
    tolerance = ROUNDING.get(str(got.dtype), 0.0) * float(np.abs(wanted).max(initial=1.0))
    if got.shape == wanted.shape:
        # Not "> tolerance", which NaN would pass.
        wrong = ~(np.abs(got.astype(np.float64) - wanted.astype(np.float64)) <= tolerance)
        if not wrong.any():
            return
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        differs = (
            f"{int(wrong.sum())} of {wrong.size} numbers are wrong, the first is {got[at]} "
            f"instead of {wanted[at]}"
        )
    else:
        differs = f"its shape is {list(got.shape)} instead of {list(wanted.shape)}"
    raise WrongResult(
        f"smoke: rank {place.rank} of {place.world_size}, {what}: {differs}",
        "compare the nodes (task=preflight); on GPUs, NCCL_DEBUG=INFO shows the path that NCCL "
        "takes, and NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 or network=ethernet leave one out",
    )


def sum_of(place: Place, dtype: str) -> Iterator[Outcome]:
    """The sum over all ranks, of numbers that every dtype holds exactly."""
    numbers = np.arange(SIZE) % 97
    mine = paddle.to_tensor(numbers * (place.rank + 1), dtype=dtype)
    ranks = place.world_size * (place.world_size + 1) // 2
    yield "", distributed.sum_over_ranks(mine).numpy(), (numbers * ranks).astype(dtype)


def broadcast(place: Place) -> Iterator[Outcome]:
    """Rank 0's bytes and JSON, on every rank."""
    sent = (np.arange(SIZE) * 7 % 256).astype(np.uint8)
    received = distributed.broadcast_arrays({"x": sent} if place.rank == 0 else None)
    yield "", received["x"], sent
    value = distributed.broadcast_json([place.rank + 5, "né"])
    yield "JSON", np.array(value == [5, "né"]), np.array(True)


def all_gather(place: Place) -> Iterator[Outcome]:
    """Every rank's numbers, in the order of ranks."""
    mine = paddle.arange(SIZE, dtype="float64") + place.rank * SIZE
    parts: list[paddle.Tensor] = [mine]
    if place.world_size > 1:
        parts = []
        dist.all_gather(parts, mine)
    wanted = np.arange(place.world_size * SIZE, dtype=np.float64).reshape(-1, SIZE)
    yield "", paddle.stack(parts).numpy(), wanted


def late_ranks(place: Place) -> Iterator[Outcome]:
    """Each rank fills its own place of a vector and comes at its own time."""
    time.sleep(place.rank % 8 * 0.02)
    own = paddle.zeros([place.world_size], dtype="float64")
    own[place.rank] = place.rank + 1.0
    wanted = np.arange(1, place.world_size + 1, dtype=np.float64)
    yield "", distributed.sum_over_ranks(own).numpy(), wanted


class _Scaled(paddle.nn.Layer):  # type: ignore[misc]
    """The sum of weight times x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([SIZE])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (self.weight * x).sum()


def averaged_gradients(place: Place) -> Iterator[Outcome]:
    """Backward through `paddle.DataParallel`: the mean of 1, 2, … over the ranks."""
    model = _Scaled()
    network = distributed.data_parallel(model)
    network(paddle.full([SIZE], place.rank + 1.0)).backward()
    yield "", model.weight.grad.numpy(), np.full(SIZE, (place.world_size + 1) / 2)


def accumulated_gradients(place: Place) -> Iterator[Outcome]:
    """A backward that stays on the rank, and one that averages both."""
    model = _Scaled()
    network = distributed.data_parallel(model)
    x = paddle.full([SIZE], place.rank + 1.0)
    with distributed.gradient_sync(network, GradientsConfig(), enabled=False):
        network(x).backward()
    yield "on the rank", model.weight.grad.numpy(), np.full(SIZE, place.rank + 1.0)
    with distributed.gradient_sync(network, GradientsConfig(), enabled=True):
        network(x).backward()
    yield "averaged", model.weight.grad.numpy(), np.full(SIZE, place.world_size + 1.0)


def synchronised_batch_norm(place: Place) -> Iterator[Outcome]:
    """Forward and backward, against the formulas over the whole batch (see `batch_norm`)."""
    random = np.random.default_rng(0)
    shape = (place.world_size, 2, 3, 4, 4)  # rank, sample, channel, row, column
    x, gradient = random.standard_normal(shape) * 3 + 5, random.standard_normal(shape)
    layer = convert_sync_batch_norm(paddle.nn.Sequential(paddle.nn.BatchNorm2D(3)))
    layer.to(dtype="float64")
    layer.train()
    mine = paddle.to_tensor(x[place.rank], stop_gradient=False)
    out = layer(mine)
    (out * paddle.to_tensor(gradient[place.rank])).sum().backward()

    others = (0, 1, 3, 4)
    mean, variance = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    # Paddle hands epsilon to its kernels as a float32 number.
    deviation = np.sqrt(variance + float(np.float32(layer[0]._epsilon)))
    y = (x - mean) / deviation
    slope = gradient - gradient.mean(others, keepdims=True)
    slope = (slope - y * (gradient * y).mean(others, keepdims=True)) / deviation
    yield "forward", out.numpy(), y[place.rank]
    yield "backward", mine.grad.numpy(), slope[place.rank]


def training(config: Config, place: Place) -> Iterator[Outcome]:
    """A tiny model's losses and weights after a few steps, against those of one process."""
    train_set = data.build(config.dataset, "train", config.seed)
    alone = Place(rank=0, world_size=1, local_rank=0, node=0)
    losses, weights = _train(config, train_set, place)
    wanted_losses, wanted_weights = _train(config, train_set, alone)
    yield "losses", losses, wanted_losses
    yield "weights", weights, wanted_weights


def _train(config: Config, train_set: ImageDataset, place: Place) -> tuple[Array, Array]:
    """Train in float64, on all ranks or, where `place` says so, on this one for itself.

    Returns:
        The global losses ([STEPS], or of as many steps as there are), and all weights in a row.
    """
    assert config.global_batch_size is not None
    shared = place.world_size > 1
    global_batch = min(config.global_batch_size, len(train_set))  # there may be many ranks
    plan = data.Plan(len(train_set), global_batch, config.seed, place.rank, place.world_size)
    paddle.seed(config.seed)
    model = _tiny_model(train_set.num_classes)
    if shared:
        model = convert_sync_batch_norm(model)
    model.to(dtype="float64")
    optimizer = paddle.optimizer.Momentum(0.05, parameters=model.parameters())
    network = distributed.data_parallel(model) if shared else model
    optimizer = fleet.distributed_optimizer(optimizer) if shared else optimizer
    normalise = Normalise(train_set, "float64")
    losses = []
    for batch in islice(train_loader(train_set, plan, 0, 0, config), STEPS):
        logits = network(normalise(batch.images))
        share = cross_entropy(logits, paddle.to_tensor(batch.labels), 0.0).sum()
        share = share / batch.global_count
        (share * place.world_size).backward()
        optimizer.step()
        optimizer.clear_grad()
        loss = share.detach()
        losses.append(distributed.sum_over_ranks(loss) if shared else loss)
    weights = [parameter.numpy().ravel() for parameter in model.parameters()]
    return paddle.stack(losses).numpy(), np.concatenate(weights)


def _tiny_model(num_classes: int) -> paddle.nn.Layer:
    return paddle.nn.Sequential(
        paddle.nn.Conv2D(3, 4, 3, padding=1),
        paddle.nn.BatchNorm(4),  # the class that PaddleClas has in its ResNets
        paddle.nn.ReLU(),
        paddle.nn.AdaptiveAvgPool2D(2),
        paddle.nn.Flatten(),
        paddle.nn.Linear(16, num_classes),
    )
