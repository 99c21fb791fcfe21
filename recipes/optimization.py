"""The optimizer, the learning-rate schedule, and mixed precision."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import paddle

from recipes.config import AmpConfig, Config, OptimizerConfig, ScheduleConfig

# The linear scaling rule's reference batch (Goyal et al. 2017, arXiv:1706.02677).
REFERENCE_BATCH = 256


def peak_learning_rate(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """The learning rate after warm-up: ``base_lr * global_batch_size / 256``, or ``base_lr``."""
    if not optimizer.scale_lr:
        return optimizer.base_lr
    return optimizer.base_lr * global_batch_size / REFERENCE_BATCH


def schedule_factor(
    schedule: ScheduleConfig, epochs: int, steps_per_epoch: int
) -> Callable[[int], float]:
    """The share of the peak learning rate at each optimizer step, counted from 0.

    Warm-up rises linearly and reaches the peak at its last step (Goyal et al. 2017). Then either
    half a cosine falls to ``final_lr_factor`` (Loshchilov and Hutter 2017, arXiv:1608.03983,
    without restarts), or the rate is multiplied by ``gamma`` at each milestone.
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    total = epochs * steps_per_epoch
    milestones = [round(epoch * steps_per_epoch) for epoch in schedule.milestones]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.name == "step":
            return schedule.gamma ** bisect.bisect_right(milestones, step)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        floor = schedule.final_lr_factor
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def build_schedule(config: Config, steps_per_epoch: int) -> paddle.optimizer.lr.LRScheduler:
    """Paddle's scheduler, stepped once after every optimizer step."""
    assert config.global_batch_size is not None
    return paddle.optimizer.lr.LambdaDecay(
        learning_rate=peak_learning_rate(config.optimizer, config.global_batch_size),
        lr_lambda=schedule_factor(config.schedule, config.epochs, steps_per_epoch),
    )


def decayed(model: paddle.nn.Layer, decay_bn_and_bias: bool) -> tuple[list[Any], list[Any]]:
    """Split the trainable parameters in those with and those without weight decay.

    Batch-norm parameters and biases are vectors; weights of convolutions and linear layers have
    two dimensions or more. Decay on the former is left out by default (He et al. 2019,
    arXiv:1812.01187).
    """
    parameters = [p for p in model.parameters() if not p.stop_gradient]
    if decay_bn_and_bias:
        return parameters, []
    return [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]


def build_optimizer(
    config: Config, model: paddle.nn.Layer, schedule: paddle.optimizer.lr.LRScheduler
) -> paddle.optimizer.Optimizer:
    """Momentum (Sutskever et al. 2013) or AdamW (Loshchilov and Hutter 2019).

    All parameters are in one group: Paddle 3.3.1 would clip each group to a norm of its own. What
    has no weight decay is said in another way; regularizers that a backbone brings with its
    parameters, which Paddle would put before the configured decay, are replaced.
    """
    options = config.optimizer
    with_decay, without_decay = decayed(model, options.decay_bn_and_bias)
    for parameter in with_decay + without_decay:
        parameter.regularizer = None
    shared: dict[str, Any] = {
        "learning_rate": schedule,
        "parameters": with_decay + without_decay,
        "weight_decay": options.weight_decay,
        "grad_clip": paddle.nn.ClipGradByGlobalNorm(options.clip_norm)
        if options.clip_norm
        else None,
        # Float32 master weights where AMP O2 keeps the parameters in 16 bits.
        "multi_precision": config.amp.level == "O2",
    }
    if options.name == "adamw":
        names = {parameter.name for parameter in with_decay}
        return paddle.optimizer.AdamW(
            beta1=options.beta1,
            beta2=options.beta2,
            epsilon=options.epsilon,
            apply_decay_param_fun=lambda name: name in names,
            **shared,
        )
    for parameter in without_decay:
        parameter.regularizer = paddle.regularizer.L2Decay(0.0)  # goes before weight_decay
    return paddle.optimizer.Momentum(
        momentum=options.momentum, use_multi_tensor=options.fused, **shared
    )


def autocast(amp: AmpConfig) -> AbstractContextManager[None]:
    """The context of a forward pass under AMP; without AMP it changes nothing."""
    return paddle.amp.auto_cast(  # type: ignore[no-any-return]
        enable=amp.level != "off",
        level=amp.level if amp.level != "off" else "O1",
        dtype=amp.dtype,
    )


def build_scaler(amp: AmpConfig) -> paddle.amp.GradScaler:
    """A dynamic loss scale for float16 (Micikevicius et al. 2018, arXiv:1710.03740).

    Bfloat16 has float32's range and needs none; the scaler then passes everything through.
    """
    needed = amp.level != "off" and amp.dtype == "float16"
    return paddle.amp.GradScaler(enable=needed, init_loss_scaling=amp.initial_loss_scale)


def skipped_step(scaler: paddle.amp.GradScaler) -> paddle.Tensor | None:
    """Whether the scaler skipped the last step for overflowing gradients, on the device."""
    return scaler._found_inf if scaler.is_enable() else None


def decorate(
    amp: AmpConfig, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer
) -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    """Under O2, turn the model's parameters to 16 bits, batch-norm left in float32."""
    if amp.level != "O2":
        return model, optimizer
    return paddle.amp.decorate(  # type: ignore[no-any-return]
        models=model, optimizers=optimizer, level="O2", dtype=amp.dtype
    )
