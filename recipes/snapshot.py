"""A training in memory: taken from Paddle's objects, and put back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recipes import stems
from recipes.config import UserError
from recipes.printable import listed, printable

MASTER = "master_weight"  # the kind under which a float32 copy of a parameter is stored


@dataclass
class Snapshot:
    """A training in memory, complete enough to continue it.

    Attributes:
        model: the model's state dict, by structured name.
        optimizer: `<structured name of a parameter>/<kind>` to its accumulator, such as
            ``conv1.weight/velocity``; ``/master_weight`` is the float32 copy AMP O2 keeps.
        state: what is not a tensor, as JSON holds it: `step`, `epoch` (completed epochs),
            `step_in_epoch`, `samples`, `best`, `metrics`, `schedule`, `loss_scaler`,
            `optimizer` (`type`), `random`, `identity`.
        ranks: what differs between ranks, one row a rank; empty where nothing does.
    """

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    state: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, np.ndarray] = field(default_factory=dict)


def check_names(
    saved: Mapping[str, np.ndarray],
    current: Mapping[str, Any],
    source: Path | str = "the checkpoint",
    whose: str = "the model",
) -> None:
    """Check that a saved state dict fits the current one: names, shapes, dtypes.

    Args:
        saved: name to array.
        current: name to anything with `shape` and `dtype` (an array or a Paddle tensor).
        whose: what `current` belongs to, as a message calls it.

    Raises:
        UserError: naming up to eight of the missing, unexpected and differing tensors.
    """
    problems = [f"{name}: missing in the checkpoint" for name in current if name not in saved]
    problems += [f"{printable(name)}: unknown to {whose}" for name in saved if name not in current]
    differing = []
    for name in current.keys() & saved.keys():
        theirs, ours = _describe(saved[name]), _describe(current[name])
        if theirs != ours:
            differing.append(name)
            problems.append(f"{name}: {theirs} in the checkpoint, {ours} in {whose}")
    if differing == [stems.FIRST] and len(problems) == 1:
        shapes = (list(each[stems.FIRST].shape) for each in (saved, current))
        stems.refuse_another(source, differing, *shapes)
    if problems:
        raise UserError(
            f"{source} does not fit {whose}:{listed(sorted(problems))}",
            "set model, model.stem, model.num_classes, dtype, amp and optimizer as the checkpoint "
            "had them",
        )


def snapshot_of(model: Any, optimizer: Any, scaler: Any, state: Mapping[str, Any]) -> Snapshot:
    """Copy a training into host memory; the copy does not change when training goes on.

    Args:
        model: a `paddle.nn.Layer`, wrapped by Fleet or not.
        optimizer: a `paddle.optimizer.Optimizer`, wrapped by Fleet or not.
        scaler: a `paddle.amp.GradScaler`, or None.
        state: the rest; `schedule` (for a person to read), `loss_scaler` and `optimizer` are
            filled in here.
    """
    tensors = model.state_dict()
    return Snapshot(
        {key: np.array(tensor.numpy()) for key, tensor in tensors.items()},
        {
            name: np.array(tensor.numpy())
            for name, tensor in _optimizer_tensors(optimizer, tensors).items()
        },
        {
            **state,
            "schedule": _plain(optimizer.state_dict().get("LR_Scheduler")),
            "loss_scaler": _plain(scaler.state_dict()) if scaler is not None else {},
            "optimizer": {"type": _optimizer_type(optimizer)},
        },
    )


def restore(
    snapshot: Snapshot,
    model: Any,
    optimizer: Any,
    scaler: Any,
    source: Path | str = "the checkpoint",
) -> None:
    """Put a snapshot into a training, fresh or not; the next step is the one that came next.

    The learning rate is the schedule's of this training at that step: what moves it is the
    configuration, and a checkpoint knows only how far it is.

    Args:
        model, optimizer, scaler: as for `snapshot_of`, built as they were for the snapshot.

    Raises:
        UserError: a tensor's name, shape or dtype differs, or the optimizer is another one.
            Nothing has changed then.
    """
    tensors = model.state_dict()
    check_names(snapshot.model, tensors, source)
    theirs, ours = snapshot.state["optimizer"]["type"], _optimizer_type(optimizer)
    if theirs != ours:
        raise UserError(
            f"{source} was trained with the optimizer {printable(theirs)}, this run uses {ours}",
            f"continue it with optimizer={printable(theirs).lower()}",
        )
    moments = _optimizer_tensors(optimizer, tensors)
    if snapshot.optimizer:  # some were saved before the first step, and hold nothing of it
        check_names(snapshot.optimizer, moments, source, "the optimizer")
    for held, values in ((tensors, snapshot.model), (moments, snapshot.optimizer)):
        for name, array in values.items():
            held[name].set_value(array)
    _inner(optimizer)._learning_rate.step(snapshot.state["step"])
    saved_scale = snapshot.state["loss_scaler"]
    if scaler is not None and scaler.is_enable() and saved_scale:
        scale = np.asarray(saved_scale["scale"], np.float32).reshape(1)
        scaler.load_state_dict({**saved_scale, "scale": scale})


def _optimizer_tensors(optimizer: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's own tensors, by `<structured name of a parameter>/<kind>`.

    Paddle makes them at the first step. Here all are there before, so that what a checkpoint
    holds can be compared with them, and parameters without a gradient are no exception.
    """
    import paddle

    inner = _inner(optimizer)
    block = paddle.base.framework.default_main_program().global_block()
    inner._create_accumulators(block, [p for p in inner._parameter_list if not p.stop_gradient])
    held = dict(inner.state_dict())
    held.pop("LR_Scheduler", None)
    masters = held.pop("master_weights", {})
    keys = {tensor.name: key for key, tensor in tensors.items()}
    result = {f"{keys[name]}/{MASTER}": tensor for name, tensor in masters.items()}
    owners = keys | {tensor.name: keys[name] for name, tensor in masters.items()}
    for name, tensor in held.items():
        owner, kind = _split_accumulator(name, owners)
        result[f"{owners[owner]}/{kind}"] = tensor
    return result


def _split_accumulator(name: str, owners: Mapping[str, str]) -> tuple[str, str]:
    """``conv2d_0.w_0_velocity_0`` to the tensor it belongs to and its kind, ``velocity``."""
    owner = max((own for own in owners if name.startswith(f"{own}_")), key=len, default=None)
    if owner is None:
        raise ValueError(f"optimizer tensor {name} belongs to no parameter of the model")
    return owner, name[len(owner) + 1 :].rpartition("_")[0]


def _inner(optimizer: Any) -> Any:
    while hasattr(optimizer, "_inner_opt"):  # Fleet's wrappers
        optimizer = optimizer._inner_opt
    return optimizer


def _optimizer_type(optimizer: Any) -> str:
    return type(_inner(optimizer)).__name__


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON holds them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _describe(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return f"{'bfloat16' if dtype == 'uint16' else dtype}{[int(size) for size in tensor.shape]}"
