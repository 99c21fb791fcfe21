"""Backbones by name, their stems and layouts, and pretrained weights from every source."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from recipes import backbones, checkpoint, models
from recipes.batch_norm import convert_sync_batch_norm
from recipes.config import ConfigError, ModelConfig, UserError
from recipes.models import build, describe, fetch_pretrained
from recipes.snapshot import Snapshot
from recipes.weights import read_weights

ROOT = Path(__file__).parent.parent
SMALL = "PPLCNet_x0_25"  # 0.24 million parameters and a classifier


@pytest.fixture(autouse=True)
def cpu() -> None:
    paddle.set_device("cpu")


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def small(classes: int = 10, **fields: Any) -> Any:
    return build(ModelConfig(name=SMALL, **fields), classes, 64)


@functools.cache
def small_arrays(classes: int) -> dict[str, np.ndarray]:
    paddle.seed(classes)
    return arrays(small(classes))


# --- names and arguments


def test_names_are_those_paddleclas_exports() -> None:
    names = backbones.names()
    exported = models._import_backbones()
    assert {"ResNet50", "MobileNetV3_small_x1_0", "HRNet_W18_C"} <= set(names)
    assert all(callable(getattr(exported, name)) for name in names)


def test_names_and_urls_need_neither_paddle_nor_paddleclas() -> None:
    program = (
        "import sys; from recipes import models; from recipes.config import ModelConfig;"
        "models.check(ModelConfig(name='ResNet50'), 32);"
        "print(models._paddleclas_url('ResNet50'));"
        "assert not {'paddle', 'paddleclas'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("https://")
    assert done.stdout.endswith("ResNet50_pretrained.pdparams\n")


def test_unknown_name_suggests_near_ones_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"model\.name=resnet5O is not one of") as caught:
        build(ModelConfig(name="resnet5O"), 10, 32)
    assert "ResNet50" in caught.value.remedy
    assert "python -m recipes.backbones" in caught.value.remedy


@pytest.mark.parametrize("name", ["get_apis", "sys", "__import__", "os.system"])
def test_only_backbones_can_be_built(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of"):
        build(ModelConfig(name=name), 10, 32)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ResNet18", {"colour": 1}, r"model\.arguments\.colour: ResNet18 has no such"),
        (SMALL, {"colour": 1}, rf"model\.arguments\.colour: {SMALL} has no such"),
        ("ResNet18", {"class_num": 3}, r"model\.arguments\.class_num has a key of its own"),
        ("ResNet18", {"pretrained": True}, r"model\.arguments\.pretrained has a key of its own"),
        ("ResNet18", {"version": "vd"}, "ResNet18 sets version itself"),
        ("ResNet18", {"stride_list": [1]}, r"ResNet18 refuses .*stride_list length should be 5"),
        ("WideResNet", {}, "WideResNet needs 'depth'"),
    ],
)
def test_bad_arguments_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig(name=name, arguments=arguments), 10, 32)


def test_arguments_reach_the_constructor() -> None:
    model = small(arguments={"dropout_prob": 0.75, "class_expand": 32})
    assert model.dropout.p == 0.75
    assert model.fc.weight.shape == [32, 10]


def test_a_backbone_without_classifier_is_refused() -> None:
    with pytest.raises(ConfigError, match="AdaFace_IR_18 has no classifier"):
        build(ModelConfig(name="AdaFace_IR_18"), 10, 112)


# --- stem and layout


@pytest.mark.parametrize(
    ("name", "stem", "size", "kernel", "features"),
    [
        ("ResNet18", "auto", 8, 3, 1),
        ("ResNet18", "auto", 64, 3, 8),
        ("ResNet18", "auto", 65, 7, 3),
        ("ResNet18", "imagenet", 32, 7, 1),
        ("ResNet18", "cifar", 96, 3, 12),
        ("ResNet18_vd", "auto", 32, 3, 4),
    ],
)
def test_stems(name: str, stem: str, size: int, kernel: int, features: int) -> None:
    model = build(ModelConfig(name=name, stem=stem), 10, size)
    assert model.stem[0].conv.weight.shape[2:] == [kernel, kernel]
    shapes: list[list[int]] = []
    model.blocks.register_forward_post_hook(lambda _layer, _in, out: shapes.append(out.shape))
    model.eval()
    assert model(paddle.randn([1, 3, size, size])).shape == [1, 10]
    assert shapes[0][2:] == [features, features]


def test_bottleneck_resnets_have_the_cifar_stem_too() -> None:
    model = build(ModelConfig(name="ResNet50", stem="cifar"), 7, 32)
    assert model.stem[0].conv.weight.shape == [64, 3, 3, 3]
    assert model.fc.weight.shape == [2048, 7]


def test_cifar_stem_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="MobileNetV2 has no CIFAR form") as caught:
        build(ModelConfig(name="MobileNetV2", stem="cifar"), 10, 32)
    assert "ResNet18" in caught.value.remedy


def test_auto_stem_leaves_other_backbones_alone() -> None:
    small(stem="auto")


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_nhwc_computes_the_same(stem: str) -> None:
    first = build(ModelConfig(name="ResNet18", stem=stem), 10, 32)
    last = build(ModelConfig(name="ResNet18", stem=stem, data_format="NHWC"), 10, 32)
    last.set_state_dict(first.state_dict())
    assert last.stem[0].conv._data_format == "NHWC"
    first.eval(), last.eval()
    x = paddle.randn([2, 3, 32, 32])
    np.testing.assert_allclose(last(x).numpy(), first(x).numpy(), rtol=1e-3, atol=1e-4)


def test_nhwc_elsewhere_is_refused() -> None:
    for name in (SMALL, "DenseNet121"):
        with pytest.raises(ConfigError, match=rf"model\.data_format=NHWC: {name} has only NCHW"):
            build(ModelConfig(name=name, data_format="NHWC"), 10, 32)


@pytest.mark.parametrize(
    ("name", "data_format", "size", "message"),
    [
        ("VGG11", "NCHW", 32, r"VGG11, NCHW, on images of 32 pixels fails: .*25088"),
        ("GoogLeNet", "NCHW", 224, r"returns a list, not \[1, 10\] logits"),
        ("ResNet50_last_stage_stride1", "NHWC", 64, r"NHWC, on images of 64 pixels fails"),
        ("EfficientNetB3_watermark", "NCHW", 64, r"returns \[1, 2\], not \[1, 10\] logits"),
    ],
)
def test_backbones_that_cannot_be_trained_so_are_refused(
    name: str, data_format: str, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        build(ModelConfig(name=name, data_format=data_format), 10, size)


def test_building_leaves_the_model_in_training_with_fresh_statistics() -> None:
    model = build(ModelConfig(name="ResNet18"), 10, 8)
    assert all(layer.training for layer in model.sublayers(include_self=True))
    assert (arrays(model)["stem.0.bn._mean"] == 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


# --- the built model


def test_building_is_silent() -> None:
    program = (
        "import logging, paddle; root = logging.getLogger(); before = list(root.handlers);"
        "from recipes.config import ModelConfig; from recipes.models import build;"
        "build(ModelConfig('ResNet18'), 10, 32); build(ModelConfig('PPLCNet_x0_25'), 2, 64);"
        "assert root.handlers == before"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore:No ccache found", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""


def test_paddleclas_warnings_that_matter_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(ModelConfig(name="ResNet18", arguments={"lr_mult_list": [1.0]}), 10, 32)
    assert ["lr_mult_list length should be 5" in text for text in caplog.messages] == [True]


def test_initial_values_and_names_depend_on_the_seed_alone() -> None:
    def built(seed: int, rank: str) -> list[tuple[str, np.ndarray]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PADDLE_TRAINER_ID", rank)
            np.random.seed(int(rank))
            paddle.seed(seed)
            model = build(ModelConfig(name="ResNet18"), 10, 32)
        return [(each.name, each.numpy()) for each in model.parameters()]

    first, second, other = built(1, "0"), built(1, "1"), built(2, "0")
    assert [name for name, _ in first] == [name for name, _ in second]
    assert len({name for name, _ in first}) == len(first)
    assert all((a == b).all() for (_, a), (_, b) in zip(first, second, strict=True))
    assert any((a != b).any() for (_, a), (_, b) in zip(first, other, strict=True))


def test_the_default_dtype_does_not_split_the_model() -> None:
    def built(default: str) -> dict[str, np.ndarray]:
        paddle.set_default_dtype(default)
        try:
            paddle.seed(6)
            model = build(ModelConfig("ResNet18"), 10, 8)
            assert paddle.get_default_dtype() == default
            model.to(dtype="float64")
            model(paddle.zeros([2, 3, 8, 8], dtype="float64"))
        finally:
            paddle.set_default_dtype("float32")
        return arrays(model)

    single, double = built("float32"), built("float64")
    assert all((single[name] == double[name]).all() for name in single)
    assert all(value.dtype == np.float64 for value in double.values())


@pytest.mark.parametrize("synchronised", [False, True])
@pytest.mark.parametrize("name", ["ResNet18", "MobileNetV3_small_x0_35"])
def test_a_step_in_float64(name: str, synchronised: bool) -> None:
    model = build(ModelConfig(name=name), 10, 8)
    model.to(dtype="float64")
    if synchronised:
        model = convert_sync_batch_norm(model)
    optimizer = paddle.optimizer.Momentum(0.05, parameters=model.parameters(), weight_decay=1e-4)
    loss = model(paddle.randn([4, 3, 8, 8], dtype="float64")).square().mean()
    loss.backward()
    before = arrays(model)
    optimizer.step()
    assert loss.dtype == paddle.float64
    assert all(value.dtype == np.float64 for value in before.values())
    after = arrays(model)
    moved = [name for name in before if (before[name] != after[name]).any()]
    assert len(moved) >= len([p for p in model.parameters() if not p.stop_gradient]) * 0.9


def test_describe_counts() -> None:
    model = build(ModelConfig(name="ResNet18", stem="imagenet"), 1000, 224)
    described = describe(model)
    # He et al.'s ResNet-18, and the 1x1 projection that PaddleClas adds to the first block.
    trainable = 11_689_512 + 64 * 64 + 2 * 64
    assert described["trainable"] == trainable
    assert described["parameters"] == trainable + 2 * (4800 + 64)  # running mean and variance
    assert described["batch_norms"] == {"BatchNorm": 21}
    assert described["dtype"] == "float32"
    assert described["class"] == "ResNet"


# --- reading weights


def test_pdparams_as_paddle_writes_them(tmp_path: Path) -> None:
    model = small()
    for name, options in (
        ("default", {}),
        ("protocol2", {"protocol": 2}),
        ("protocol3", {"protocol": 3}),
    ):
        path = tmp_path / f"{name}.pdparams"
        paddle.save(model.state_dict(), str(path), **options)
        found = read_weights(path)
        assert found.keys() == arrays(model).keys()
        assert all((found[key] == value).all() for key, value in arrays(model).items())


def test_tensors_written_as_name_and_array(tmp_path: Path) -> None:
    path = tmp_path / "nested.pdparams"
    paddle.save({"a": {"b": paddle.ones([2])}}, str(path))
    with pytest.raises(UserError, match="entry 'a' is not an array"):
        read_weights(path)
    path.write_bytes(pickle.dumps({"a": ("name", np.ones(2, "float32"))}))
    assert read_weights(path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "weights.pdparams"
    values = OrderedDict(a=np.arange(6, dtype="float32").reshape(2, 3), b=np.ones(3, "int64"))
    path.write_bytes(pickle.dumps(values, protocol=protocol))
    found = read_weights(path)
    assert found.keys() == values.keys()
    assert all((found[key] == values[key]).all() for key in values)


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function",
    [os.system, eval, exec, getattr, __import__, np.load, io.open, subprocess.call],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, function: Any, protocol: int) -> None:
    path, witness = tmp_path / "evil.pdparams", tmp_path / "witness"
    path.write_bytes(pickle.dumps({"w": Runs(function, f"touch {witness}")}, protocol=protocol))
    with pytest.raises(UserError, match=r"not readable as weights: it names .*, which arrays do"):
        read_weights(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Ran out of input"),
        (b"not a pickle", "not readable as weights"),
        (pickle.dumps([1, 2]), "it holds a list"),
        (pickle.dumps({"w": "text"}), "entry 'w' is not an array"),
        (pickle.dumps({"w": np.ones(2, "uint16")}), "entry 'w' is not an array of float"),
        (pickle.dumps({"w": np.array([None])}), "entry 'w' is not an array"),
        (pickle.dumps({"w": np.ones(99)})[:-50], "not readable as weights"),
    ],
)
def test_damaged_pdparams_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "weights.pdparams"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_weights(path)
    assert str(path) in caught.value.message


def test_damaged_safetensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(small_arrays(10), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"weights\.safetensors: not readable"):
        read_weights(path)


# --- loading weights


@pytest.mark.parametrize("form", ["pdparams", "safetensors", "folder"])
def test_weights_from_each_form(form: str, tmp_path: Path) -> None:
    paddle.seed(3)
    source = small()
    path = tmp_path / f"weights.{form}"
    if form == "pdparams":
        paddle.save(source.state_dict(), str(path))
    elif form == "safetensors":
        save_file(arrays(source), path)
    else:
        path.mkdir()
        save_file(arrays(source), path / "model.safetensors")
    paddle.seed(4)
    model = small(pretrained=str(path))
    assert all((arrays(model)[name] == value).all() for name, value in arrays(source).items())


@pytest.mark.parametrize("form", ["", "checkpoints", "checkpoints/last", "checkpoints/best"])
def test_weights_of_a_run_are_those_of_its_checkpoint(form: str, tmp_path: Path) -> None:
    older, newer = (checkpoint_of(step, tmp_path / "run" / "checkpoints") for step in (1, 2))
    found = fetch_pretrained(ModelConfig(SMALL, pretrained=str(tmp_path / "run" / form)))
    assert found == (older if form.endswith("best") else newer) / "model.safetensors"


def test_damaged_weights_of_a_run_are_not_taken(tmp_path: Path) -> None:
    path = checkpoint_of(1, tmp_path / "checkpoints") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    for name in (tmp_path, path.parent):
        with pytest.raises(ConfigError, match=r"(?s)model\.pretrained=.*model\.safetensors"):
            fetch_pretrained(ModelConfig(SMALL, pretrained=str(name)))


def checkpoint_of(step: int, folder: Path) -> Path:
    """A checkpoint of no training; the first one is the best."""
    held = {"w": np.zeros(2, np.float32)}
    return checkpoint.save(folder, Snapshot(held, {}, {"step": step}), best=step == 1, keep=9)


@pytest.mark.parametrize(("theirs", "ours"), [(32, 224), (224, 32)])
def test_weights_of_another_stem_are_called_so(theirs: int, ours: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(arrays(build(ModelConfig("ResNet18"), 10, theirs)), path)
    stem = "cifar" if theirs == 32 else "imagenet"
    with pytest.raises(UserError, match=f"with the {stem} stem") as caught:
        build(ModelConfig("ResNet18", pretrained=str(path)), 3, ours)
    assert caught.value.remedy == f"model.stem={stem}"
    build(ModelConfig("ResNet18", pretrained=str(path), stem=stem), 3, ours)


def test_a_head_of_another_class_count_stays_random(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    save_file(small_arrays(1000), path)
    paddle.seed(4)
    fresh = arrays(small(10))
    paddle.seed(4)
    capsys.readouterr()
    model = arrays(small(10, pretrained=str(path)))
    assert capsys.readouterr().out == (
        "w.safetensors has 1000 classes, the model 10: fc.weight, fc.bias keep their random "
        "initial values\n"
    )
    for name, value in model.items():
        expected = fresh if name.startswith("fc.") else small_arrays(1000)
        assert (value == expected[name]).all(), name


def test_other_ranks_do_not_repeat_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(small_arrays(1000), tmp_path / "w.safetensors")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    capsys.readouterr()
    small(10, pretrained=str(tmp_path / "w.safetensors"))
    assert capsys.readouterr().out == ""


def test_every_other_mismatch_is_named(tmp_path: Path) -> None:
    weights = dict(small_arrays(1000))
    weights["extra"] = np.ones(2, "float32")
    del weights["conv1.bn._mean"]
    weights["conv1.conv.weight"] = np.ones([4, 3, 5, 5], "float32")
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError) as caught:
        small(10, pretrained=str(tmp_path / "w.safetensors"))
    message = caught.value.message
    assert "missing in the file: conv1.bn._mean" in message
    assert "unknown to the model: extra" in message
    assert "shape of conv1.conv.weight: [4, 3, 5, 5] in the file, [8, 3, 3, 3]" in message
    assert "fc.weight" not in message


# --- finding and downloading


class Server(http.server.BaseHTTPRequestHandler):
    content = b""
    announced = 0
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        if "absent" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.announced))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    monkeypatch.setenv("FLEET_RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(Server):
        content = pickle.dumps(small_arrays(10))
        announced = len(content)

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", Handler
    running.shutdown()
    running.server_close()
    thread.join()


def cached(tmp_path: Path) -> list[str]:
    return [p.name for p in (tmp_path / "cache/pretrained").iterdir() if p.suffix != ".lock"]


def test_download_once_and_say_what_was_not_verified(
    server: tuple[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    config = ModelConfig(name=SMALL, pretrained=f"{url}/w.pdparams")
    path = fetch_pretrained(config)
    assert path is not None
    assert path.read_bytes() == handler.content
    digest = hashlib.sha256(handler.content).hexdigest()
    assert f"sha256 {digest}, not verified" in capsys.readouterr().out
    assert fetch_pretrained(config) == path
    assert handler.requests == 1
    assert cached(tmp_path) == [path.name]
    model = build(config, 10, 64)
    assert handler.requests == 1
    assert all((arrays(model)[name] == v).all() for name, v in small_arrays(10).items())


def test_verified_download_says_nothing_of_it(
    server: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    digest = hashlib.sha256(handler.content).hexdigest().upper()
    fetch_pretrained(ModelConfig(SMALL, pretrained=f"{url}/w.pdparams", pretrained_sha256=digest))
    assert "not verified" not in capsys.readouterr().out


def test_wrong_checksum_keeps_nothing(server: tuple[str, Any], tmp_path: Path) -> None:
    url, _ = server
    config = ModelConfig(SMALL, pretrained=f"{url}/w.pdparams", pretrained_sha256="0" * 64)
    with pytest.raises(UserError, match=r"its sha256 is .* but model\.pretrained_sha256=0000"):
        fetch_pretrained(config)
    assert cached(tmp_path) == []


def test_wrong_checksum_of_a_local_or_cached_file(server: tuple[str, Any], tmp_path: Path) -> None:
    url, handler = server
    local = tmp_path / "w.pdparams"
    local.write_bytes(handler.content)
    fetch_pretrained(ModelConfig(SMALL, pretrained=f"{url}/w.pdparams"))
    for source in (str(local), f"{url}/w.pdparams"):
        config = ModelConfig(SMALL, pretrained=source, pretrained_sha256="0" * 64)
        with pytest.raises(UserError, match="its sha256 is"):
            fetch_pretrained(config)


def test_truncated_download_is_detected(server: tuple[str, Any], tmp_path: Path) -> None:
    url, handler = server
    handler.announced += 1000
    with pytest.raises(UserError, match=rf"after {len(handler.content)} of {handler.announced}"):
        fetch_pretrained(ModelConfig(SMALL, pretrained=f"{url}/w.pdparams"))
    assert cached(tmp_path) == []


def test_failed_download_names_the_url(server: tuple[str, Any], tmp_path: Path) -> None:
    url, _ = server
    with pytest.raises(UserError, match=r"absent\.pdparams cannot be downloaded .*404") as caught:
        fetch_pretrained(ModelConfig(SMALL, pretrained=f"{url}/absent.pdparams"))
    assert "give its path" in caught.value.remedy
    assert cached(tmp_path) == []


def test_processes_that_ask_at_once_download_once(server: tuple[str, Any]) -> None:
    url, handler = server
    program = (
        "import sys; from recipes.config import ModelConfig; from recipes import models;"
        "print(models.fetch_pretrained(ModelConfig('ResNet18', pretrained=sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, f"{url}/w.pdparams"]
    workers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    paths = {worker.communicate(timeout=60)[0].splitlines()[-1] for worker in workers}
    assert [worker.returncode for worker in workers] == [0] * 4
    assert len(paths) == 1
    assert handler.requests == 1


def test_a_lock_held_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_TIMEOUT", 0.0)
    with (
        models._locked(tmp_path / "lock"),
        pytest.raises(UserError, match="another process has downloaded"),
        models._locked(tmp_path / "lock"),
    ):
        raise AssertionError("both hold the lock")


def test_paddleclas_url_is_fetched(server: tuple[str, Any], monkeypatch: Any) -> None:
    url, handler = server
    monkeypatch.setattr(models, "_paddleclas_url", lambda name: f"{url}/{name}.pdparams")
    path = fetch_pretrained(ModelConfig(SMALL, pretrained="paddleclas"))
    assert path is not None
    assert path.name.endswith(f"-{SMALL}.pdparams")
    assert handler.requests == 1


@pytest.mark.parametrize("name", ["MobileFaceNet", "HRNet_W60_C", "PPHGNet_base"])
def test_backbones_without_published_weights(name: str) -> None:
    with pytest.raises(ConfigError, match=f"publishes no weights of {name}"):
        fetch_pretrained(ModelConfig(name, pretrained="paddleclas"))


@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("nowhere.pdparams", r"model\.pretrained=nowhere\.pdparams: no file"),
        ("tests", r"no file tests/model\.safetensors, and no checkpoint"),
        ("pyproject.toml", r"not a file of \.pdparams or \.safetensors"),
        ("http://127.0.0.1/weights.pth", r"weights\.pth is not a file of"),
    ],
)
def test_sources_that_cannot_be(
    pretrained: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        fetch_pretrained(ModelConfig(SMALL, pretrained=pretrained))


def test_no_pretrained_weights() -> None:
    assert fetch_pretrained(ModelConfig(SMALL)) is None


SCIKIT_LEARN = """
import sys
import numpy as np
from recipes import models
models._import_backbones()
assert not {"sklearn", "sklearn.metrics", "scipy", "pandas"} & sys.modules.keys()
from paddleclas.ppcls.utils import metrics
print(metrics.hamming_loss(np.array([[0, 1]]), np.array([[1, 1]])))
print(metrics.binarize(np.array([[0.2, 0.8]]), threshold=0.5).tolist())
from sklearn.metrics import hamming_loss
assert hamming_loss.__module__.startswith("sklearn.")
"""


def test_scikit_learn_is_imported_only_when_paddleclas_calls_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCIKIT_LEARN], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ended.stdout.splitlines()[-2:] == ["0.5", "[[0.0, 1.0]]"]
