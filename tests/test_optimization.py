"""Schedules and updates against independent computations; mixed precision as far as a CPU goes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paddle import nn
from paddle.distributed import fleet

from recipes import distributed, models, optimization, telemetry, trainer
from recipes.config import (
    AmpConfig,
    Config,
    DatasetConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from recipes.metering import Meter
from recipes.progress import NoDisplay
from recipes.pulse import NoPulse
from recipes.topology import Place

ALONE = Place(0, 1, 0, 0)
AMPS = [AmpConfig(level, dtype) for level in ("O1", "O2") for dtype in ("float16", "bfloat16")]
HAS_GPU = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0


@pytest.fixture(autouse=True)
def cpu() -> None:
    paddle.set_device("cpu")
    paddle.seed(3)


def a_config(**optimizer: Any) -> Config:
    options: dict[str, Any] = {"name": "momentum", "base_lr": 0.1, "scale_lr": False} | optimizer
    return Config(
        optimizer=OptimizerConfig(**options),
        schedule=ScheduleConfig(name="cosine"),
        batch_size=8,
        global_batch_size=8,
    )


# --- the schedule


@given(base=st.floats(1e-6, 10), batch=st.integers(1, 100_000))
def test_the_scaling_rule(base: float, batch: int) -> None:
    scaled = OptimizerConfig("momentum", base)
    assert optimization.peak_learning_rate(scaled, batch) == pytest.approx(base / 256 * batch)
    assert optimization.peak_learning_rate(scaled, 256) == pytest.approx(base)
    fixed = OptimizerConfig("momentum", base, scale_lr=False)
    assert optimization.peak_learning_rate(fixed, batch) == base


def paddle_factors(schedule: ScheduleConfig, epochs: int, steps: int) -> list[float]:
    """The same from Paddle's own schedulers."""
    lr = paddle.optimizer.lr
    warmup = round(schedule.warmup_epochs * steps)
    if schedule.name == "step":
        # Milestones count from the first step, warm-up included.
        after = lr.MultiStepDecay(
            1.0, [round(m * steps) - warmup for m in schedule.milestones], schedule.gamma
        )
    else:
        total = max(1, epochs * steps - warmup)  # Paddle's wants a step, also if none is left
        after = lr.CosineAnnealingDecay(1.0, total, eta_min=schedule.final_lr_factor)
    if warmup:
        # Ours gives (step + 1) / warmup, so that no step is taken with a rate of 0.
        after = lr.LinearWarmup(after, warmup, 1 / warmup, 1 + 1 / warmup)
    found = []
    for _ in range(epochs * steps):
        found.append(after())
        after.step()
    return found


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["cosine", "step"]),
    epochs=st.integers(2, 6),
    steps=st.integers(1, 9),
    warmup=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    floor=st.sampled_from([0.0, 0.01, 0.5]),
    milestones=st.lists(st.sampled_from([2.0, 2.5, 3.0, 4.0, 5.0]), unique=True).map(sorted),
)
def test_the_schedule_equals_paddles(
    name: str, epochs: int, steps: int, warmup: float, floor: float, milestones: list[float]
) -> None:
    assume(len({round(m * steps) for m in milestones}) == len(milestones))  # Paddle wants it so
    schedule = ScheduleConfig(name, warmup, floor, milestones, gamma=0.1)
    factor = optimization.schedule_factor(schedule, epochs, steps)
    ours = [factor(step) for step in range(epochs * steps)]
    assert ours == pytest.approx(paddle_factors(schedule, epochs, steps), rel=1e-9, abs=1e-12)


def test_the_schedule_by_hand() -> None:
    schedule = ScheduleConfig("cosine", warmup_epochs=2, final_lr_factor=0.1)
    factor = optimization.schedule_factor(schedule, epochs=6, steps_per_epoch=2)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)  # half way from 4 to 12
    assert factor(12) == pytest.approx(0.1)
    assert factor(99) == pytest.approx(0.1)
    steps = optimization.schedule_factor(
        ScheduleConfig("step", milestones=[1, 1.5], gamma=0.5), epochs=2, steps_per_epoch=4
    )
    assert [steps(step) for step in range(8)] == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]


@given(warmup=st.floats(0, 5), epochs=st.integers(1, 4), steps=st.integers(1, 20))
def test_the_rate_is_never_zero_nor_above_its_peak(warmup: float, epochs: int, steps: int) -> None:
    factor = optimization.schedule_factor(ScheduleConfig("cosine", warmup), epochs, steps)
    assert all(0 < factor(step) <= 1 for step in range(epochs * steps))


@pytest.mark.parametrize("done", [0, 1, 5, 11])
def test_a_resumed_schedule_goes_on_as_if_it_had_never_stopped(done: int) -> None:
    config = a_config()
    config.epochs, config.schedule.warmup_epochs = 3, 1.0
    whole = optimization.build_schedule(config, 4)
    rates = []
    for _ in range(12):
        rates.append(whole())
        whole.step()
    first = optimization.build_schedule(config, 4)
    for _ in range(done):
        first.step()
    resumed = optimization.build_schedule(config, 4)
    resumed.set_state_dict(first.state_dict())
    for rate in rates[done:]:
        assert resumed() == rate
        resumed.step()


# --- the update


@pytest.mark.parametrize(
    "config", [ModelConfig("ResNet18"), ModelConfig("MobileNetV3_small_x1_0")], ids=lambda c: c.name
)
def test_only_weights_of_convolutions_and_linear_layers_decay(config: ModelConfig) -> None:
    model = models.build(config, num_classes=10, image_size=32)
    weights = {
        layer.weight.name for layer in model.sublayers() if isinstance(layer, nn.Conv2D | nn.Linear)
    }
    with_decay, without = optimization.decayed(model, decay_bn_and_bias=False)
    assert {p.name for p in with_decay} == weights
    trainable = {p.name for p in model.parameters() if not p.stop_gradient}
    assert {p.name for p in without} == trainable - weights
    assert without
    everything, nothing = optimization.decayed(model, decay_bn_and_bias=True)
    assert {p.name for p in everything} == trainable
    assert nothing == []
    # With no gradient but zeros, what moves is what decays.
    for name, bn_and_bias in (("momentum", False), ("adamw", False), ("momentum", True)):
        options = a_config(name=name, weight_decay=0.5, decay_bn_and_bias=bn_and_bias)
        optimizer = optimization.build_optimizer(options, model, fixed_rate())
        before = {p.name: p.numpy().copy() for p in model.parameters()}
        for p in model.parameters():
            if not p.stop_gradient:
                (p * 0).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        for p in model.parameters():
            decays = p.name in weights or (bn_and_bias and p.name in trainable)
            expected = before[p.name] * (0.95 if decays else 1.0)
            np.testing.assert_allclose(p.numpy(), expected, rtol=1e-6, err_msg=p.name)


def fixed_rate(rate: float = 0.1) -> Any:
    return paddle.optimizer.lr.LambdaDecay(rate, lambda _: 1.0)


def small_model(dtype: str = "float64") -> nn.Layer:
    model = nn.Sequential(nn.Conv2D(2, 3, 2), nn.BatchNorm2D(3), nn.Flatten(), nn.Linear(3, 2))
    rng = np.random.default_rng(1)
    model.to(dtype=dtype)
    for p in model.parameters():
        if not p.stop_gradient:
            p.set_value(rng.normal(size=p.shape).astype(dtype))
    return model


def expected_steps(
    options: OptimizerConfig,
    start: dict[str, np.ndarray],
    gradients: list[dict[str, np.ndarray]],
    rates: list[float],
) -> dict[str, np.ndarray]:
    """Momentum (v = mu v + g, p -= lr v) and AdamW, as in their papers, in float64."""
    values = {name: value.copy() for name, value in start.items()}
    first = {name: np.zeros_like(value) for name, value in start.items()}
    second = {name: np.zeros_like(value) for name, value in start.items()}
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
        scale = min(1.0, options.clip_norm / norm) if options.clip_norm else 1.0
        for name, p in values.items():
            g = gradient[name] * scale
            decay = options.weight_decay if p.ndim > 1 or options.decay_bn_and_bias else 0.0
            if options.name == "momentum":
                first[name] = options.momentum * first[name] + g + decay * p
                p -= rate * first[name]
                continue
            p *= 1 - rate * decay
            first[name] = options.beta1 * first[name] + (1 - options.beta1) * g
            second[name] = options.beta2 * second[name] + (1 - options.beta2) * g**2
            mean = first[name] / (1 - options.beta1**step)
            variance = second[name] / (1 - options.beta2**step)
            p -= rate * mean / (np.sqrt(variance) + options.epsilon)
    return values


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("bn_and_bias", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adamw", "fused momentum"])
def test_three_steps_equal_numpys(name: str, bn_and_bias: bool, clip_norm: float | None) -> None:
    fused, name = name.startswith("fused"), name.removeprefix("fused ")
    config = a_config(
        name=name,
        weight_decay=0.3,
        decay_bn_and_bias=bn_and_bias,
        clip_norm=clip_norm,
        fused=fused,
    )
    config.epochs, config.schedule.warmup_epochs = 4, 2.0
    dtype, tolerance = ("float32", 1e-5) if fused else ("float64", 1e-6)  # Paddle fuses no float64
    model = small_model(dtype)
    # As some of PaddleClas's backbones do; the configured decay counts all the same.
    model[0].bias.regularizer = paddle.regularizer.L2Decay(7.0)
    model[3].weight.regularizer = paddle.regularizer.L2Decay(0.0)
    schedule = optimization.build_schedule(config, steps_per_epoch=1)
    optimizer = optimization.build_optimizer(config, model, schedule)
    trained = {p.name: p for p in model.parameters() if not p.stop_gradient}
    start = {name: p.numpy().astype("float64") for name, p in trained.items()}
    rng = np.random.default_rng(2)
    gradients, rates = [], []
    for _ in range(3):
        gradient = {name: rng.normal(size=p.shape) for name, p in trained.items()}
        constants = {key: paddle.to_tensor(gradient[key]).astype(dtype) for key in trained}
        sum((p * constants[key]).sum() for key, p in trained.items()).backward()
        gradients.append(gradient)
        rates.append(optimizer.get_lr())
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
    assert rates == [0.05, 0.1, 0.1]
    expected = expected_steps(config.optimizer, start, gradients, rates)
    for key, p in trained.items():
        # Paddle keeps the learning rate and the clipped norm in float32.
        np.testing.assert_allclose(
            p.numpy(), expected[key], rtol=tolerance, atol=tolerance / 10, err_msg=key
        )


def test_the_clipped_gradient_has_the_configured_norm_over_all_parameters() -> None:
    config = a_config(momentum=0.0, clip_norm=0.25)
    model = small_model()
    optimizer = optimization.build_optimizer(config, model, fixed_rate(1.0))
    before = [p.numpy().copy() for p in model.parameters()]
    sum((p * 3).sum() for p in model.parameters() if not p.stop_gradient).backward()
    optimizer.step()
    moved = [p.numpy() - b for p, b in zip(model.parameters(), before, strict=True)]
    assert math.sqrt(sum(float((m**2).sum()) for m in moved)) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_label_smoothing(smoothing: float, dtype: str) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 5, (6, 10)), rng.integers(0, 10, 6)
    target = np.full((6, 10), smoothing / 10)
    target[np.arange(6), labels] += 1 - smoothing
    shifted = logits - logits.max(1, keepdims=True)
    expected = -(target * (shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))).sum(1)
    losses = trainer.cross_entropy(
        paddle.to_tensor(logits, dtype=dtype), paddle.to_tensor(labels), smoothing
    )
    assert str(losses.dtype) == f"paddle.{dtype}"
    # Paddle 3.3.1 smooths in float32, also where the logits are float64.
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(losses.numpy(), expected, rtol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_there_is_one_loss_for_each_sample(smoothing: float) -> None:
    losses = trainer.cross_entropy(paddle.zeros([6, 3]), paddle.to_tensor([0, 1, 2] * 2), smoothing)
    assert losses.shape == [6]


def test_step_seeds_differ_by_step_and_rank_and_repeat() -> None:
    seeds = {
        trainer.step_seed(seed, step, rank)
        for seed in (0, 2**64 - 1)
        for step in range(50)
        for rank in range(4)
    }
    assert len(seeds) == 2 * 50 * 4
    assert trainer.step_seed(1, 2, 3) == trainer.step_seed(1, 2, 3)
    paddle.seed(max(seeds))  # in the range that Paddle takes


# --- mixed precision, whose calls Paddle turns into no-ops on a CPU


@pytest.mark.parametrize("amp", [AmpConfig(), *AMPS], ids=lambda a: f"{a.level}-{a.dtype}")
def test_amp_calls_are_accepted_and_change_nothing_on_a_cpu(amp: AmpConfig) -> None:
    model = small_model().to(dtype="float32")
    config = a_config()
    config.amp = amp
    names = list(model.state_dict())
    parameters = [p.name for p in model.parameters()]
    optimizer = optimization.build_optimizer(config, model, fixed_rate())
    assert optimizer._multi_precision == (amp.level == "O2")
    decorated, optimizer = optimization.decorate(amp, model, optimizer)
    assert decorated is model  # `Saver` and Fleet hold the same one
    assert list(model.state_dict()) == names
    assert [p.name for p in model.parameters()] == parameters
    scaler = optimization.build_scaler(amp)
    before = model[3].weight.numpy().copy()
    with optimization.autocast(amp):
        logits = model(paddle.randn([4, 2, 2, 2]))
    if not HAS_GPU:
        assert logits.dtype == paddle.float32
    scaler.scale(logits.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    skipped = optimization.skipped_step(scaler)
    assert skipped is None or not bool(skipped)
    optimizer.clear_grad()
    assert not np.array_equal(model[3].weight.numpy(), before)
    state = scaler.state_dict()
    optimization.build_scaler(amp).load_state_dict(state)


def test_only_float16_asks_for_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, float]] = []

    def scaler(*, enable: bool, init_loss_scaling: float) -> None:
        asked.append((enable, init_loss_scaling))

    monkeypatch.setattr(paddle.amp, "GradScaler", scaler)
    for amp in [AmpConfig(), AmpConfig("off", "bfloat16"), *AMPS]:
        amp = AmpConfig(amp.level, amp.dtype, initial_loss_scale=2.0)
        optimization.build_scaler(amp)
    assert asked == [(enable, 2.0) for enable in (False, False, True, False, True, False)]


def test_a_scaler_tells_whether_it_skipped() -> None:
    # A CPU's scaler is never enabled, so its two answers come from a stand-in.
    class Enabled:
        _found_inf = paddle.to_tensor([True])

        def is_enable(self) -> bool:
            return True

    skipped = optimization.skipped_step(Enabled())
    assert skipped is not None
    meter = Meter(ALONE)
    meter.add(paddle.to_tensor(0.5), paddle.zeros([1, 2]), paddle.to_tensor([0]))
    meter.finish_step(1, skipped)
    assert meter.read().skipped_steps == 1
    assert optimization.skipped_step(paddle.amp.GradScaler(enable=False)) is None


@pytest.mark.parametrize("amp", AMPS, ids=lambda a: f"{a.level}-{a.dtype}")
def test_the_loop_decorates_the_whole_model_before_it_is_wrapped(
    amp: AmpConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def spy(where: Any, name: str) -> None:
        call = getattr(where, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            order.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(where, name, noted)

    spy(models, "prepare")
    spy(paddle.amp, "decorate")
    spy(distributed, "data_parallel")
    spy(fleet, "distributed_optimizer")
    spy(paddle.amp, "auto_cast")
    config = a_config()
    config.amp, config.device, config.max_steps, config.eval_batch_size = amp, "cpu", 1, 4
    config.model = ModelConfig("MobileNetV3_small_x0_35")
    config.dataset = DatasetConfig(
        "synthetic", image_size=8, num_classes=3, train_size=8, eval_size=4
    )
    distributed.start(config, ALONE)
    run = telemetry.RunFolder(tmp_path)
    result = trainer.train(config, run, ALONE, NoDisplay(), NoPulse())
    assert result.status == "completed"
    expected = ["prepare", "decorate", "data_parallel", "distributed_optimizer", "auto_cast"]
    if amp.level == "O1":
        expected.remove("decorate")
    assert order[: len(expected)] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU and a GPU build of Paddle")
@pytest.mark.parametrize("amp", AMPS, ids=lambda a: f"{a.level}-{a.dtype}")
def test_a_step_in_mixed_precision(amp: AmpConfig) -> None:
    paddle.set_device("gpu")
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1D(8), nn.Linear(8, 2))
    config = a_config(weight_decay=0.1, clip_norm=1.0)
    config.amp = amp
    optimizer = optimization.build_optimizer(config, model, fixed_rate())
    model, optimizer = optimization.decorate(amp, model, optimizer)
    kept = amp.dtype if amp.level == "O2" else "float32"
    assert str(model[0].weight.dtype) == f"paddle.{kept}"
    assert model[1].weight.dtype == paddle.float32
    scaler, meter = optimization.build_scaler(amp), Meter(ALONE)
    overflows = amp.dtype == "float16"
    for step, factor in enumerate((1.0, float("inf") if overflows else 1.0, 1.0), start=1):
        before = model[0].weight.astype("float32").numpy()
        labels = paddle.to_tensor([0, 1] * 4)
        with optimization.autocast(amp):
            logits = model(paddle.randn([8, 8]))
            share = trainer.cross_entropy(logits, labels, 0.1).mean()
        scaler.scale(share * factor).backward()  # only the gradient overflows
        meter.add(share, logits, labels)
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        meter.finish_step(step, optimization.skipped_step(scaler))
        moved = not np.array_equal(model[0].weight.astype("float32").numpy(), before)
        assert moved == (factor == 1.0)
    reading = meter.read()
    assert math.isfinite(reading.loss)
    assert reading.skipped_steps == int(overflows)
