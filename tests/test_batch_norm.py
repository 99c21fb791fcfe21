"""Synchronised batch norm: against Paddle's own on one process, against one process on several."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle import nn
from paddleclas.ppcls.arch import backbone

from recipes import batch_norm
from recipes.batch_norm import (
    ActivatedSyncBatchNorm,
    PortableSyncBatchNorm,
    convert_sync_batch_norm,
    unconverted_batch_norms,
)
from recipes.config import UserError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cpu() -> None:
    paddle.set_device("cpu")
    paddle.seed(7)


def double(layer: Any) -> Any:
    return layer.to(dtype="float64")


def step(layer: Any, x: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """One forward and backward; everything it yields."""
    layer.clear_gradients()
    tensor = paddle.to_tensor(x, stop_gradient=False)
    out = layer(tensor)
    (out * paddle.to_tensor(weights)).sum().backward()
    found = {"out": out.numpy(), "dx": tensor.grad.numpy()}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found["d" + name] = parameter.grad.numpy()
        found[name] = parameter.numpy()
    if layer.weight is None or layer.bias is None:
        # Paddle's kernel gives a weight or bias that stands alone no gradient, or zeros.
        found.pop("dweight", None), found.pop("dbias", None)
    return found


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def randomise(layer: Any, rng: np.random.Generator) -> None:
    for _, parameter in layer.named_parameters():
        parameter.set_value(rng.uniform(0.5, 2.0, parameter.shape))


LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "old": (lambda: nn.BatchNorm(3, dtype="float64"), (4, 3, 5, 2)),
    "old NHWC": (lambda: nn.BatchNorm(3, data_layout="NHWC", dtype="float64"), (4, 5, 2, 3)),
    "old relu": (lambda: nn.BatchNorm(3, act="relu", dtype="float64"), (4, 3, 5, 2)),
    "1D NC": (lambda: nn.BatchNorm1D(3, momentum=0.3), (6, 3)),
    "1D NCL": (lambda: nn.BatchNorm1D(3), (4, 3, 5)),
    "1D NLC": (lambda: nn.BatchNorm1D(3, data_format="NLC"), (4, 5, 3)),
    "2D": (lambda: nn.BatchNorm2D(3, epsilon=0.01), (4, 3, 5, 2)),
    "2D NHWC": (lambda: nn.BatchNorm2D(3, data_format="NHWC"), (4, 5, 2, 3)),
    "2D without weight": (lambda: nn.BatchNorm2D(3, weight_attr=False), (4, 3, 5, 2)),
    "2D without bias": (lambda: nn.BatchNorm2D(3, bias_attr=False), (4, 3, 5, 2)),
    "2D bare": (lambda: nn.BatchNorm2D(3, weight_attr=False, bias_attr=False), (4, 3, 5, 2)),
    "3D": (lambda: nn.BatchNorm3D(3), (2, 3, 2, 5, 4)),
    "3D NDHWC": (lambda: nn.BatchNorm3D(3, data_format="NDHWC"), (2, 2, 5, 4, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_equals_paddle_on_one_process(kind: str) -> None:
    make, shape = LAYERS[kind]
    rng = np.random.default_rng(3)
    plain = double(make())
    randomise(plain, rng)
    state = {name: value.numpy() for name, value in plain.state_dict().items()}
    synchronised = convert_sync_batch_norm(double(make()))
    assert isinstance(synchronised, PortableSyncBatchNorm)
    synchronised.set_state_dict({name: paddle.to_tensor(v) for name, v in state.items()})
    for _ in range(3):
        x, weights = rng.normal(2.0, 3.0, shape), rng.normal(size=shape)
        assert_same(step(synchronised, x, weights), step(plain, x, weights), 1e-10)
    x, weights = rng.normal(2.0, 3.0, shape), rng.normal(size=shape)
    plain.eval(), synchronised.eval()
    assert_same(step(synchronised, x, weights), step(plain, x, weights), 1e-10)


def test_weight_or_bias_alone_has_its_gradient() -> None:
    rng = np.random.default_rng(0)
    x, factors = rng.normal(size=(6, 2)), rng.normal(size=(6, 2))
    for alone, expected in (
        ("weight", (factors * (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)).sum(0)),
        ("bias", factors.sum(0)),
    ):
        weight_attr, bias_attr = (None, False) if alone == "weight" else (False, None)
        layer = double(PortableSyncBatchNorm(2, weight_attr=weight_attr, bias_attr=bias_attr))
        (layer(paddle.to_tensor(x)) * paddle.to_tensor(factors)).sum().backward()
        np.testing.assert_allclose(getattr(layer, alone).grad.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("act", batch_norm.ACTIVATIONS)
def test_fused_activations_equal_paddles(act: str) -> None:
    x = paddle.to_tensor(np.random.default_rng(0).normal(0, 3, (64, 2, 4, 4)))
    expected = nn.BatchNorm(2, act=act, dtype="float64")(x)
    found = convert_sync_batch_norm(nn.BatchNorm(2, act=act, dtype="float64"))(x)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-10, atol=1e-10)


def test_float32_keeps_precision_where_the_mean_is_large() -> None:
    x = np.random.default_rng(0).normal(3000.0, 1.0, (64, 2, 8, 8)).astype("float32")
    layer = PortableSyncBatchNorm(2, momentum=0.0)
    assert layer(paddle.to_tensor(x)).dtype == paddle.float32
    exact = x.astype("float64").var(axis=(0, 2, 3))
    np.testing.assert_allclose(layer._variance.numpy(), exact, rtol=2e-6)
    np.testing.assert_allclose(layer._mean.numpy(), x.astype("float64").mean((0, 2, 3)), rtol=2e-7)


def _keep(sent: list[Any], local: Any) -> Any:
    sent.append(local)
    return local.unsqueeze(0)


@settings(max_examples=40, deadline=None)
@given(
    shares=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    mean=st.floats(-1e6, 1e6),
    seed=st.integers(0, 2**31),
)
def test_statistics_of_unequal_shares_are_those_of_the_whole(
    shares: list[int], mean: float, seed: int
) -> None:
    whole = np.random.default_rng(seed).normal(mean, 1.0, (sum(shares), 2, 3))
    parts = np.split(whole, np.cumsum(shares)[:-1])
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "_gather", lambda local, _: _keep(sent, local))
        for part in parts:
            batch_norm._global_statistics(paddle.to_tensor(part), 1, None)
        patch.setattr(batch_norm, "_gather", lambda _local, _: paddle.stack(sent))
        found = batch_norm._global_statistics(paddle.to_tensor(parts[0]), 1, None)
    assert found.count == sum(shares) * 3
    np.testing.assert_allclose(found.mean.numpy(), whole.mean((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(found.variance.numpy(), whole.var((0, 2)), rtol=1e-8)


def test_no_grad_forward_still_updates_running_statistics() -> None:
    layer = PortableSyncBatchNorm(2)
    with paddle.no_grad():
        out = layer(paddle.ones([4, 2]) * 5)
    assert out.stop_gradient
    np.testing.assert_allclose(layer._mean.numpy(), [0.5, 0.5], rtol=1e-6)


def test_evaluation_and_one_process_do_not_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("communication")

    layer = PortableSyncBatchNorm(2)
    monkeypatch.setattr(dist, "all_gather", refuse)
    monkeypatch.setattr(dist, "all_reduce", refuse)
    layer(paddle.randn([4, 2])).sum().backward()
    monkeypatch.setattr(dist, "get_world_size", refuse)
    layer.eval()
    layer(paddle.randn([4, 2]))


def test_several_ranks_without_a_group_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    with pytest.raises(RuntimeError, match=r"on 2 ranks before .*init_parallel_env"):
        PortableSyncBatchNorm(2)(paddle.randn([4, 2]))


def test_one_value_per_channel_is_refused() -> None:
    with pytest.raises(UserError, match="more than one value per channel"):
        PortableSyncBatchNorm(2)(paddle.randn([1, 2, 1, 1]))


def test_wrong_channel_count_is_named() -> None:
    with pytest.raises(ValueError, match=r"2 channels \(NCHW\).*\[4, 3, 2, 2\]"):
        PortableSyncBatchNorm(2)(paddle.randn([4, 3, 2, 2]))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", LAYERS)
def test_conversion_keeps_parameters_and_settings(kind: str, device: str) -> None:
    # On a CPU Paddle's SyncBatchNorm can be built, not run: names and order are what counts here.
    layer = double(LAYERS[kind][0]())
    before = layer.state_dict()
    layer.eval()
    calls: list[int] = []
    layer.register_forward_post_hook(lambda *_: calls.append(1))
    converted = convert_sync_batch_norm(layer, device=device)
    assert isinstance(converted, nn.SyncBatchNorm if device == "gpu" else PortableSyncBatchNorm)
    after = converted.state_dict()
    assert list(after) == list(before)
    for name in before:
        assert getattr(converted, name) is getattr(layer, name)
        assert after[name].name == before[name].name
    assert converted._epsilon == layer._epsilon
    assert converted._momentum == layer._momentum
    assert converted._num_features == 3
    assert converted.training is False
    assert converted.full_name() == layer.full_name()
    assert converted._act == getattr(layer, "_act", None)
    layout = getattr(layer, "_data_layout", None) or layer._data_format
    assert converted._data_format == layout
    if device == "gpu":
        assert converted.weight is not None
        assert converted.bias is not None
    else:
        converted(paddle.randn(LAYERS[kind][1], dtype="float64"))
        assert calls == [1]


def test_gpu_layer_applies_the_fused_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda _, x: x)
    layer = convert_sync_batch_norm(nn.BatchNorm(2, act="relu"), device="gpu")
    assert isinstance(layer, ActivatedSyncBatchNorm)
    assert layer(paddle.to_tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_frozen_layers_and_synchronised_ones_are_left_alone() -> None:
    frozen = nn.BatchNorm(2, use_global_stats=True)
    frozen_too = nn.BatchNorm2D(2, use_global_stats=True)
    done = nn.SyncBatchNorm(2)
    model = convert_sync_batch_norm(nn.Sequential(frozen, frozen_too, done, nn.BatchNorm2D(2)))
    assert [model[0], model[1], model[2]] == [frozen, frozen_too, done]
    assert isinstance(model[3], PortableSyncBatchNorm)
    assert convert_sync_batch_norm(model)[3] is model[3]


def test_frozen_statistics_stay_frozen() -> None:
    model = convert_sync_batch_norm(nn.Sequential(nn.BatchNorm(2, use_global_stats=True)))
    before = model[0]._mean.numpy()
    model.train()
    model(paddle.randn([4, 2, 3, 3]))
    np.testing.assert_array_equal(model[0]._mean.numpy(), before)


def test_untrained_weights_stay_untrained() -> None:
    layer = nn.BatchNorm2D(2)
    layer.weight.stop_gradient = True
    converted = convert_sync_batch_norm(layer)
    converted(paddle.randn([4, 2, 3, 3])).sum().backward()
    assert converted.weight.grad is None
    assert converted.bias.grad is not None


def test_a_layer_used_twice_stays_one_layer() -> None:
    shared = nn.BatchNorm2D(2)
    model = convert_sync_batch_norm(nn.Sequential(shared, nn.Sequential(shared)))
    assert isinstance(model[0], PortableSyncBatchNorm)
    assert model[0] is model[1][0]


class OwnForward(nn.BatchNorm2D):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (OwnForward(2), r"layer 1 \(OwnForward\) computes in its own way"),
        (nn.BatchNorm(2, trainable_statistics=True), r"layer 1 .*trainable_statistics"),
        (nn.BatchNorm(2, act="square"), r"layer 1 .*activation square, not one of relu"),
    ],
)
def test_layers_without_counterpart_are_named(layer: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        convert_sync_batch_norm(nn.Sequential(nn.ReLU(), layer))
    assert "sync_bn=false" in caught.value.remedy


def test_a_refused_model_is_left_unchanged() -> None:
    model = nn.Sequential(nn.BatchNorm2D(2), OwnForward(2))
    with pytest.raises(UserError):
        convert_sync_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm2D


def test_layers_hidden_in_plain_containers_are_found() -> None:
    model = nn.Sequential(nn.Conv2D(2, 2, 1))
    model.branches = [{"a": (nn.Sequential(nn.BatchNorm2D(2)),)}]
    assert unconverted_batch_norms(model) == ["branches[0]['a'][0].0"]
    with pytest.raises(UserError, match=r"branches\[0\]\['a'\]\[0\]"):
        convert_sync_batch_norm(model)


def test_unconverted_names_every_class() -> None:
    model = nn.Sequential(nn.BatchNorm(2), nn.BatchNorm1D(2), nn.BatchNorm2D(2), nn.BatchNorm3D(2))
    assert unconverted_batch_norms(model) == ["0", "1", "2", "3"]
    assert unconverted_batch_norms(convert_sync_batch_norm(model)) == []


def test_a_group_is_refused_on_gpu() -> None:
    group = paddle.distributed.communication.group.Group(0, 0, [0])
    with pytest.raises(UserError, match="over all ranks, not over a group"):
        convert_sync_batch_norm(nn.BatchNorm2D(2), device="gpu", group=group)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "name", ["ResNet18_vd", "MobileNetV3_small_x0_35", "PPLCNet_x0_25", "GhostNet_x0_5"]
)
def test_backbones_keep_their_state_dict(name: str, device: str) -> None:
    with paddle.utils.unique_name.guard():  # GhostNet names its parameters itself
        model = getattr(backbone, name)(class_num=10)
    before = [(key, value.shape, value.name) for key, value in model.state_dict().items()]
    assert unconverted_batch_norms(model)
    model = convert_sync_batch_norm(model, device=device)
    assert unconverted_batch_norms(model) == []
    assert [(key, value.shape, value.name) for key, value in model.state_dict().items()] == before
    if device == "cpu":
        x = paddle.randn([2, 3, 32, 32])
        state = {key: value.clone() for key, value in model.state_dict().items()}
        with paddle.utils.unique_name.guard():
            plain = getattr(backbone, name)(class_num=10)
        assert plain.set_state_dict(state) == ([], [])
        plain.eval(), model.eval()
        np.testing.assert_allclose(model(x).numpy(), plain(x).numpy(), rtol=1e-4, atol=1e-5)


# One rank's program: trains each model named on its command line for two steps. Each rank takes its
# share of a fixed batch and scales its loss as _Normalise explains; rank 0 writes what one process
# on the whole batch must find too.
RANK = """
import sys
import numpy as np, paddle
import paddle.distributed as dist
from paddle.nn import functional as F
from paddleclas.ppcls.arch import backbone
from recipes.batch_norm import convert_sync_batch_norm

shares, path, runs = [int(share) for share in sys.argv[1].split("+")], sys.argv[2], sys.argv[3:]
if len(shares) > 1:
    dist.init_parallel_env()
rank, total = dist.get_rank(), sum(shares)
mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
results = {}
for run in runs:
    mode, name = run.split(":")
    extra = dict(stride_list=[1, 2, 2, 2, 2], max_pool=False) if name == "ResNet18" else {}
    paddle.seed(5)
    model = getattr(backbone, name)(class_num=10, **extra)
    model.to(dtype="float64")
    for layer in model.sublayers():
        if isinstance(layer, paddle.nn.Dropout):
            layer.p = 0.0  # the masks would differ from the whole batch's
    if mode == "sync":
        model = convert_sync_batch_norm(model)
    network = paddle.DataParallel(model) if len(shares) > 1 else model
    rng = np.random.default_rng(11)
    for step in range(2):  # the second step stands on the first one's running statistics
        x, y = rng.normal(1.0, 2.0, (total, 3, 8, 8)), rng.integers(0, 10, total)
        model.clear_gradients()
        logits = network(paddle.to_tensor(x[mine]))
        losses = F.cross_entropy(logits, paddle.to_tensor(y[mine]), reduction="sum")
        (losses * len(shares) / total).backward()
        losses = losses.detach()
        if len(shares) > 1:
            dist.all_reduce(losses)
        results[f"{run} {step} loss"] = losses.numpy() / total
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                results[f"{run} {step} gradient {key}"] = parameter.grad.numpy()
            results[f"{run} {step} value {key}"] = parameter.numpy()
if rank == 0:
    np.savez(path, **results)
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


Runs = dict[str, dict[str, np.ndarray]]


def train(shares: str, path: Path, runs: list[str]) -> Runs:
    """Run `RANK` on as many processes as there are shares; what rank 0 found, by run."""
    count = len(shares.split("+"))
    ports = free_ports(count + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    workers = []
    for rank in range(count):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if count > 1:
            environment |= {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(count),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
        command = [sys.executable, "-c", RANK, shares, str(path), *runs]
        workers.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * count, "\n".join(outputs)
    with np.load(path) as found:
        return {
            run: {name.removeprefix(run): found[name] for name in found if name.startswith(run)}
            for run in runs
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Paddle's own batch norm, one process, the whole batch of 13 samples."""
    path = tmp_path_factory.mktemp("whole") / "found.npz"
    return train("13", path, ["plain:ResNet18", "plain:MobileNetV3_small_x1_0"])


def worst_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray], word: str) -> float:
    """The largest relative difference, each array measured by its own largest entry.

    Gradients that are zero but for rounding (a bias before a batch norm) are measured by the
    largest gradient instead.
    """
    assert a.keys() == b.keys()
    names = [name for name in a if word in name]
    assert names
    largest = max(float(np.abs(a[name]).max()) for name in names)
    return max(
        float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), 1e-6 * largest))
        for name in names
    )


@pytest.mark.launch
@pytest.mark.parametrize("shares", ["7+6", "5+4+4"])
def test_several_ranks_equal_one_process(shares: str, whole: Runs, tmp_path: Path) -> None:
    models = ["ResNet18", "MobileNetV3_small_x1_0"]
    runs = [f"sync:{model}" for model in models] + ["plain:ResNet18"]
    found = train(shares, tmp_path / "found.npz", runs)
    for word in ("loss", "gradient", "_mean", "_variance"):
        for model in models:
            expected = whole[f"plain:{model}"]
            assert worst_difference(expected, found[f"sync:{model}"], word) < 1e-9, (model, word)
        # Without the conversion all of it differs, so the comparison can tell.
        expected, unconverted = whole["plain:ResNet18"], found["plain:ResNet18"]
        assert worst_difference(expected, unconverted, word) > 1e-3, word


@pytest.mark.gpu
@pytest.mark.skipif(
    not paddle.device.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0,
    reason="needs an NVIDIA GPU and a GPU build of Paddle",
)
@pytest.mark.parametrize("kind", ["old relu", "2D", "2D NHWC", "2D bare"])
def test_gpu_layer_equals_paddles_batch_norm(kind: str) -> None:
    paddle.set_device("gpu")
    make, shape = LAYERS[kind]
    x = paddle.randn(shape, dtype="float32")
    plain, synchronised = make().to(dtype="float32"), make().to(dtype="float32")
    synchronised = convert_sync_batch_norm(synchronised)
    assert isinstance(synchronised, nn.SyncBatchNorm)
    np.testing.assert_allclose(synchronised(x).numpy(), plain(x).numpy(), rtol=1e-4, atol=1e-4)
