"""The training loop. Read this file first.

Data parallelism adds five things to a training of one process:

1. `fleet.init`, in `distributed.start`, before anything else;
2. `data.Plan`: each rank reads its own share of every global batch;
3. `distributed.data_parallel`: gradients are averaged over the ranks in backward;
4. `fleet.distributed_optimizer`: the optimizer knows the group;
5. `paddle.distributed.launch`, in `launch.py`, starts one process per device.

Nothing here waits for the device outside of a logging step.
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet

from recipes import batch_norm, data, distributed, models, optimization, telemetry
from recipes.config import Config
from recipes.data.loader import SkipCounter, start_decoders, train_loader
from recipes.data.normalisation import Normalise
from recipes.data.transfer import on_device
from recipes.data.worker_processes import check_shared_memory
from recipes.evaluation import evaluate
from recipes.metering import Meter
from recipes.progress import StepDisplay
from recipes.pulse import Phase, Pulse
from recipes.recorder import Recorder
from recipes.same_training import identity
from recipes.saving import Saver
from recipes.topology import Place

_log = logging.getLogger(__name__)


def train(
    config: Config,
    run: telemetry.RunFolder,
    place: Place,
    display: StepDisplay,
    pulse: Pulse,
) -> telemetry.Result:
    """Train, evaluate and save as configured.

    Args:
        config: checked, with its batch sizes filled in.
        run: where rank 0 leaves metrics and checkpoints.
        place: this process in the job, which `distributed.start` has joined.
        display: shows a person how far the run is.
        pulse: shows the parent that this rank moves on.

    Raises:
        UserError: the data, a checkpoint or the disk is not as it must be, or the loss is not
            finite.
    """
    check_shared_memory(config)
    train_set = data.build(config.dataset, "train", config.seed)
    eval_set = data.build(config.dataset, "eval", config.seed)
    for remark in train_set.remarks() if place.rank == 0 else ():
        _log.warning(remark)
    plan = data.Plan.of(config, len(train_set), place)
    decoders = start_decoders(config, train_set, eval_set)  # while this process is small

    # One seed on every rank: all start from the same weights. The model has to be complete, its
    # sync-BN and AMP included, before Fleet wraps it.
    paddle.seed(config.seed)
    model = models.prepare(config, train_set)
    schedule = optimization.build_schedule(config, plan.steps_per_epoch)
    optimizer = optimization.build_optimizer(config, model, schedule)
    model, optimizer = optimization.decorate(config.amp, model, optimizer)
    scaler = optimization.build_scaler(config.amp)

    described = identity(config, len(train_set), models.num_classes(config, train_set))
    classes = train_set.num_classes
    saver = Saver(config, run, place, model, optimizer, scaler, described, classes)
    recorder = Recorder(config, run, place, plan, saver.resume(), display, pulse)

    network = distributed.data_parallel(model)
    saver.restore_own()
    optimizer = fleet.distributed_optimizer(optimizer)
    normalise = Normalise(train_set, config.dtype)
    meter = Meter(place, recorder.position.since_event)
    skipped = SkipCounter(train_set, config.dataset.max_skipped)

    while not (recorder.done and not recorder.evaluation_due):
        if recorder.evaluation_due:
            if recorder.evaluated(evaluate(model, eval_set, config, place, pulse, decoders)):
                saver.mark_best(recorder.position.step)
            continue

        epoch, first_step = recorder.position.epoch, recorder.position.step_in_epoch
        stopped = False
        model.train()
        recorder.go_on()
        loader = train_loader(train_set, plan, epoch, first_step, config, decoders)
        with contextlib.closing(loader):  # nothing is read ahead in vain
            for batch, images, labels in recorder.waiting(on_device(loader)):
                for path in skipped.update(batch):
                    _log.warning("replaced %s: cannot be read", path)
                if batch.part == 0:
                    paddle.seed(step_seed(config.seed, recorder.position.step, place.rank))
                last_part = batch.part == config.accumulate - 1

                # Gradients add up locally, and are averaged over the ranks with the last part.
                with distributed.gradient_sync(network, config.gradients, enabled=last_part):
                    with optimization.autocast(config.amp):
                        logits = network(normalise(images))
                        losses = cross_entropy(logits, labels, config.label_smoothing)
                    # This micro-batch's part of the mean over the global batch. Fleet averages over
                    # the ranks; times the world size, that average is the gradient of the global
                    # mean, also where the ranks' shares differ in size.
                    share = losses.sum() / batch.global_count
                    scaler.scale(share * place.world_size).backward()
                meter.add(share, logits, labels)
                if not last_part:
                    continue

                learning_rate = optimizer.get_lr()
                scaler.step(optimizer)
                scaler.update()
                optimizer.clear_grad()
                schedule.step()
                meter.finish_step(recorder.position.step + 1, optimization.skipped_step(scaler))
                recorder.finish_step(epoch, batch, learning_rate, meter)

                stopped = pulse.asks_to_stop(recorder.position.step)
                if stopped or recorder.done:
                    break
                if recorder.save_due and not recorder.evaluation_due:
                    meter.check_finite()  # before a broken model could replace a good checkpoint
                    saver.save(recorder.position_now(meter))

        recorder.pause()
        meter.check_finite()
        if recorder.evaluation_due and not config.sync_bn:
            # Each rank has running statistics of its own samples; their mean stands for all, and
            # makes every rank evaluate, and rank 0 save, the same model.
            distributed.average_over_ranks(batch_norm.running_statistics(model))
        if stopped or recorder.save_due:
            saver.save(recorder.position_now(meter))
        if stopped:
            saver.finish(completed=False)
            return recorder.result("interrupted")

    pulse.mark(Phase.SAVING, recorder.position.step)
    saver.finish(completed=True)
    return recorder.result()


def cross_entropy(
    logits: paddle.Tensor, labels: paddle.Tensor, label_smoothing: float
) -> paddle.Tensor:
    """The loss of each sample, with label smoothing (Szegedy et al. 2016, arXiv:1512.00567).

    Args:
        logits: [b, classes].
        labels: int64[b].
        label_smoothing: the share of the target spread evenly over all classes.

    Returns:
        [b], in the dtype of the logits.
    """
    losses = F.cross_entropy(logits, labels, reduction="none").flatten()
    if label_smoothing == 0:
        return losses
    # Paddle's own smoothing computes in float32, whatever the logits are.
    uniform = -F.log_softmax(logits, axis=-1).mean(axis=-1)
    return (1 - label_smoothing) * losses + label_smoothing * uniform


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of Paddle's generator in one step, for dropout and the like.

    Setting it anew at each step makes a resumed run draw the same numbers without saving any
    generator's state; ranks draw different ones.
    """
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
