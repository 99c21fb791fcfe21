"""Exchanges between real ranks, and how a rank meets the others."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import distributed
from recipes.config import Config, GradientsConfig, TopologyConfig, UserError
from recipes.topology import Place

RANKS = 3
ALONE = Place(0, 1, 0, 0)
VALUES: list[Any] = [
    None,
    {},
    "",
    "ä\n\x00€",
    [1, 2.5, None, True],
    {"a": {"b": [0.1, -0.0]}},
    2**70,
]


def arrays() -> dict[str, np.ndarray]:
    """Arrays of many dtypes and layouts."""
    rng = np.random.default_rng(3)
    found: dict[str, Any] = {
        f"{dtype} {shape}": rng.integers(0, 2, shape).astype(dtype)
        for dtype in ("bool", "uint8", "int8", "uint16", "int32", "int64", "float16", "float64")
        for shape in ((), (1,), (0,), (3, 0, 2), (2, 3))
    }
    return found | {
        "complex": rng.normal(size=4) + 1j * rng.normal(size=4),
        "big endian": np.arange(5, dtype=">i4"),
        "fortran": np.asfortranarray(rng.normal(size=(3, 4))),
        "strided": rng.normal(size=(6, 6))[::2, ::-3],
        "not numbers": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]),
        "large": rng.integers(0, 255, 1 << 20).astype(np.uint8),
        "": np.array([1.5], np.float32),
    }


def fingerprint(found: dict[str, np.ndarray]) -> list[list[Any]]:
    return [
        [name, a.dtype.str, list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()]
        for name, a in found.items()
    ]


def on_rank(place: Place) -> dict[str, Any]:
    """One rank's part of `test_exchanges`."""
    first = place.rank == 0
    found: dict[str, Any] = {
        "json": [distributed.broadcast_json(v if first else {"mine": place.rank}) for v in VALUES],
        "arrays": fingerprint(distributed.broadcast_arrays(arrays() if first else None)),
        "no arrays": distributed.broadcast_arrays({} if first else None),
        "none": distributed.broadcast_arrays(None),
        "groups restored": dist.new_group.__module__.startswith("paddle."),
    }
    received = distributed.broadcast_arrays({"x": np.arange(3.0)} if first else None)["x"]
    received += place.rank  # it is this rank's own, and can be written
    found["writable"] = received.tolist()

    whole = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]], dtype="float64") * (place.rank + 1)
    found["in place"] = distributed.sum_over_ranks(whole) is whole
    found["sum"] = whole.tolist()

    tensors = [
        paddle.to_tensor([float(place.rank), 3.0 * place.rank], dtype=dtype)
        for dtype in ("float32", "float64")
    ]
    distributed.average_over_ranks(iter(tensors))
    found["mean"] = [[str(t.dtype), *t.tolist()] for t in tensors]

    paddle.seed(place.rank)  # Fleet has to bring rank 0's parameters to all
    layer = paddle.nn.Linear(2, 1, bias_attr=False)
    network = distributed.data_parallel(layer)
    found["weight"] = layer.weight.numpy().ravel().tolist()
    for name, syncs in {"at once": [True, True], "with the last": [False, False, True]}.items():
        layer.clear_gradients()
        for part, enabled in enumerate(syncs):
            x = paddle.to_tensor([[place.rank + 1.0, 10.0**part]])
            with distributed.gradient_sync(network, GradientsConfig(), enabled=enabled):
                network(x).sum().backward()
        found[name] = layer.weight.grad.numpy().ravel().tolist()
    layer.clear_gradients()
    with distributed.gradient_sync(network, GradientsConfig(), enabled=False):
        network(paddle.to_tensor([[place.rank + 1.0, 1.0]])).sum().backward()
    found["apart"] = layer.weight.grad.numpy().ravel().tolist()
    found["rounded"] = rounded_gradients(place)
    return found


class Weighted(paddle.nn.Layer):  # type: ignore[misc]
    """Sums parameters of two dtypes, each element times its own number of the input."""

    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate(["float32", "float32", "float64", "float32"]):
            self.add_parameter(f"p{number}", self.create_parameter([400_000], dtype=dtype))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return sum((p * x.astype(p.dtype)).sum().astype("float32") for p in self.parameters())


def rounded_gradients(place: Place) -> list[Any]:
    """Gradients that travel as bfloat16, in buckets smaller than all of them, and as they are."""
    layer = Weighted()
    network = paddle.DataParallel(layer)
    x = paddle.to_tensor(np.random.default_rng(place.rank).normal(size=400_000), dtype="float32")
    found = []
    for options in (GradientsConfig(dtype="bfloat16", bucket_mib=3), GradientsConfig()):
        layer.clear_gradients()
        with distributed.gradient_sync(network, options, enabled=True):
            network(x).backward()
        found.append([(str(p.grad.dtype), p.grad.numpy()) for p in layer.parameters()])
    far = [float(np.abs(a - b).max()) for (_, a), (_, b) in zip(*found, strict=True)]
    digest = hashlib.sha256(b"".join(each.tobytes() for _, each in found[0])).hexdigest()
    return [[dtype for dtype, _ in found[0]], far, digest]


@pytest.fixture
def exchanged(three_ranks: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return three_ranks["test_distributed:on_rank"]


@pytest.mark.launch
def test_every_rank_gets_rank_zeros_values(exchanged: list[dict[str, Any]]) -> None:
    for found in exchanged:
        assert found["json"] == VALUES
        assert found["arrays"] == fingerprint(arrays())
        assert found["no arrays"] == {}
        assert found["none"] == {}
        assert found["groups restored"]
    assert [found["writable"] for found in exchanged] == [
        [r, r + 1.0, r + 2.0] for r in range(RANKS)
    ]


@pytest.mark.launch
def test_sums_and_means(exchanged: list[dict[str, Any]]) -> None:
    for found in exchanged:
        assert found["in place"]
        assert found["sum"] == [[6.0, 12.0], [18.0, 24.0]]
        assert found["mean"] == [["paddle.float32", 1.0, 3.0], ["paddle.float64", 1.0, 3.0]]


@pytest.mark.launch
def test_gradients_are_averaged_once_all_parts_are_there(exchanged: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(exchanged):
        assert found["weight"] == exchanged[0]["weight"]
        # Mean of the ranks' 1, 2, 3 is 2; the second input is the same everywhere.
        np.testing.assert_allclose(found["with the last"], [6.0, 111.0], rtol=1e-6)
        np.testing.assert_allclose(found["at once"], [4.0, 11.0], rtol=1e-6)
        np.testing.assert_allclose(found["apart"], [rank + 1.0, 1.0], rtol=1e-6)


@pytest.mark.launch
def test_gradients_travel_rounded_and_stay_what_they_are(exchanged: list[dict[str, Any]]) -> None:
    dtypes, far, digest = exchanged[0]["rounded"]
    assert dtypes == [f"paddle.float{bits}" for bits in (32, 32, 64, 32)]
    # Normal numbers: their mean over 3 ranks is below 4, and bfloat16 has 8 bits.
    assert all(0 < each < 3 * 4 * 2**-8 for each in far)
    assert all(each["rounded"][2] == digest for each in exchanged)


@given(
    st.lists(st.tuples(st.integers(1, 900), st.sampled_from(["float32", "float64"])), max_size=12),
    st.integers(1, 4000),
)
def test_buckets_hold_every_gradient_once(described: list[tuple[int, str]], limit: int) -> None:
    tensors = [paddle.zeros([size], dtype=dtype) for size, dtype in described]
    found = list(distributed.buckets(tensors, limit))
    assert [id(t) for bucket in found for t in bucket] == [id(t) for t in tensors]
    filled = [sum(t.size * t.element_size() for t in bucket) for bucket in found]
    for bucket, size in zip(found, filled, strict=True):
        assert len({t.dtype for t in bucket}) == 1
        assert len(bucket) == 1 or size <= limit
    for size, (bucket, following) in zip(filled, pairwise(found), strict=False):
        first = following[0]
        full = size + first.size * first.element_size() > limit
        assert full or first.dtype != bucket[0].dtype


def test_one_process_exchanges_with_itself() -> None:
    value, named = {"a": [1]}, arrays()
    assert distributed.broadcast_json(value) == value
    assert fingerprint(distributed.broadcast_arrays(named)) == fingerprint(named)
    tensor = paddle.to_tensor([1.0, 2.0])
    distributed.average_over_ranks([tensor])
    assert distributed.sum_over_ranks(tensor).tolist() == [1.0, 2.0]
    layer = paddle.nn.Linear(1, 1)
    assert distributed.data_parallel(layer) is layer
    with distributed.gradient_sync(
        layer, GradientsConfig(), enabled=False
    ):  # a plain layer has no `no_sync`
        layer(paddle.ones([1, 1])).backward()
    assert layer.weight.grad is not None


def test_a_job_of_another_size_is_refused() -> None:
    config = Config(topology=TopologyConfig(2, 4))
    with pytest.raises(UserError, match=r"2x4 has 8 processes, but the launcher started 3") as e:
        distributed.start(config, Place(1, 3, 1, 0))
    assert "--nproc_per_node" in e.value.remedy
    assert "topology" in e.value.remedy


def test_a_gpu_without_a_gpu_build_is_refused() -> None:
    if paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        pytest.skip("this Paddle sees a GPU")
    with pytest.raises(UserError, match=r"device=gpu wants a GPU, but Paddle .* sees none") as e:
        distributed.choose_device(Config(device="gpu"), ALONE)
    assert "device=cpu" in e.value.remedy


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_sets_paddles_flags_on_a_gpu(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU build played, since only that knows the flags."""
    flags: dict[str, object] = {}
    monkeypatch.setattr(paddle.device, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paddle, "set_device", lambda _: None)
    monkeypatch.setattr(paddle, "set_flags", flags.update)
    distributed.choose_device(Config(device="gpu", deterministic=deterministic), ALONE)
    wanted = {
        "FLAGS_cudnn_deterministic": True,
        "FLAGS_cudnn_exhaustive_search": False,
        "FLAGS_embedding_deterministic": 1,
    }
    assert flags == (wanted if deterministic else {})


def test_deterministic_needs_nothing_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reruns there are bit-identical: test_a_run_is_bit_identical_to_itself."""
    monkeypatch.setattr(paddle, "set_flags", lambda _: pytest.fail("flags were set"))
    distributed.choose_device(Config(device="cpu", deterministic=True), ALONE)


@pytest.mark.gpu
def test_a_gpu_build_takes_the_deterministic_flags() -> None:
    if not paddle.device.is_compiled_with_cuda() or not paddle.device.cuda.device_count():
        pytest.skip("needs an NVIDIA GPU and a GPU build of Paddle")
    distributed.choose_device(Config(device="gpu", deterministic=True), ALONE)
    found = paddle.get_flags(list(distributed.DETERMINISTIC_FLAGS))
    assert found == distributed.DETERMINISTIC_FLAGS


def test_the_wait_for_the_store_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        distributed.wait_for_store(f"127.0.0.1:{port}", 0.3, Place(5, 8, 1, 1))
    assert 0.3 <= time.monotonic() - began < 5
    assert f"[node1 rank5] rank 0's store at 127.0.0.1:{port} did not answer within" in str(
        caught.value
    )
    assert "refused" in caught.value.message
    assert "rank 0's log" in caught.value.remedy


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(UserError, match=r"store at no-such-host\.invalid:1 did not answer"):
        distributed.wait_for_store("no-such-host.invalid:1", 0.0, ALONE)


def test_a_store_that_comes_late_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    late: list[socket.socket] = []
    timer = threading.Timer(0.3, lambda: late.append(socket.create_server(address)))
    timer.start()
    try:
        distributed.wait_for_store(f"{address[0]}:{address[1]}", 10, ALONE)
    finally:
        timer.join()
        late[0].close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_one_group_is_there_for_as_long_as_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    formed: list[Any] = []

    def form(ranks: list[int], **_: Any) -> str:
        formed.append(ranks)
        return "new"

    monkeypatch.setattr(dist, "new_group", form)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend", lambda: "GLOO")
    monkeypatch.setattr(dist, "get_group", lambda number: f"group {number}")
    before = dist.new_group
    expected = pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext()
    with expected, distributed.one_gloo_group():
        assert dist.new_group([0, 1, 2, 3]) == "group 0"
        assert dist.new_group() == "group 0"
        assert dist.new_group([1, 2]) == "new"
        assert dist.new_group([0], backend="gloo") == "new"
        monkeypatch.setattr(dist, "get_backend", lambda: "NCCL")
        assert dist.new_group([0, 1, 2, 3]) == "new"
        if fails:
            raise RuntimeError("on purpose")
    assert dist.new_group is before
    assert formed == [[1, 2], [0], [0, 1, 2, 3]]


def test_what_paddle_says_is_held_back_only_where_it_is_meant(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with distributed.quiet_paddle():
        print("a remark")
    print("a result")
    assert capfd.readouterr().out == "a result\n"
