"""PaddleClas backbones by name: constructor arguments, stem, data layout, pretrained weights.

`check` and `fetch_pretrained` need neither Paddle nor PaddleClas, so the launching process can
refuse a configuration and download weights in well under a second. `build` imports both.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import logging
import os
import re
import sys
import time
import types
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from recipes import backbones, checkpoint, file_lock, pointers, stems
from recipes.backbones import LIST_COMMAND, RESNET_MODULE
from recipes.config import Config, ConfigError, ModelConfig, UserError
from recipes.home import expand_user
from recipes.manifest import MANIFEST, MODEL
from recipes.weights import SUFFIXES, read_weights

if TYPE_CHECKING:
    from paddle.nn import Layer

    from recipes.data.base import ImageDataset

CIFAR_MAX_SIZE = 64  # pixels a side up to which `stem: auto` takes the CIFAR form
DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte
LOCK_TIMEOUT = 3600.0  # seconds to wait for another process's download
# What PaddleClas imports of scikit-learn, with the package itself.
_SCIKIT_LEARN = ("sklearn", "sklearn.metrics", "sklearn.preprocessing")
# Constructor arguments that have a key of their own in the configuration.
RESERVED = {
    "class_num": "model.num_classes",
    "num_classes": "model.num_classes",
    "data_format": "model.data_format",
    "pretrained": "model.pretrained",
    "use_ssld": "model.pretrained (with the URL of those weights)",
}


class HasClasses(Protocol):
    """A dataset, or what is known of it before it is read."""

    @property
    def name(self) -> str: ...

    @property
    def num_classes(self) -> int: ...


def build(config: ModelConfig, num_classes: int, image_size: int) -> Layer:
    """Build a PaddleClas backbone, in float32, with its pretrained weights if configured.

    Initial weights come from Paddle's generator alone: call `paddle.seed(seed)` with one seed on
    every rank right before, and all ranks hold the same model. Parameter names do not depend on
    what else the process has built. For float64, call `model.to(dtype="float64")` on the result.

    Args:
        config: the `model` group.
        num_classes: outputs of the classifier.
        image_size: pixels a side of the images, which `stem: auto` decides by.

    Returns:
        A layer from images [N, 3, H, W] (for NHWC too: it transposes inside) to logits
        [N, num_classes].

    Raises:
        ConfigError: an unknown backbone or argument, a stem or layout it does not have, images or
            classes that it cannot take.
        UserError: pretrained weights that cannot be read or do not fit.
    """
    check(config, image_size)
    stem = chosen_stem(config, image_size)
    weights = fetch_pretrained(config)
    with _float32():
        model = _construct(config, num_classes, stem)
        if stem == "cifar":
            _use_cifar_stem(model, config)
        if weights is not None:
            _load(model, weights, num_classes)
        _check_output(model, config, num_classes, image_size)
    return model


def check(config: ModelConfig, image_size: int) -> None:
    """See what of `build` can be known without Paddle: the name, the arguments, the stem.

    Raises:
        ConfigError: as `build`.
        UserError: PaddleClas is not installed.
    """
    _check_name(config.name)
    _check_arguments(config)
    chosen_stem(config, image_size)


def num_classes(config: Config, dataset: HasClasses) -> int:
    """The classifier's outputs: as configured, else as many as the dataset has classes.

    Raises:
        ConfigError: fewer are configured than the dataset has.
    """
    configured = config.model.num_classes
    if configured is not None and configured < dataset.num_classes:
        raise ConfigError(
            f"model.num_classes={configured}, but {dataset.name} has {dataset.num_classes} classes",
            _way_out_of_classes(config),
        )
    return configured or dataset.num_classes


def _way_out_of_classes(config: Config) -> str:
    """What to do with a dataset of more classes than configured; a checkpoint's stay its own."""
    if config.task.name == "evaluate":
        return (
            "score the checkpoint on images of its own classes: where its run folder knows them, "
            "leave dataset, dataset.path and model.num_classes out"
        )
    if config.resume not in (None, "auto"):
        return (
            "a training goes on with its own classes: leave dataset and model.num_classes out; or "
            f"start another one from its weights: model.pretrained={config.resume} in place of "
            "resume, and model.num_classes=null"
        )
    return "model.num_classes=null takes the dataset's"


def prepare(config: Config, dataset: ImageDataset) -> Layer:
    """`build` for a run: the dataset's classes, the configured dtype, and sync-BN if asked for."""
    from recipes.batch_norm import convert_sync_batch_norm

    model = build(config.model, num_classes(config, dataset), dataset.image_size)
    if config.sync_bn:
        model = convert_sync_batch_norm(model)
    if config.dtype != "float32":
        model.to(dtype=config.dtype)
    return compiled(model, config, dataset.image_size) if config.compile else model


def compiled(model: Layer, config: Config, image_size: int) -> Layer:
    """The model with its forward pass as one static graph, for any number of images.

    Its layers, parameters and their names stay as they are. Source: `paddle.jit.to_static`.

    Raises:
        ConfigError: the backbone's forward pass is not one that Paddle can turn into a graph.
    """
    import paddle

    images = paddle.static.InputSpec([None, 3, image_size, image_size], config.dtype)
    static = paddle.jit.to_static(model, input_spec=[images], full_graph=True)
    try:
        static.forward.concrete_program  # noqa: B018 (traces the forward pass now, and keeps it)
    except Exception as error:  # a translation of any Python code may fail in any way
        raise ConfigError(
            f"compile=true: {config.model.name} cannot be made a static graph: {error}",
            "compile=false",
        ) from error
    return static


def describe(model: Layer) -> dict[str, Any]:
    """What a run records of its model: class, parameter counts, dtype, batch-norm layers.

    `parameters` counts what a checkpoint holds, with running statistics; `trainable` what an
    optimizer updates.
    """
    parameters = model.parameters()
    norms = [type(layer).__name__ for layer in model.sublayers()]
    return {
        "class": type(model).__name__,
        "parameters": sum(int(parameter.size) for parameter in parameters),
        "trainable": sum(int(each.size) for each in parameters if not each.stop_gradient),
        "dtype": str(parameters[0].dtype).removeprefix("paddle."),
        "batch_norms": {
            name: norms.count(name) for name in sorted(set(norms)) if "BatchNorm" in name
        },
    }


# --- the backbone -------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    known = backbones.names()
    if name in known:
        return
    if not known:
        raise UserError("PaddleClas is not installed", "make setup")
    near = ", ".join(backbones.near(name))
    raise ConfigError(
        f"model.name={name} is not one of PaddleClas's {len(known)} backbones",
        f"{f'did you mean {near}? ' if near else ''}list them with: {LIST_COMMAND}",
    )


def _check_arguments(config: ModelConfig) -> None:
    for name in config.arguments:
        if name in RESERVED:
            raise ConfigError(
                f"model.arguments.{name} has a key of its own", f"set {RESERVED[name]} instead"
            )


def chosen_stem(config: ModelConfig, image_size: int) -> str:
    """The stem of a backbone, imagenet or cifar, for images of a size.

    Raises:
        ConfigError: it has no such stem.
    """
    has_cifar = backbones.modules()[config.name] == RESNET_MODULE
    if config.stem == "cifar" and not has_cifar:
        able = [name for name, module in backbones.modules().items() if module == RESNET_MODULE]
        raise ConfigError(
            f"model.stem=cifar: {config.name} has no CIFAR form",
            f"model.stem=imagenet, or one of {', '.join(able)}",
        )
    if config.stem == "auto":
        return "cifar" if has_cifar and image_size <= CIFAR_MAX_SIZE else "imagenet"
    return config.stem


def _construct(config: ModelConfig, num_classes: int, stem: str) -> Layer:
    import paddle

    factory = getattr(_import_backbones(), config.name)
    arguments = {**_cifar_arguments(stem), **config.arguments}
    if config.data_format != "NCHW":
        arguments["data_format"] = config.data_format
    named = inspect.signature(factory).parameters
    classes = "num_classes" if "num_classes" in named else "class_num"
    arguments[classes] = num_classes
    if "pretrained" in named:
        arguments["pretrained"] = False  # a few backbones download by default
    try:
        # Some backbones name their parameters themselves, so that a second one in the same process
        # would clash; the guard also makes the names the same in every process.
        with paddle.utils.unique_name.guard():
            model = factory(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise _construction_error(config, arguments, error) from error
    # Constructors with **kwargs swallow what they do not know, without a word.
    for name in sorted(set(arguments) - _accepted(factory, model)):
        raise _unknown_argument(config, name)
    return model


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """Create parameters in float32, whatever the run's dtype.

    The old batch norm is float32 in any case, so another default would make a model of two dtypes.
    It also gives runs in float32 and float64 the same initial values.
    """
    import paddle

    before = paddle.get_default_dtype()
    paddle.set_default_dtype("float32")
    try:
        yield
    finally:
        paddle.set_default_dtype(before)


def _import_backbones() -> Any:
    """PaddleClas's backbone package, with its chatter silenced and its warnings kept."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.getLogger("faiss").setLevel(logging.WARNING)  # tells which of its builds it loads
    with _scikit_learn_when_called():
        from paddleclas.ppcls.arch import backbone

    # One of its imports configures the root logger; that is the application's to do.
    root.handlers[:], root.level = handlers, level
    logger = logging.getLogger("ppcls")
    logger.handlers.clear()  # it writes to stdout, among the run's own lines
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    if not any(isinstance(each, _NotAboutInitRes) for each in logger.filters):
        logger.addFilter(_NotAboutInitRes())
    return backbone


@contextlib.contextmanager
def _scikit_learn_when_called() -> Iterator[None]:
    """Let what is imported here import functions of scikit-learn, but not scikit-learn.

    PaddleClas does, for metrics that no backbone needs. It takes as long as importing Paddle.
    """
    ours = {name: _WhenCalled(name) for name in _SCIKIT_LEARN}
    if not sys.modules.keys().isdisjoint(ours):
        yield
        return
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del sys.modules[name]


class _WhenCalled(types.ModuleType):
    """A module all of whose attributes are functions, which import the real one to be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*arguments: Any, **named: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **named)

        return function


class _NotAboutInitRes(logging.Filter):
    """Drops the notice that every ResNet's constructor gives of its own code."""

    def filter(self, record: logging.LogRecord) -> bool:
        return '"init_res" will be deprecated' not in record.getMessage()


def _accepted(factory: Callable[..., Any], model: Layer) -> set[str]:
    """The argument names of a backbone's function and of its class with all base classes."""
    import paddle

    signatures = [inspect.signature(factory)]
    for base in type(model).__mro__:
        if base is paddle.nn.Layer:
            break
        if "__init__" in vars(base):
            signatures.append(inspect.signature(vars(base)["__init__"]))
    return {
        parameter.name
        for signature in signatures
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _construction_error(
    config: ModelConfig, arguments: dict[str, Any], error: Exception
) -> Exception:
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown and unknown[1] in arguments:
        return _unknown_argument(config, unknown[1])
    fixed = re.search(r"multiple values for keyword argument '(\w+)'", str(error))
    if fixed and fixed[1] in arguments:
        return ConfigError(f"{config.name} sets {fixed[1]} itself; model.arguments cannot")
    missing = re.search(r"missing \d+ required positional arguments?: (.*)", str(error))
    if missing:
        return ConfigError(
            f"{config.name} needs {missing[1]}", "give them with model.arguments.<name>=<value>"
        )
    if config.arguments:
        return ConfigError(
            f"{config.name} refuses model.arguments={config.arguments}: {error}",
            "correct or leave out these arguments",
        )
    return error


def _unknown_argument(config: ModelConfig, name: str) -> ConfigError:
    if name == "data_format":
        return ConfigError(
            f"model.data_format={config.data_format}: {config.name} has only NCHW",
            "model.data_format=NCHW",
        )
    if name in ("class_num", "num_classes"):
        return ConfigError(
            f"model.name={config.name} has no classifier whose classes can be set",
            f"choose another backbone; list them with: {LIST_COMMAND}",
        )
    return ConfigError(
        f"model.arguments.{name}: {config.name} has no such constructor argument",
        "correct the name or leave it out",
    )


def _cifar_arguments(stem: str) -> dict[str, Any]:
    """ResNets for small images: no stride and no pooling at first (He et al., 2015, 4.2)."""
    if stem != "cifar":
        return {}
    return {"stride_list": [1, 1, 2, 2, 2], "max_pool": False}


def _use_cifar_stem(model: Layer, config: ModelConfig) -> None:
    """Give a ResNet a 3x3 first convolution. The vd variants have three of them already."""
    import paddle
    from paddleclas.ppcls.arch.backbone.legendary_models.resnet import ConvBNLayer

    if len(model.stem) > 1:
        return
    with paddle.utils.unique_name.guard("cifar_stem_"):  # apart from the names inside the model
        model.stem[0] = ConvBNLayer(
            num_channels=model.stem[0].conv.weight.shape[1],
            num_filters=64,
            filter_size=3,
            stride=model.stride_list[0],
            act=model.stem[0].act,
            lr_mult=model.lr_mult_list[0],
            data_format=config.data_format,
        )


def _check_output(model: Layer, config: ModelConfig, num_classes: int, image_size: int) -> None:
    """Show the model one black image, in evaluation and without gradients.

    Some backbones take one image size only, some return several outputs, and a few pass an
    argument over; here that is told by name, and not from the depth of the first step.
    """
    import paddle

    what = f"model.name={config.name}, {config.data_format}, on images of {image_size} pixels"
    model.eval()
    try:
        with paddle.no_grad():
            out = model(paddle.zeros([1, 3, image_size, image_size]))
    except Exception as error:
        raise ConfigError(
            f"{what} fails: {str(error).strip()}",
            "give dataset.image_size the size this backbone is made for (often 224), "
            "or choose another backbone or data_format",
        ) from error
    finally:
        model.train()
    found = list(out.shape) if isinstance(out, paddle.Tensor) else f"a {type(out).__name__}"
    if found != [1, num_classes]:
        raise ConfigError(
            f"{what} returns {found}, not [1, {num_classes}] logits",
            f"choose another backbone; list them with: {LIST_COMMAND}",
        )


# --- pretrained weights: finding -----------------------------------------------------------------


_WEIGHTS = (
    "give a file, a run folder, a checkpoint, another folder with model.safetensors, a URL, or "
    '"paddleclas"'
)


def fetch_pretrained(config: ModelConfig) -> Path | None:
    """The file of the configured pretrained weights, downloaded into the cache if need be.

    Call it once before the ranks start. Called by several processes of a node at once it
    downloads once: the others wait. The cache is `$FLEET_RECIPES_CACHE`, else
    `~/.cache/fleet-recipes`; a download gets its name there only when it is complete.

    Returns:
        A .pdparams or .safetensors file; None where `model.pretrained` is null.

    Raises:
        ConfigError: no such backbone, file or URL.
        UserError: the download fails or is cut short, or the checksum differs.
    """
    if config.pretrained is None:
        return None
    if config.pretrained == "paddleclas":
        path = _download(_paddleclas_url(config.name), config.pretrained_sha256)
    elif config.pretrained.startswith(("http://", "https://")):
        path = _download(config.pretrained, config.pretrained_sha256)
    else:
        path = _local(config.pretrained)
    if config.pretrained_sha256 and _sha256(path) != config.pretrained_sha256.lower():
        raise UserError(
            f"{path}: its sha256 is {_sha256(path)}, "
            f"but model.pretrained_sha256={config.pretrained_sha256}",
            "delete the file if it is a spoiled download, or correct model.pretrained_sha256",
        )
    return path


def _local(pretrained: str) -> Path:
    path = expand_user(pretrained)
    if path.name in pointers.NAMES and os.path.lexists(path):
        path = pointers.looked_again(lambda: pointers.follow(expand_user(pretrained)))
    if path.is_dir():
        return _in_folder(pretrained, path)
    if not path.is_file():
        raise ConfigError(f"model.pretrained={pretrained}: no file {path}", _WEIGHTS)
    _check_suffix(pretrained, path.name)
    return path


def _in_folder(pretrained: str, folder: Path) -> Path:
    """The weights in a folder of weights, or of a checkpoint, or a run's newest ones."""
    if not (folder / MANIFEST).exists() and (folder / MODEL).is_file():
        return folder / MODEL
    if not checkpoint.may_hold_some(folder):
        missing = f"no file {folder / MODEL}, and no checkpoint in the folder"
        raise ConfigError(f"model.pretrained={pretrained}: {missing}", _WEIGHTS)
    try:
        found = checkpoint.resolve(str(folder), folder)
        assert found is not None  # as the folder is named
        checkpoint.verify(found)
    except UserError as error:
        raise ConfigError(
            f"model.pretrained={pretrained}: {error.message}", error.remedy or _WEIGHTS
        ) from None
    return found / MODEL


def _check_suffix(pretrained: str, name: str) -> None:
    if not name.endswith(SUFFIXES):
        raise ConfigError(
            f"model.pretrained={pretrained}: {name} is not a file of {' or '.join(SUFFIXES)}",
            "convert the weights to safetensors",
        )


def _paddleclas_url(name: str) -> str:
    """A backbone's URL in the MODEL_URLS table of its module, read without importing it."""
    _check_name(name)
    package = backbones.folder()
    assert package is not None  # the name has been found in it
    path = package / (backbones.modules()[name].replace(".", "/") + ".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "MODEL_URLS" for target in node.targets
        ):
            url = ast.literal_eval(node.value).get(name)
            if url:
                return str(url)
    raise ConfigError(
        f"model.pretrained=paddleclas: PaddleClas publishes no weights of {name}",
        "model.pretrained=null, or a file or URL",
    )


def _download(url: str, sha256: str | None) -> Path:
    cache = os.environ.get("FLEET_RECIPES_CACHE") or "~/.cache/fleet-recipes"
    folder = expand_user(cache) / "pretrained"
    name = Path(urllib.parse.urlparse(url).path).name
    _check_suffix(url, name)
    path = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{name}"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _download_to(path, url, sha256)
    except (OSError, HTTPException) as error:  # URLError is an OSError
        raise UserError(
            f"model.pretrained: {url} cannot be downloaded to {path}: {error}",
            "check the network and the disk, or fetch the file another way and give its path",
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between the processes of this node; the system frees it when a holder dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    with path.open("w") as file:
        while not file_lock.taken(file.fileno(), str(path.parent)):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: another process has downloaded for {LOCK_TIMEOUT:.0f} s",
                    "end it, or fetch the file another way and give its path",
                )
            time.sleep(0.2)
        yield


def _download_to(path: Path, url: str, sha256: str | None) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    digest, received = hashlib.sha256(), 0
    try:
        with (
            urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT) as response,
            partial.open("wb") as file,
        ):
            expected = response.headers.get("Content-Length")
            size = f" ({int(expected) / 1e6:.1f} MB)" if expected else ""
            print(f"downloading {url}{size}", flush=True)
            while chunk := response.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        if expected and received != int(expected):
            raise UserError(
                f"{url}: the download ended after {received} of {expected} bytes", "try again"
            )
        if sha256 and digest.hexdigest() != sha256.lower():
            raise UserError(
                f"{url}: its sha256 is {digest.hexdigest()}, but model.pretrained_sha256={sha256}",
                "check the URL, or correct model.pretrained_sha256",
            )
        if not sha256:
            print(
                f"{url}: sha256 {digest.hexdigest()}, not verified "
                "(model.pretrained_sha256 is null)",
                flush=True,
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- pretrained weights: loading -----------------------------------------------------------------


def _load(model: Layer, path: Path, num_classes: int) -> None:
    """Put weights into the model; a classifier of another class count keeps its initial ones."""
    weights, state = read_weights(path), model.state_dict()
    differing = {
        name: (list(weights[name].shape), list(state[name].shape))
        for name in state
        if name in weights and list(weights[name].shape) != list(state[name].shape)
    }
    head = _head(differing, num_classes)
    problems = [f"missing in the file: {name}" for name in state if name not in weights]
    problems += [f"unknown to the model: {name}" for name in weights if name not in state]
    problems += [
        f"shape of {name}: {theirs} in the file, {ours} in the model"
        for name, (theirs, ours) in differing.items()
        if name not in head
    ]
    if len(problems) == 1:
        stems.refuse_another(path, differing.keys() - head, *differing.get(stems.FIRST, ([], [])))
    if problems:
        shown = problems[:20] + [f"and {len(problems) - 20} more"] * (len(problems) > 20)
        raise UserError(
            f"{path} does not fit the model:\n    " + "\n    ".join(shown),
            "give weights of this very backbone",
        )
    for name in state:
        if name not in head:
            state[name].set_value(weights[name].astype(_numpy_dtype(state[name])))
    if head and os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        print(
            f"{path.name} has {head[next(iter(head))]} classes, the model {num_classes}: "
            f"{', '.join(head)} keep their random initial values",
            flush=True,
        )


def _head(differing: dict[str, tuple[list[int], list[int]]], num_classes: int) -> dict[str, int]:
    """Of the parameters whose shapes differ, those that differ by the class count alone.

    Returns:
        The file's class count by parameter name; empty where the file has no single one.
    """
    head = {}
    for name, (theirs, ours) in differing.items():
        axes = [axis for axis in range(len(ours)) if theirs[axis : axis + 1] != [ours[axis]]]
        if len(theirs) == len(ours) and len(axes) == 1 and ours[axes[0]] == num_classes:
            head[name] = theirs[axes[0]]
    return head if len(set(head.values())) == 1 else {}


def _numpy_dtype(tensor: Any) -> np.dtype[Any]:
    return np.dtype(str(tensor.dtype).removeprefix("paddle."))
