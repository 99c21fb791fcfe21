"""Snapshots of a training: exact on resume, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import same

from recipes import checkpoint
from recipes.config import ScheduleConfig, UserError
from recipes.optimization import schedule_factor
from recipes.snapshot import check_names, restore, snapshot_of


def test_names_shapes_and_dtypes_that_differ_are_listed() -> None:
    zeros = np.zeros((2, 3), np.float32)
    saved: dict[str, Any] = {"same": zeros, "gone": zeros, "shape": zeros}
    saved["dtype"] = zeros.astype(np.uint16)
    current = {"same": zeros, "new": zeros, "shape": zeros.T, "dtype": zeros}
    with pytest.raises(UserError) as error:
        check_names(saved, current)
    for part in (
        "new: missing in the checkpoint",
        "gone: unknown to the model",
        "shape: float32[2, 3] in the checkpoint, float32[3, 2] in the model",
        "dtype: bfloat16[2, 3] in the checkpoint, float32[2, 3] in the model",
    ):
        assert part in error.value.message
    assert "same" not in error.value.message
    many = {f"w{index}": zeros for index in range(12)}
    with pytest.raises(UserError, match="and 4 more"):
        check_names({}, many)


def schedule_of(peak: float, warmup: float = 2) -> Any:
    """A cosine over ten epochs of one step each, as trainings have it."""
    import paddle

    shape = ScheduleConfig(name="cosine", warmup_epochs=warmup)
    return paddle.optimizer.lr.LambdaDecay(peak, schedule_factor(shape, 10, 1))


def build(kind: str, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """A small convolutional network with its optimizer and schedule."""
    import paddle

    paddle.seed(3)
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(1, 2, 3),
        paddle.nn.BatchNorm(2),
        paddle.nn.ReLU(),
        paddle.nn.Flatten(),
        paddle.nn.Linear(72, 3),
    )
    model.to(dtype=dtype)
    schedule = schedule_of(0.1)
    fused = {"use_multi_tensor": True} if kind == "fused Momentum" else {}
    optimizer = getattr(paddle.optimizer, kind.removeprefix("fused "))(
        schedule, parameters=model.parameters(), weight_decay=0.01, **fused
    )
    return model, optimizer, schedule


def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[bytes]:
    """Each step's loss, bit by bit; a step's data depends on its number alone."""
    import paddle

    dtype = model.state_dict()["4.weight"].dtype
    losses = []
    for step in steps:
        randomness = np.random.default_rng(step)
        images = paddle.to_tensor(randomness.standard_normal((6, 1, 8, 8))).astype(dtype)
        labels = paddle.to_tensor(randomness.integers(0, 3, 6))
        loss = paddle.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        losses.append(loss.numpy().tobytes())
    return losses


def wrapped(optimizer: Any) -> Any:
    """As Fleet wraps it where there is more than one process."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer

    fleet.init(is_collective=True)
    group = fleet.get_hybrid_communicate_group()
    return HybridParallelOptimizer(optimizer, group, fleet.fleet._user_defined_strategy)


@pytest.mark.parametrize("kind", ["Momentum", "AdamW", "fused Momentum"])
@pytest.mark.parametrize("fleet", [False, True])
def test_resume_continues_bit_by_bit(tmp_path: Path, kind: str, fleet: bool) -> None:
    model, optimizer, schedule = build(kind)
    handle = wrapped(optimizer) if fleet else optimizer
    train(model, handle, schedule, range(4))
    taken = snapshot_of(model, handle, None, {"step": 4})
    adamw = {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}
    accumulators = adamw if kind == "AdamW" else {"velocity"}
    # The running statistics of `nn.BatchNorm` are parameters too, but not trained.
    parameters = {name for name, tensor in model.named_parameters() if not tensor.stop_gradient}
    assert taken.optimizer.keys() == {f"{a}/{b}" for a in parameters for b in accumulators}
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)
    expected = train(model, handle, schedule, range(4, 8))
    later = snapshot_of(model, handle, None, {})

    # A fresh process: other layers first, so that Paddle's unique names differ.
    fresh, optimizer, schedule = build(kind)
    assert {p.name for p in fresh.parameters()}.isdisjoint(p.name for p in model.parameters())
    handle = wrapped(optimizer) if fleet else optimizer
    restore(checkpoint.load(path), fresh, handle, None)
    assert train(fresh, handle, schedule, range(4, 8)) == expected
    again = snapshot_of(fresh, handle, None, {})
    assert same(again.model, later.model)
    assert same(again.optimizer, later.optimizer)
    assert again.state == later.state

    # And back again in the same process, whose accumulators exist by now.
    restore(checkpoint.load(path), fresh, handle, None)
    restored = snapshot_of(fresh, handle, None, {"step": 4})
    assert same(restored.model, taken.model)
    assert same(restored.optimizer, taken.optimizer)
    assert restored.state == taken.state
    assert train(fresh, handle, schedule, range(4, 8)) == expected


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_optimizer_of_the_same_parameters_is_restored_too(times: int) -> None:
    model, optimizer, schedule = build("AdamW")
    train(model, optimizer, schedule, range(3))
    taken = snapshot_of(model, optimizer, None, {"step": 3})
    expected = train(model, optimizer, schedule, range(3, 6))
    import paddle

    schedule = schedule_of(0.1)
    second = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01)
    for _ in range(times):
        restore(taken, model, second, None)
        assert same(snapshot_of(model, second, None, {}).optimizer, taken.optimizer)
    assert train(model, second, schedule, range(3, 6)) == expected


def test_a_snapshot_does_not_change_while_training_goes_on() -> None:
    model, optimizer, schedule = build("Momentum")
    train(model, optimizer, schedule, range(2))
    taken = snapshot_of(model, optimizer, None, {})
    copies = [{k: v.copy() for k, v in part.items()} for part in (taken.model, taken.optimizer)]
    train(model, optimizer, schedule, range(2, 4))
    assert same(taken.model, copies[0])
    assert same(taken.optimizer, copies[1])
    assert not same(snapshot_of(model, optimizer, None, {}).model, copies[0])


def test_float64_and_a_start_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer, schedule = build("Momentum", "float64")
    taken = snapshot_of(model, optimizer, None, {"step": 0})
    assert not any(moment.any() for moment in taken.optimizer.values())
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)
    expected = train(model, optimizer, schedule, range(3))
    for moments in (taken.optimizer, {}):  # some were saved without
        loaded = checkpoint.load(path)
        loaded.optimizer = moments
        fresh, optimizer, schedule = build("Momentum", "float64")
        restore(loaded, fresh, optimizer, None)
        assert train(fresh, optimizer, schedule, range(3)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["Momentum", "AdamW"])
def test_low_precision_parameters_with_master_weights(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Paddle has no CPU kernel for such a step, so the optimizer's tensors are made without one."""
    import paddle

    def make() -> tuple[Any, Any]:
        model = paddle.nn.Linear(2, 3)
        model.to(dtype=dtype)
        optimizer = getattr(paddle.optimizer, kind)(
            schedule_of(0.1), parameters=model.parameters(), multi_precision=True
        )
        return model, optimizer

    def begin(model: Any, optimizer: Any) -> None:
        block = paddle.base.framework.default_main_program().global_block()
        optimizer._create_accumulators(block, model.parameters())

    model, optimizer = make()
    begin(model, optimizer)
    for index, tensor in enumerate(
        [*optimizer.state_dict()["master_weights"].values()]
        + [v for v in optimizer.state_dict().values() if not isinstance(v, dict)]
    ):
        tensor.set_value(np.full(tensor.shape, index + 1 / 3, np.float32))
    taken = snapshot_of(model, optimizer, None, {"step": 1})
    assert taken.model["weight"].dtype == {"bfloat16": np.uint16, "float16": np.float16}[dtype]
    assert {"weight/master_weight", "bias/master_weight"} < taken.optimizer.keys()
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)

    fresh, optimizer = make()
    for _ in range(2):  # before the first step, and with tensors in use
        restore(checkpoint.load(path), fresh, optimizer, None)
        begin(fresh, optimizer)
        restored = snapshot_of(fresh, optimizer, None, {"step": 1})
        assert same(restored.model, taken.model)
        assert same(restored.optimizer, taken.optimizer)
        masters = optimizer.state_dict()["master_weights"]
        assert {m.dtype for m in masters.values()} == {paddle.float32}


def test_the_loss_scale_is_restored() -> None:
    import paddle

    model, optimizer, _ = build("Momentum")
    scaler, other = (paddle.amp.GradScaler(init_loss_scaling=scale) for scale in (1024.0, 2.0))
    fields = {
        "enable": True,
        "scale": paddle.to_tensor(np.array([2.0], np.float32)),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1,
        "incr_count": 0,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    }
    assert snapshot_of(model, optimizer, scaler, {}).state["loss_scaler"] == {}
    # Paddle's scaler disables itself on CPU and then lacks the fields of its state.
    for each in (scaler, other):
        for name, value in fields.items():
            setattr(each, f"_{name}", value)
    scaler._scale = paddle.to_tensor(np.array([48.0], np.float32))
    scaler._incr_count = 7
    taken = snapshot_of(model, optimizer, scaler, {"step": 0})
    restore(taken, model, optimizer, other)
    assert other.state_dict()["scale"].tolist() == [48.0]
    assert other.state_dict()["incr_count"] == 7
    assert snapshot_of(model, optimizer, other, {"step": 0}).state == taken.state


def test_another_optimizer_or_model_is_refused_before_anything_changes() -> None:
    model, optimizer, schedule = build("Momentum")
    train(model, optimizer, schedule, range(2))
    taken = snapshot_of(model, optimizer, None, {})
    fresh, adamw, _ = build("AdamW")
    before = snapshot_of(fresh, adamw, None, {})
    with pytest.raises(UserError, match="with the optimizer Momentum, this run uses AdamW") as bad:
        restore(taken, fresh, adamw, None)
    assert "optimizer=momentum" in bad.value.remedy
    del taken.optimizer["4.bias/velocity"]
    with pytest.raises(UserError, match=r"4\.bias/velocity: missing in the checkpoint"):
        restore(taken, model, optimizer, None)
    taken.optimizer["9.bias/velocity"] = np.zeros(3, np.float32)
    with pytest.raises(UserError, match=r"9\.bias/velocity: unknown to the optimizer"):
        restore(taken, model, optimizer, None)
    del taken.model["4.bias"]
    with pytest.raises(UserError, match=r"4\.bias: missing in the checkpoint"):
        restore(taken, fresh, adamw, None)
    assert same(snapshot_of(fresh, adamw, None, {}).model, before.model)


FORGERIES: dict[str, Any] = {
    "missing": None,
    "of another shape": np.zeros((3, 72), np.float32),
    "of another dtype": np.zeros((72, 3), np.float64),
    "without axes": np.array(0, np.float32),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("kind", ["Momentum", "AdamW"])
def test_moments_that_do_not_fit_are_refused_before_the_first_step(kind: str, forgery: str) -> None:
    """Also where the optimizer has made no step, and so no tensors of its own, before."""
    model, optimizer, schedule = build(kind)
    train(model, optimizer, schedule, range(2))
    taken = snapshot_of(model, optimizer, None, {"step": 2})
    name = "4.weight/velocity" if kind == "Momentum" else "4.weight/moment1"
    del taken.optimizer[name]
    if FORGERIES[forgery] is not None:
        taken.optimizer[name] = FORGERIES[forgery]
    fresh, optimizer, _ = build(kind)
    before = snapshot_of(fresh, optimizer, None, {})
    with pytest.raises(UserError, match=f"does not fit the optimizer:\n  {name}: "):
        restore(taken, fresh, optimizer, None)
    after = snapshot_of(fresh, optimizer, None, {})
    assert same(after.model, before.model)
    assert same(after.optimizer, before.optimizer)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 12),
    st.floats(1e-3, 10),
    st.integers(0, 4),
    st.floats(1e-3, 10),
    st.integers(0, 4),
)
def test_the_learning_rate_after_a_resume_is_the_new_schedules(
    step: int, before: float, warmup_before: int, after: float, warmup_after: int
) -> None:
    """From the first resumed step on it is a function of the configuration and the step."""
    model, optimizer, schedule = with_schedule(schedule_of(before, warmup_before))
    for _ in range(step):
        schedule.step()
    taken = snapshot_of(model, optimizer, None, {"step": step})
    model, optimizer, schedule = with_schedule(schedule_of(after, warmup_after))
    expected = schedule_of(after, warmup_after)
    for _ in range(step):
        expected.step()
    restore(taken, model, optimizer, None)
    for _ in range(4):
        assert optimizer.get_lr() == expected.get_lr()
        schedule.step()
        expected.step()


def with_schedule(schedule: Any) -> tuple[Any, Any, Any]:
    import paddle

    model = paddle.nn.Linear(2, 3)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
    return model, optimizer, schedule


def test_a_wrapped_model_has_the_same_names() -> None:
    import paddle

    model, optimizer, _ = build("Momentum")
    parallel = paddle.DataParallel(model)
    taken = snapshot_of(parallel, optimizer, None, {})
    assert taken.model.keys() == model.state_dict().keys()
