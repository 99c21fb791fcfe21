"""Batch normalisation with statistics over all ranks, for every batch-norm class of PaddleClas.

`convert_sync_batch_norm` swaps each batch-norm layer of a model for one that normalises with the
mean and variance of the global batch: Paddle's own `paddle.nn.SyncBatchNorm` on a GPU, and
`PortableSyncBatchNorm` on a CPU, where Paddle's has no kernel. The parameters stay the same
objects under the same names, so the state dict (keys, order, shapes) is the one of the unconverted
model and a checkpoint moves freely between both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group
from paddle.nn import BatchNorm, Layer, SyncBatchNorm
from paddle.nn.layer.norm import _BatchNormBase

from recipes.config import UserError

CHANNEL_LAST = ("NHWC", "NLC", "NDHWC")

# The activations that the old `paddle.nn.BatchNorm` can fuse, by the name of Paddle's operator.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "swish": F.swish,
    "hard_swish": F.hardswish,
    "hard_sigmoid": lambda x: F.hardsigmoid(x, 0.2, 0.5),  # not F's default slope of 1/6
}


def convert_sync_batch_norm(
    model: Layer, device: str | None = None, group: Group | None = None
) -> Layer:
    """Make every batch-norm layer of a model use the statistics of the global batch.

    The model is changed in place; its parameters, buffers, hooks and training flags are kept.
    Layers that normalise with frozen statistics (`use_global_stats`) stay as they are, as do
    layers that are synchronised already. Convert after the model is built and before it is given
    to an optimizer or to `paddle.DataParallel`.

    Args:
        model: the model; where it is itself a batch-norm layer, its replacement is returned.
        device: "gpu" or "cpu"; None takes the device that Paddle computes on.
        group: the ranks that share statistics; None means all. On a GPU Paddle's layer knows
            only all ranks.

    Returns:
        The converted model.

    Raises:
        UserError: a layer has no synchronised counterpart, or one was missed; it is named.
    """
    device = (device or paddle.get_device()).split(":")[0]
    if device == "gpu" and group is not None:
        raise UserError(
            "Paddle's SyncBatchNorm on a GPU shares statistics over all ranks, not over a group",
            "leave the group out",
        )
    replacements: dict[int, Layer] = {}  # by id: a layer used in two places stays one layer
    named = [("", model), *model.named_sublayers()]
    originals = [(name, layer) for name, layer in named if _needs_conversion(layer)]
    for name, layer in originals:
        replacements[id(layer)] = _synchronised(name, layer, device, group)
    for _, parent in named:
        for name, child in list(parent._sub_layers.items()):
            if id(child) in replacements:
                parent.add_sublayer(name, replacements[id(child)])
    model = replacements.get(id(model), model)
    missed = unconverted_batch_norms(model)
    if missed:
        raise UserError(
            f"these batch-norm layers would keep each rank's own statistics: {', '.join(missed)}",
            "sync_bn=false, or register the layers as sublayers of the model",
        )
    return model


def running_statistics(model: Layer) -> list[Tensor]:
    """The running means and variances of a model's batch-norm layers of any class.

    `model.buffers()` misses them: Paddle keeps them as parameters that are not trained.
    """
    return [
        statistic
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, BatchNorm | _BatchNormBase)
        for statistic in (layer._mean, layer._variance)
    ]


def unconverted_batch_norms(model: Layer) -> list[str]:
    """Name the batch-norm layers that normalise with one rank's own statistics.

    Looks at the registered sublayers and also at layers that a model only keeps in a plain list,
    tuple or dictionary, which `sublayers()` does not see.
    """
    missed: dict[int, str] = {}  # by id, since many models keep registered layers in a list too
    named = [("", model), *model.named_sublayers()]
    for name, layer in named:
        if _needs_conversion(layer):
            missed[id(layer)] = name or type(layer).__name__
    for name, layer in named:
        for attribute, value in vars(layer).items():
            if attribute.startswith("_"):  # Layer's own registries
                continue
            for place, part in _contained(value):
                if _needs_conversion(part):
                    missed.setdefault(id(part), f"{name}.{attribute}{place}".lstrip("."))
    return list(missed.values())


def _contained(value: Any, key: str = "") -> Iterator[tuple[str, Layer]]:
    """The layers, and their sublayers, in nested lists, tuples and dictionaries, with a place."""
    if isinstance(value, Layer):
        yield key, value
        yield from ((f"{key}.{name}", part) for name, part in value.named_sublayers())
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _contained(item, f"{key}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _contained(item, f"{key}[{name!r}]")


def _needs_conversion(layer: Layer) -> bool:
    if not isinstance(layer, BatchNorm | _BatchNormBase):
        return False
    if isinstance(layer, SyncBatchNorm | PortableSyncBatchNorm):
        return False
    # A subclass with a forward of its own may not heed `use_global_stats` (PaddleClas's MetaBN).
    return _computes_in_its_own_way(layer) or not layer._use_global_stats


def _computes_in_its_own_way(layer: Layer) -> bool:
    return type(layer).forward not in (BatchNorm.forward, _BatchNormBase.forward)


def _synchronised(name: str, layer: Layer, device: str, group: Group | None) -> Layer:
    """The synchronised counterpart of one layer, holding the same parameters."""
    _refuse_unknown_behaviour(name, layer)
    arguments: dict[str, Any] = {
        "num_features": layer._mean.shape[0],
        "momentum": layer._momentum,
        "epsilon": layer._epsilon,
        "weight_attr": None if layer.weight is not None else False,
        "bias_attr": None if layer.bias is not None else False,
        "data_format": layer._data_layout if isinstance(layer, BatchNorm) else layer._data_format,
        "act": getattr(layer, "_act", None),
    }
    new = (
        ActivatedSyncBatchNorm(**arguments)
        if device == "gpu"
        else PortableSyncBatchNorm(**arguments, group=group)
    )
    for parameter in ("weight", "bias", "_mean", "_variance"):
        if getattr(layer, parameter) is not None:
            setattr(new, parameter, getattr(layer, parameter))
    new.training = layer.training
    new._dtype = layer._dtype
    new._full_name = layer._full_name
    new._name = getattr(layer, "_name", None)
    new._forward_pre_hooks.update(layer._forward_pre_hooks)
    new._forward_post_hooks.update(layer._forward_post_hooks)
    return new


def _refuse_unknown_behaviour(name: str, layer: Layer) -> None:
    where = f"batch-norm layer {name or '(the model itself)'} ({type(layer).__name__})"
    if _computes_in_its_own_way(layer):
        raise UserError(
            f"{where} computes in its own way, which has no synchronised counterpart",
            "sync_bn=false for this backbone",
        )
    if getattr(layer, "_trainable_statistics", False):
        raise UserError(
            f"{where} takes batch statistics in evaluation too (trainable_statistics): "
            "synchronised, ranks with unequal numbers of batches would wait for each other",
            "sync_bn=false for this backbone",
        )
    act = getattr(layer, "_act", None)
    if act is not None and act not in ACTIVATIONS:
        raise UserError(
            f"{where} fuses the activation {act}, not one of {', '.join(ACTIVATIONS)}",
            "sync_bn=false for this backbone",
        )


class ActivatedSyncBatchNorm(SyncBatchNorm):  # type: ignore[misc]
    """`paddle.nn.SyncBatchNorm` followed by an activation, as the old `BatchNorm` fuses one.

    Args:
        act: a key of `ACTIVATIONS`, or None.
        others: as `paddle.nn.SyncBatchNorm`.
    """

    def __init__(self, *args: Any, act: str | None = None, **others: Any) -> None:
        super().__init__(*args, **others)
        self._act = act
        # Paddle's layer makes up constant parameters where there are none. The kernel needs
        # them, the state dict must not have them.
        for name in ("weight", "bias"):
            if others.get(f"{name}_attr") is False:
                constant = self._parameters.pop(name).detach()
                self.register_buffer(name, constant, persistable=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` ([N, C, ...] or channel-last) with the statistics of all ranks."""
        out = super().forward(x)
        return out if self._act is None else ACTIVATIONS[self._act](out)


class PortableSyncBatchNorm(_BatchNormBase):  # type: ignore[misc]
    """Batch normalisation over all ranks, from operations that every device has.

    In training it makes one all-gather forward (count, mean and sum of squared deviations of each
    channel: 2C + 1 numbers) and one all-reduce backward (2C numbers); in evaluation none. Ranks may
    hold different numbers of samples. On one process it equals `paddle.nn.BatchNorm2D` and needs
    no process group. All ranks must make the same sequence of training forwards and backwards.

    Args:
        num_features: number of channels C.
        momentum: share of the old running statistics that each step keeps.
        epsilon: added to the variance.
        weight_attr, bias_attr: as for `paddle.nn.BatchNorm2D`; False leaves the parameter out.
        data_format: as for Paddle's batch norms, such as NCHW, NHWC, NCL, NC, NCDHW.
        act: a key of `ACTIVATIONS`, applied to the result; None for none.
        group: the ranks that share statistics; None means all.
    """

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        weight_attr: Any = None,
        bias_attr: Any = None,
        data_format: str = "NCHW",
        act: str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(num_features, momentum, epsilon, weight_attr, bias_attr, data_format)
        self._act = act
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`.

        Args:
            x: 2 to 5 dimensions, C of them channels, float32 or float64 as the parameters.

        Returns:
            Tensor of the same shape and dtype.

        Raises:
            ValueError: another number of dimensions or channels.
            UserError: in training, a single value per channel over all ranks.
        """
        channel_last = self._data_format in CHANNEL_LAST and x.ndim > 2
        axis = x.ndim - 1 if channel_last else 1
        if not 2 <= x.ndim <= 5 or x.shape[axis] != self._num_features:
            raise ValueError(
                f"batch norm over {self._num_features} channels ({self._data_format}) "
                f"was given an input of shape {list(x.shape)}"
            )
        out = self._normalise(x, axis) if self.training else self._normalise_with_running(x)
        return out if self._act is None else ACTIVATIONS[self._act](out)

    def _normalise(self, x: Tensor, axis: int) -> Tensor:
        statistics = _global_statistics(x, axis, self._group)
        self._update_running(statistics)
        out = _Normalise.apply(x, statistics, _single(self._epsilon), axis, self._group)
        # The affine part is local: autograd gives each rank the gradient of its own samples,
        # and averaging over ranks makes it global (see _Normalise).
        if self.weight is not None:
            out = out * _along(self.weight, axis, x.ndim)
        if self.bias is not None:
            out = out + _along(self.bias, axis, x.ndim)
        return out

    def _normalise_with_running(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self._mean,
            self._variance,
            weight=self.weight,
            bias=self.bias,
            training=False,
            momentum=self._momentum,
            epsilon=self._epsilon,
            data_format=self._data_format,
        )

    @paddle.no_grad()  # type: ignore[untyped-decorator]
    def _update_running(self, statistics: _Statistics) -> None:
        # Like Paddle's kernel: the biased variance, and the momentum as a float32 number.
        keep = _single(self._momentum)
        for running, batch in (
            (self._mean, statistics.mean),
            (self._variance, statistics.variance),
        ):
            running.set_value(running * keep + batch.astype(running.dtype) * (1.0 - keep))


@dataclass(frozen=True)
class _Statistics:
    """Of the global batch, per channel; [C] float64."""

    count: float  # values per channel
    mean: Tensor
    variance: Tensor  # biased: divided by count


@paddle.no_grad()  # type: ignore[untyped-decorator]
def _global_statistics(x: Tensor, axis: int, group: Group | None) -> _Statistics:
    """Mean and variance over all ranks.

    Each rank takes its own mean and sum of squared deviations in two passes; these combine by the
    formula of Chan, Golub and LeVeque (1979) for any number of parts, so that nothing is lost to
    cancellation where the mean is large against the deviation, as in E[x^2] - E[x]^2.
    """
    channels = x.shape[axis]
    size = x.size // channels
    axes = [other for other in range(x.ndim) if other != axis]
    rough = x.mean(axes)
    deviations = x - _along(rough, axis, x.ndim)
    squares = deviations.square().sum(axes).astype("float64")
    # A float32 mean is off in its last digits (up to 1e-6 of it over a few thousand values), and
    # the deviations show by how much.
    correction = deviations.sum(axes).astype("float64") / size
    local = paddle.concat(
        [
            paddle.full([1], size, dtype="float64"),
            rough.astype("float64") + correction,
            squares - size * correction.square(),
        ]
    )
    parts = _gather(local, group)  # [ranks, 1 + 2C]
    counts, means, squares = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
    count = float(counts.sum())
    if count < 2:
        raise UserError(
            "batch norm in training needs more than one value per channel over all ranks",
            "use at least 2 images per step",
        )
    mean = (counts * means).sum(0) / count
    squares = (squares + counts * (means - mean).square()).sum(0)
    return _Statistics(count, mean, squares / count)


class _Normalise(PyLayer):  # type: ignore[misc]
    """(x - mean) / sqrt(variance + epsilon) with the statistics of the global batch.

    Backward, for N values per channel over all ranks, with g the gradient of the result y
    (Ioffe and Szegedy, 2015, section 3):

        dx = (g - sum(g) / N - y * sum(g * y) / N) / sqrt(variance + epsilon)

    where both sums go over all ranks, since each rank's x moves every rank's result.

    How this meets `paddle.DataParallel`, which averages parameter gradients over W ranks: let
    rank r scale its loss as L_r = W / N * (sum over its own samples), with N the number of samples
    of the global batch (for equal shares this is the usual mean over the rank's samples). The
    global loss is then L = sum(L_r) / W. The all-reduce makes dx on each rank the gradient of
    sum(L_r) = W * L, other ranks' losses included. So a parameter's gradient on rank r is W times
    the part of dL that passes through the samples of r, and the average over ranks is the sum of
    those parts: dL, as on one process with the whole batch. An average instead of a sum here would
    leave the terms through the statistics W times too small.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        statistics: _Statistics,
        epsilon: float,
        axis: int,
        group: Group | None,
    ) -> Tensor:
        scale = (statistics.variance + epsilon).rsqrt().astype(x.dtype)
        scale = _along(scale, axis, x.ndim)
        out = (x - _along(statistics.mean.astype(x.dtype), axis, x.ndim)) * scale
        ctx.save_for_backward(out, scale)
        ctx.count, ctx.axis, ctx.group = statistics.count, axis, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out, scale = ctx.saved_tensor()
        axis, ndim = ctx.axis, out.ndim
        axes = [other for other in range(ndim) if other != axis]
        sums = paddle.stack([gradient.sum(axes), (gradient * out).sum(axes)]).astype("float64")
        if _world_size(ctx.group) > 1:
            dist.all_reduce(sums, group=ctx.group)
        means = (sums / ctx.count).astype(out.dtype)
        shift = _along(means[0], axis, ndim) + out * _along(means[1], axis, ndim)
        return (gradient - shift) * scale


def _gather(local: Tensor, group: Group | None) -> Tensor:
    """Stack every rank's `local` ([K]) in the order of ranks: [ranks, K]."""
    world_size = _world_size(group)
    if world_size == 1:
        return local.unsqueeze(0)
    parts: list[Tensor] = []
    dist.all_gather(parts, local, group=group)
    return paddle.stack(parts)


def _world_size(group: Group | None) -> int:
    size = int(dist.get_world_size(group))
    if size > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"synchronised batch norm on {size} ranks before paddle.distributed.init_parallel_env()"
        )
    return size


def _along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Shape [C] as [1, ..., C, ..., 1], to meet a tensor whose channels are at `axis`."""
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


def _single(value: float) -> float:
    """The nearest float32, which is how Paddle hands numbers to its batch-norm kernel."""
    return float(np.float32(value))
