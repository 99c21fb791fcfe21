"""Where the time of a training step goes: the loop of `trainer`, with a clock between its parts.

On a GPU each part ends with `paddle.device.synchronize`, so that its time is its own. A step takes
longer that way than in the loop that users run, where the processor prepares the next part while
the device still computes; both times are in the record.

The parts are those of `record.PHASES`:

- data_wait: until the loader gives the batch, and its copy to the device is issued;
- input: normalisation on the device;
- forward: the network and the loss;
- backward: the gradients, as on one process;
- communication: how much longer backward takes when it averages gradients over the ranks;
- optimizer: the update, the loss scale, clearing the gradients, the schedule;
- rest: the meter, the marks for the parent.

Communication overlaps with backward, so it has no beginning and no end of its own that a clock
between parts could see. What it costs is the time that it adds: backward with the averaging, less
backward without. The latter is measured after every step, on the same batch and with the same
weights, and its gradients are dropped, so that the training goes on as if it had not been; ranks
that share cores or a memory bus slow each other down in both alike. What is called communication is
then what the all-reduce costs beyond what it hides behind the computation, the wait for the slowest
rank included. The all-reduces of synchronised batch-norm are inside forward and backward.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

from recipes import data, distributed, models, optimization
from recipes.benchmark.record import PHASES, Split
from recipes.config import Config, uses_gpu
from recipes.data.base import ImageDataset
from recipes.data.loader import Batch, SkipCounter, train_loader
from recipes.data.normalisation import Normalise
from recipes.data.transfer import on_device
from recipes.metering import Meter
from recipes.pulse import Phase, Pulse
from recipes.topology import Place
from recipes.trainer import cross_entropy, step_seed

WARMUP_STEPS = 2

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Timings:
    """What one rank measured.

    Attributes:
        steps: [n, len(PHASES) + 1], seconds of each phase, and of the whole step last.
        local_backward: [n], seconds of a backward pass without communication; [0] on one process.
        losses: [all steps], the global losses.
    """

    steps: Seconds
    local_backward: Seconds
    losses: list[float]


def measure(config: Config, place: Place, pulse: Pulse) -> Split:
    """Take ``benchmark.split_steps`` steps on all ranks, and say where their time went."""
    timings = instrumented(config, place, pulse, WARMUP_STEPS, config.benchmark.split_steps)
    steps = distributed.gather(paddle.to_tensor(timings.steps, dtype="float64"))
    local = timings.local_backward
    if place.world_size > 1:
        gathered = distributed.gather(paddle.to_tensor(local, dtype="float64"))
    else:
        gathered = np.stack([local])
    return split_of(steps, gathered, config.accumulate)


def split_of(steps: Seconds, local_backward: Seconds, accumulate: int) -> Split:
    """From raw samples to the parts of a typical step.

    Means over the middle half of the steps by their whole time: a mean, so that parts add up; the
    middle half, so that a pause of the machine in one step does not become somebody's part.

    Args:
        steps: [ranks, n, len(PHASES) + 1], as in `Timings`.
        local_backward: [ranks, n], seconds of one micro-batch's; [1, 0] on one process.
        accumulate: micro-batches of a step, each with a backward pass.
    """
    typical = np.stack([own[middle_half(own[:, -1])].mean(axis=0) for own in steps])
    backward, communication = PHASES.index("backward"), PHASES.index("communication")
    if len(steps) > 1:
        alone = np.array([own[middle_half(own)].mean() for own in local_backward]) * accumulate
        typical[:, communication] = np.maximum(0.0, typical[:, backward] - alone)
        typical[:, backward] -= typical[:, communication]
    mean = typical.mean(axis=0).tolist()
    return Split(
        phases=dict(zip(PHASES, mean[:-1], strict=True)),
        step=mean[-1],
        steps=steps.tolist(),
        local_backward=local_backward.tolist(),
    )


def middle_half(values: Seconds) -> NDArray[np.int64]:
    """The indices of the values between the quartiles, at least one."""
    order = np.argsort(values, kind="stable")
    quarter = len(values) // 4
    return order[quarter : len(values) - quarter]


class Stopwatch:
    """Adds up the time of phases; each ends when the device has done its work.

    Args:
        gpu: whether there is a device to wait for.
    """

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = 0.0

    def begin(self) -> None:
        """Set all phases to 0; the first begins here."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = self.now()

    def lap(self, phase: str) -> None:
        """The time since the lap before was `phase`'s."""
        now = self.now()
        self._seconds[phase] += now - self._last
        self._last = now

    def now(self) -> float:
        """Seconds, once the device is idle."""
        if self._gpu:
            paddle.device.synchronize()
        return time.perf_counter()

    def seconds(self) -> list[float]:
        """By phase, in the order of `PHASES`."""
        return [self._seconds[phase] for phase in PHASES]


def instrumented(config: Config, place: Place, pulse: Pulse, warmup: int, measured: int) -> Timings:
    """Train as `trainer.train` does, from the first step on, and time the last `measured` steps.

    Args:
        config: checked, with its batch sizes filled in.
        place: this process in the job.
        pulse: shows the parent that this rank moves on.
        warmup: steps before.
    """
    train_set = data.build(config.dataset, "train", config.seed)
    plan = data.Plan.of(config, len(train_set), place)
    paddle.seed(config.seed)
    model = models.prepare(config, train_set)
    schedule = optimization.build_schedule(config, plan.steps_per_epoch)
    optimizer = optimization.build_optimizer(config, model, schedule)
    model, optimizer = optimization.decorate(config.amp, model, optimizer)
    scaler = optimization.build_scaler(config.amp)
    network = distributed.data_parallel(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    normalise = Normalise(train_set, config.dtype)
    meter = Meter(place)
    skipped = SkipCounter(train_set, config.dataset.max_skipped)

    clock = Stopwatch(uses_gpu(config))
    steps: list[list[float]] = []
    local_backward: list[float] = []
    losses: list[paddle.Tensor] = []
    model.train()
    with contextlib.closing(batches(train_set, plan, config)) as loader:
        stream = on_device(loader)
        for step in range(warmup + measured):
            began = clock.now()
            clock.begin()
            loss = paddle.zeros([], dtype="float64")
            for part in range(config.accumulate):
                batch, images, labels = next(stream)
                clock.lap("data_wait")
                skipped.update(batch)
                if part == 0:
                    paddle.seed(step_seed(config.seed, step, place.rank))
                clock.lap("rest")
                images = normalise(images)
                clock.lap("input")
                last_part = part == config.accumulate - 1
                with distributed.gradient_sync(network, config.gradients, enabled=last_part):
                    logits, share = _forward(config, network, images, labels, batch)
                    clock.lap("forward")
                    scaler.scale(share * place.world_size).backward()
                clock.lap("backward")
                meter.add(share, logits, labels)
                loss = loss + share.detach().astype("float64")
                clock.lap("rest")
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            schedule.step()
            clock.lap("optimizer")
            meter.finish_step(step + 1, optimization.skipped_step(scaler))
            pulse.mark(Phase.STEPPING, step + 1)
            clock.lap("rest")
            whole = clock.now() - began
            losses.append(loss)
            if step >= warmup:
                steps.append([*clock.seconds(), whole])
            if place.world_size == 1:
                continue
            with distributed.gradient_sync(network, config.gradients, enabled=False):
                _, share = _forward(config, network, images, labels, batch)
                began = clock.now()
                scaler.scale(share * place.world_size).backward()
                ended = clock.now()
            optimizer.clear_grad()
            # The next step begins on all ranks together, as it does after an all-reduce.
            distributed.sum_over_ranks(paddle.zeros([1])).numpy()
            if step >= warmup:
                local_backward.append(ended - began)
    return Timings(
        np.array(steps),
        np.array(local_backward),
        distributed.sum_over_ranks(paddle.stack(losses)).tolist(),
    )


def batches(
    train_set: ImageDataset, plan: data.Plan, config: Config
) -> Generator[Batch, None, None]:
    """This rank's micro-batches, epoch after epoch."""
    for epoch in count():
        with contextlib.closing(train_loader(train_set, plan, epoch, 0, config)) as loader:
            yield from loader


def _forward(
    config: Config, network: Any, images: Any, labels: Any, batch: Batch
) -> tuple[Any, Any]:
    """The logits, and this micro-batch's part of the mean loss over the global batch."""
    with optimization.autocast(config.amp):
        logits = network(images)
        losses = cross_entropy(logits, labels, config.label_smoothing)
    return logits, losses.sum() / batch.global_count
