"""The typed schema of ``conf/``, and the checks across its fields.

Everything the code reads from the configuration is declared here; `conf/` gives the values.
Nothing in this module imports Paddle, so a mistake is reported in well under two seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from recipes import backbones, bounds, hints, named_choices
from recipes.printable import printable, printable_lines
from recipes.topology import Topology

# The one key that may hold any others.
_OPEN = "model.arguments"
_SHOWN = 100  # characters of a setting in a message
_LONGEST_REASON = 500  # characters of a library's words, which quote what was given

TASKS = ("train", "evaluate", "benchmark", "preflight", "prepare", "smoke", "runs")
# bench-… are the tables of `make bench`, beside the records.
_RECORD_NAME = re.compile(r"(?!bench-)\w[\w.-]*", re.ASCII)
DATASETS = ("digits", "cifar10", "imagenet", "synthetic")
IN_MEMORY = ("digits", "cifar10")  # datasets held as one array
PHOTOGRAPHS = ("imagenet",)  # datasets of encoded images
LOADERS = ("auto", "turbojpeg", "dali", "paddle")


class UserError(Exception):
    """A mistake the user can mend: shown as one message, without a traceback.

    Args:
        message: what happened, and where (file, key, node, rank).
        remedy: what to do about it.

    Attributes:
        may_pass: another attempt may do without it: a run with `restarts` left makes one.
    """

    may_pass = False

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.remedy)


class PassingError(UserError):
    """What may be gone when it is tried again: a process that was killed, a disk that stalled."""

    may_pass = True


class ConfigError(UserError):
    """A configuration that cannot run."""


# What a mistake in the configuration can be raised as.
MISTAKES = (UserError, HydraException, OmegaConfBaseException)
# What Hydra raises besides, for mistakes in groups and lists of them, numbers of too many digits,
# and the run folder.
HYDRAS_OWN = (ValueError, TypeError, LookupError, AttributeError, OverflowError, OSError)


@dataclass
class TaskConfig:
    """What to do with the composed configuration."""

    name: str = MISSING


@dataclass
class ModelConfig:
    """A PaddleClas backbone and how it meets the images."""

    name: str = MISSING  # a class of paddleclas.ppcls.arch.backbone, such as ResNet50
    stem: str = "auto"  # auto (by image size), imagenet, cifar (ResNets only)
    data_format: str = "NCHW"  # NCHW, NHWC: the layout inside the backbone
    num_classes: int | None = None  # null: as many as the dataset has
    pretrained: str | None = None  # a local file, a URL, or "paddleclas" for the backbone's own
    pretrained_sha256: str | None = None  # checked before the weights are read
    arguments: dict[str, Any] = field(default_factory=dict)  # passed to the backbone's constructor


@dataclass
class DatasetConfig:
    """Where the images come from and how they are read."""

    name: str = MISSING  # digits, cifar10, imagenet, synthetic
    path: str | None = None  # folder of the data; null where the dataset needs none or downloads
    download: bool = True  # cifar10: fetch the archive when it is not at `path`
    image_size: int = MISSING  # pixels a side that the model sees
    num_classes: int | None = None  # null: counted from the data
    augment: bool = True  # the dataset's standard augmentation, in training only
    cutout: int = 0  # digits, cifar10: a square of so many pixels a side is blanked; 0: none
    shuffle: bool = True  # a new order of the training samples in every epoch
    # Per rank. loader=turbojpeg: processes that decode (one: a thread), dali: threads; 0: the
    # rank's share of the cores.
    # loader=paddle: loader processes; 0: the rank itself reads. Data in memory needs none.
    workers: int = 0
    prefetch: int = 2  # batches prepared ahead; loader=paddle: by each loader process
    on_corrupt: str = "fail"  # fail, skip: what to do about an image that cannot be read
    # An image of more is one that cannot be read: a small file may claim any size. A decoder takes
    # up to 11 bytes a pixel.
    max_pixels: int = 120_000_000
    max_skipped: int = 100  # with skip: more than this many on one rank end the run
    train_size: int | None = None  # synthetic: images an epoch
    eval_size: int | None = None  # synthetic: images an evaluation


@dataclass
class PrepareConfig:
    """task=prepare: a folder of images (dataset.path) to a prepared dataset, or its check."""

    output: str | None = None  # the folder to make
    short_side: int = 320  # pixels; larger images are reduced to it; 0: none is
    format: str = "jpeg"  # jpeg, raw (pixels: larger, and no decoding in training)
    quality: int = 90  # of JPEGs that are encoded anew, 1 to 100
    chroma: str = "source"  # source, 420: colour resolution of those JPEGs
    shard_mib: float = 512.0  # size of a shard in MiB
    workers: int | None = None  # threads; null: one per core
    verify: bool = False  # check every byte of the prepared dataset at dataset.path instead


@dataclass
class TopologyConfig:
    """NODESxDEVICES: how many machines, and how many processes (devices) on each."""

    nodes: int = 1
    devices: int = 1
    master: str | None = None  # HOST or HOST:PORT of node 0; null: as the environment says
    node_rank: int | None = None  # this machine's number, from 0; null: as the environment says


@dataclass
class NetworkConfig:
    """Which network the nodes talk over. Variables that the user has set win."""

    name: str = "auto"  # auto, ethernet, infiniband
    interface: str | None = None  # null: the one on the route to node 0


@dataclass
class DeadlinesConfig:
    """Seconds after which a wait ends with an error that says who was waited for."""

    start: float = 60.0  # for all nodes to meet, to gather their facts, and to join the group
    prepare: float = 1800.0  # for building data and model
    step: float = 120.0  # for one step, batch or evaluation batch of a rank
    silence: float = 20.0  # without a word from a node
    # For one image to be read and decoded. At most three quarters of `step` count, so that this
    # ends first, and names the file.
    read: float = 60.0
    # From a signal that asks the run to end to its end, by force where need be: what docker stop
    # (10 s), Slurm's --signal or a pod's terminationGracePeriodSeconds leaves, less a second.
    grace: float = 9.0


@dataclass
class AmpConfig:
    """Automatic mixed precision (GPU only)."""

    level: str = "off"  # off, O1, O2
    dtype: str = "float16"  # float16 (with a dynamic loss scale), bfloat16 (without)
    initial_loss_scale: float = 65536.0


@dataclass
class GradientsConfig:
    """How gradients travel between the ranks."""

    bucket_mib: int = 32  # gradients are averaged in buckets of this size, while backward goes on
    dtype: str | None = None  # float16 (GPU), bfloat16: what they travel as; null: as they are


@dataclass
class OptimizerConfig:
    """The update rule; the learning rate is given per 256 images of the global batch."""

    name: str = MISSING  # momentum, adamw
    base_lr: float = MISSING  # per 256 images if scale_lr, else the learning rate itself
    scale_lr: bool = True  # linear scaling: lr = base_lr * global_batch_size / 256
    weight_decay: float = 0.0
    decay_bn_and_bias: bool = False  # weight decay on batch-norm parameters and biases too
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float | None = None  # clip gradients to this global norm; null: off
    fused: bool = False  # momentum: one kernel updates all parameters


@dataclass
class ScheduleConfig:
    """How the learning rate moves over the run. All lengths are in epochs."""

    name: str = MISSING  # cosine, step
    warmup_epochs: float = 0.0  # linear from nearly 0 to the peak
    final_lr_factor: float = 0.0  # cosine: the last learning rate, as a share of the peak
    milestones: list[float] = field(default_factory=list)  # step: epochs after which the rate falls
    gamma: float = 0.1  # step: factor at each milestone


@dataclass
class LogConfig:
    """What is printed and recorded while training."""

    every: int = 20  # optimizer steps between two log events
    images: int = 16  # input samples shown in VisualDL; 0: none
    samples: bool = False  # each rank lists the samples of every step: logs/samples-rank-K.jsonl


@dataclass
class SaveConfig:
    """Checkpoints."""

    every_epochs: int = 1
    every_steps: int | None = None  # also after each so many optimizer steps
    keep: int = 3  # newest checkpoints kept; the best one is kept besides
    keep_finished: int = 1  # the same, once the run has completed: what goes on or is evaluated


@dataclass
class RunsConfig:
    """task=runs: list the runs in a folder, or remove some."""

    folder: str = "outputs"
    # completed, interrupted, failed or killed: the runs that ended so; or the name of a run's
    # folder as it is listed, or a pattern of such names (* and ?). Runs that go on stay.
    remove: str | None = None


@dataclass
class BenchmarkConfig:
    """task=benchmark: how long it measures, and what becomes of the record."""

    warmup: int = 20  # optimizer steps before the first measured one
    steps: int = 20  # optimizer steps of a repetition, which gives one sample of the speed
    repeats: int = 5
    split_steps: int = 10  # steps whose parts are measured one by one; 0: none
    name: str | None = None  # of that copy; null: from model, dataset, topology and time
    output: str | None = None  # folder of a copy of the record; null: the run folder alone has it


@dataclass
class Config:
    """One run, whole."""

    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    log: LogConfig = field(default_factory=LogConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    runs: RunsConfig = field(default_factory=RunsConfig)
    recipe_name: str = "custom"  # the recipe file that set this up, if one did
    epochs: int = 1
    max_steps: int | None = None  # stop early after this many optimizer steps
    batch_size: int | None = None  # images per device and micro-batch
    global_batch_size: int | None = None  # images per optimizer step over all devices
    accumulate: int = 1  # micro-batches per optimizer step on each device
    # Images per device in evaluation. Not derived from batch_size: with fixed batches the scores
    # are bit-identical on any topology.
    eval_batch_size: int = 100
    sync_bn: bool = False  # batch-norm statistics over all ranks
    label_smoothing: float = 0.0
    # What makes batches: auto, turbojpeg (CPU), dali (GPU), paddle (paddle.io.DataLoader).
    loader: str = "auto"
    seed: int = 0
    device: str = "auto"  # auto, cpu, gpu
    dtype: str = "float32"  # float32, float64 (CPU only, for proofs)
    deterministic: bool = False  # GPU: bit-identical reruns, at a cost; on CPU they are so anyway
    threads: int | None = None  # CPU threads per rank; null: the machine's cores shared out
    # Which cores a rank may use. auto: on a GPU those next to it; split: the node's cores shared
    # out, so no two ranks have one in common; off: all.
    affinity: str = "auto"
    compile: bool = False  # turn the model into a static graph (paddle.jit.to_static)
    restarts: int = 0  # after a failure: how often to start again from the last checkpoint
    preflight: bool = True  # check the nodes before a run on several
    resume: str | None = None  # auto, or the path of a checkpoint or run folder
    checkpoint: str | None = None  # task=evaluate: what to evaluate

    @property
    def shape(self) -> Topology:
        """The topology as a value that knows its world size."""
        return Topology(self.topology.nodes, self.topology.devices)


def register_schema() -> None:
    """Make the schema known to Hydra as ``config_schema``, the base of ``conf/config.yaml``, and
    the choices that need no file in ``conf/``."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    named_choices.register()


def from_hydra(composed: DictConfig, machine: Machine | None = None) -> Config:
    """Turn a composed configuration into a checked `Config` with its batch sizes filled in.

    Args:
        composed: what Hydra made of ``conf/`` and the overrides.
        machine: what the run has to fit; None: this one.

    Raises:
        ConfigError: naming every mistake found, one a line.
    """
    unknown = list(_unknown_keys(composed, OmegaConf.structured(Config)))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    assert isinstance(config, Config)
    problems = list(_choices(config)) + list(bounds.problems(config))
    if not problems:
        config = with_measured_steps(with_batch_sizes(config))
        derived = list(bounds.problems(config))
        problems = derived or list(_combinations(config, machine or Machine.this()))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def compose(conf: Path, overrides: list[str]) -> tuple[Config, Path]:
    """As `compose_unchecked`, and checked."""
    composed, folder = compose_unchecked(conf, overrides)
    return from_hydra(composed), folder


def compose_unchecked(conf: Path, overrides: list[str]) -> tuple[DictConfig, Path]:
    """Compose without `hydra.main`, for a rank: nothing is made on disk.

    Returns:
        What `from_hydra` takes, and the run folder that it names.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: what `explain` explains.
    """
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            composed = hydra_compose("config", overrides=overrides, return_hydra_config=True)
    except MISTAKES:
        raise
    except HYDRAS_OWN as error:
        raise not_composed(error, overrides) from error
    folder = Path(composed.hydra.run.dir)
    with open_dict(composed):
        del composed["hydra"]
    return composed, folder


def not_composed(error: Exception, overrides: list[str]) -> ConfigError:
    """One message of what is among `HYDRAS_OWN`."""
    key = re.search(r"^\s*full_key: (\S+)$", str(error), flags=re.MULTILINE)
    place = f"{key[1]}: " if key else ""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    given = " ".join(printable(each, _SHOWN) for each in overrides)
    return ConfigError(f"{place}{printable(reason, _LONGEST_REASON)}, with {given}")


def explain(mistake: Exception) -> str:
    """What a user should read about a mistake that Hydra, OmegaConf or this package found."""
    if isinstance(mistake, UserError):
        return str(mistake)
    return printable_lines(_explained(mistake), _LONGEST_REASON)


def _explained(mistake: Exception) -> str:
    if isinstance(mistake, MissingConfigException):
        return _explain_missing_choice(mistake)
    if isinstance(mistake, OverrideParseException):
        return (
            f"{mistake.override!r} is not a setting: {str(mistake).splitlines()[0]}\n"
            "  remedy: write KEY=VALUE, and put quotes inside quotes around special characters: "
            "'KEY=\"VALUE\"'"
        )
    if str(mistake).startswith("Ambiguous value for argument"):
        return (
            f"{str(mistake).splitlines()[0]}: it has a comma\n"
            "  remedy: --multirun runs one after the other; KEY=[a,b] is a list; quotes inside "
            "quotes make a text"
        )
    cause: BaseException | None = mistake
    if isinstance(mistake, HydraException) and isinstance(
        mistake.__cause__, OmegaConfBaseException
    ):
        cause = mistake.__cause__
    key = getattr(cause, "full_key", None)
    reason = str(cause).splitlines()[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key:
        return _explain_unknown_key(key)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is not set\n  remedy: {key}=…"
    if isinstance(cause, ValidationError | ConfigTypeError) and key:
        reason = _plain_reason(key, reason)
    return f"{key}: {reason}" if key and key not in reason else reason


def _plain_reason(key: str, reason: str) -> str:
    """A type mismatch in the words of a user, who has not seen the schema's classes."""
    if reason.endswith("is not Optional") or "NoneType" in reason:
        return f"{key} must have a value, not null"
    if "ListConfig" in reason and key != _OPEN:
        return f"{key} must be a list, such as [30,60,80]"
    if "is not a subclass of" in reason or "Dict[" in reason or key == _OPEN:
        return _holds_keys(key)
    if "DictConfig" in reason:
        return f"{key} refers to a group of keys, not to a value"
    return reason


def _holds_keys(key: str) -> str:
    sign = "+" if key == _OPEN else ""
    return f"{key} holds keys of its own: give them as {sign}{key}.KEY=VALUE"


def _explain_unknown_key(key: str) -> str:
    if key.startswith(f"{_OPEN}."):
        return (
            f"unknown key {key}: arguments of the backbone's constructor are added, not changed\n"
            f"  remedy: +{key}=…"
        )
    return f"unknown key {key}: {_hint(key)}"


def _hint(key: str) -> str:
    """What an unknown key may stand for."""
    meant = hints.settings_like(key, known_keys())
    return f"did you mean {' or '.join(meant)}?" if meant else "`--help` lists the keys"


def known_keys() -> list[str]:
    """Every key of the schema, groups included."""
    return [name for name, _ in _leaves(OmegaConf.structured(Config))]


def _explain_missing_choice(mistake: MissingConfigException) -> str:
    group, _, choice = str(mistake.missing_cfg_file).partition("/")
    listed = re.findall(r"^\t(\w+)$", str(mistake), flags=re.MULTILINE)
    options = list(mistake.options or listed)
    if not options:
        return str(mistake)
    text = f"{group}={choice} is not one of {', '.join(options)}"
    meant = hints.choice_like(group, choice, options)
    if group == "topology":
        text += ", or another NODESxDEVICES, such as topology=3x2"
    elif group == "model":
        text += f", or of PaddleClas's {len(backbones.names())} backbones"
        text += f"\n  remedy: `{backbones.LIST_COMMAND}` lists them"
        near = [f"model={name}" for name in backbones.near(choice)]
        text += f"; did you mean {' or '.join(near)}?" if near else ""
    elif meant is not None:
        text += f"\n  remedy: did you mean {group}={meant}?"
    return text


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in map(str, node):
        value = node._get_node(key)
        if isinstance(value, DictConfig):
            yield from _leaves(value, f"{prefix}{key}.")
        yield f"{prefix}{key}", value


def load(path: Path) -> Config:
    """Read a run folder's ``config.yaml`` back.

    Raises:
        ConfigError: the file is missing, is no YAML, or does not pass the checks of `from_hydra`.
    """
    try:
        read = OmegaConf.load(path)
        if not isinstance(read, DictConfig):
            raise ConfigError("it holds no keys")
        return from_hydra(OmegaConf.merge(OmegaConf.structured(Config), read))  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not a YAML file: {error}") from None
    except MISTAKES as error:
        raise ConfigError(f"{path}: not a configuration that runs here: {explain(error)}") from None


def dump(config: Config) -> str:
    """The whole configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def with_batch_sizes(config: Config) -> Config:
    """Derive `batch_size` from `global_batch_size`, or the other way round.

    Where the global batch does not divide by the number of shares, `batch_size` is the largest
    share: the sampler gives each device that many images or one fewer.

    Raises:
        ConfigError: neither is set, both are and disagree, or a device would get under 2 images.
    """
    shares = config.shape.world_size * config.accumulate
    factors = f"{config.shape} x accumulate={config.accumulate}"
    per_device, whole = config.batch_size, config.global_batch_size
    if per_device is None and whole is None:
        raise ConfigError("batch_size and global_batch_size are both null", "set one of them")
    least = f"batch_size=null global_batch_size={2 * shares}"
    if per_device is None:
        assert whole is not None
        per_device = math.ceil(whole / shares)
        least = f"global_batch_size={2 * shares}"
    elif whole is None:
        whole = per_device * shares
        least = "batch_size=2"
    if whole < 2 * shares:  # first, as neither size is a way out then
        raise ConfigError(
            f"global_batch_size={whole} leaves {whole / shares:.2g} images for each of {factors}",
            f"use at least 2 images a device: {least} or more",
        )
    if math.ceil(whole / shares) != per_device:
        raise ConfigError(
            f"batch_size={per_device} on {factors} makes {per_device * shares} images a step, "
            f"but global_batch_size={whole}",
            f"give one and set the other to null: global_batch_size=null, or batch_size=null "
            f"(which makes it {math.ceil(whole / shares)})",
        )
    config.batch_size, config.global_batch_size = per_device, whole
    return config


def with_measured_steps(config: Config) -> Config:
    """For ``task=benchmark``, derive what the loop takes from the group `benchmark`.

    The run ends with the last repetition, whatever the epochs, and logs once a repetition. The
    learning rate then moves otherwise than in a training, which costs as much time.

    Raises:
        ConfigError: max_steps is set to something else.
    """
    if config.task.name != "benchmark":
        return config
    asked = config.benchmark
    whole = asked.warmup + asked.steps * asked.repeats
    if config.max_steps not in (None, whole):
        raise ConfigError(
            f"max_steps={config.max_steps}, but benchmark.warmup={asked.warmup} and "
            f"benchmark.repeats={asked.repeats} of benchmark.steps={asked.steps} make {whole}",
            "max_steps=null",
        )
    config.max_steps = whole
    config.log.every = asked.steps
    config.epochs = max(config.epochs, whole)  # an epoch has a step or more
    return config


def _unknown_keys(composed: DictConfig, schema: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that `+key=value` appended past the schema; Hydra itself lets them through."""
    known = [str(key) for key in schema]  # `in` would not find keys without a default
    for key in map(str, composed):
        if key not in known:
            yield f"unknown key {prefix}{key}: {_hint(prefix + key)}"
        elif prefix + key == _OPEN or not OmegaConf.is_dict(schema._get_node(key)):
            continue
        elif not OmegaConf.is_dict(composed[key]):  # a reference to something else
            yield _holds_keys(prefix + key)
        else:
            yield from _unknown_keys(composed[key], schema[key], f"{prefix}{key}.")


def _choices(config: Config) -> Iterator[str]:
    allowed: dict[str, tuple[str | None, tuple[str | None, ...]]] = {
        "task.name": (config.task.name, TASKS),
        "dataset.name": (config.dataset.name, DATASETS),
        "dataset.on_corrupt": (config.dataset.on_corrupt, ("fail", "skip")),
        "prepare.format": (config.prepare.format, ("jpeg", "raw")),
        "prepare.chroma": (config.prepare.chroma, ("source", "420")),
        "model.stem": (config.model.stem, ("auto", "imagenet", "cifar")),
        "model.data_format": (config.model.data_format, ("NCHW", "NHWC")),
        "amp.level": (config.amp.level, ("off", "O1", "O2")),
        "amp.dtype": (config.amp.dtype, ("float16", "bfloat16")),
        "optimizer.name": (config.optimizer.name, ("momentum", "adamw")),
        "schedule.name": (config.schedule.name, ("cosine", "step")),
        "network.name": (config.network.name, ("auto", "ethernet", "infiniband")),
        "loader": (config.loader, LOADERS),
        "device": (config.device, ("auto", "cpu", "gpu")),
        "dtype": (config.dtype, ("float32", "float64")),
        "gradients.dtype": (config.gradients.dtype, (None, "float16", "bfloat16")),
        "affinity": (config.affinity, ("auto", "split", "off")),
    }
    for key, (value, choices) in allowed.items():
        if value not in choices:
            named = ", ".join(choice or "null" for choice in choices)
            yield f"{key}={bounds.short(str(value))} is not one of {named}"


def _combinations(config: Config, machine: Machine) -> Iterator[str]:
    gpu = uses_gpu(config, machine)
    if config.device == "gpu" and not machine.has_gpu:
        lacking = "the NVIDIA driver" if not machine.nvidia_driver else "a GPU build of Paddle"
        lacking = "a visible device (CUDA_VISIBLE_DEVICES)" if machine.visible == () else lacking
        yield f"device=gpu: this node lacks {lacking}\n  remedy: device=cpu, or install it"
    if config.amp.level != "off" and not gpu:
        yield (
            f"amp.level={config.amp.level} has no effect on CPU: Paddle computes in float32 there "
            "and would report a mixed-precision run that was none\n"
            "  remedy: amp=off, or a GPU with a GPU build of Paddle"
        )
    if config.dtype == "float64" and (gpu or config.amp.level != "off"):
        yield "dtype=float64 is for proofs on CPU\n  remedy: device=cpu amp=off, or dtype=float32"
    yield from _loop_options(config, gpu)
    if config.task.name == "evaluate" and not config.checkpoint:
        yield (
            "task=evaluate needs a checkpoint\n  remedy: checkpoint=outputs/<run>/checkpoints/best"
        )
    if config.task.name != "evaluate" and config.checkpoint:
        yield (
            f"checkpoint={config.checkpoint} is read by task=evaluate only\n"
            "  remedy: task=evaluate scores it; checkpoint=null resume=PATH goes on with it; "
            "checkpoint=null model.pretrained=PATH starts another from its weights"
        )
    if config.task.name != "runs" and config.runs.remove is not None:
        yield f"runs.remove={config.runs.remove} is read by task=runs only\n  remedy: task=runs"
    if config.task.name == "evaluate" and config.resume:
        yield (
            f"resume={config.resume} continues a training, which task=evaluate does not\n"
            "  remedy: resume=null"
        )
    if config.task.name == "benchmark" and config.resume not in (None, "auto"):
        yield f"resume={config.resume}: task=benchmark starts afresh\n  remedy: resume=null"
    name = config.benchmark.name
    if name is not None and not _RECORD_NAME.fullmatch(name):
        yield (
            f"benchmark.name={name} must be of letters, digits, '.', '_' and '-', and not begin "
            "with 'bench-'"
        )
    if config.schedule.name == "step" and not config.schedule.milestones:
        yield (
            "schedule=step needs schedule.milestones, the epochs after which the rate falls\n"
            "  remedy: schedule.milestones=[30,60,80], or what suits the run's epochs"
        )
    ascending = sorted(config.schedule.milestones)
    if config.schedule.milestones != ascending:
        yield (
            f"schedule.milestones={config.schedule.milestones} must ascend\n"
            f"  remedy: schedule.milestones={ascending}".replace(", ", ",")
        )
    if config.dataset.name == "imagenet" and not config.dataset.path:
        yield (
            "dataset=imagenet needs dataset.path: a folder with train/ and val/ class folders, "
            "or with train_list.txt and val_list.txt"
        )
    if config.dataset.name == "synthetic" and not (
        config.dataset.train_size and config.dataset.eval_size and config.dataset.num_classes
    ):
        yield (
            "dataset=synthetic needs dataset.train_size, dataset.eval_size, dataset.num_classes\n"
            "  remedy: dataset.train_size=12800 dataset.eval_size=1000 dataset.num_classes=1000"
        )
    if config.task.name == "prepare":
        yield from _preparation(config)
    yield from _loading(config, machine)
    node_rank = config.topology.node_rank
    if node_rank is not None and not 0 <= node_rank < config.topology.nodes:
        yield (
            f"topology.node_rank={node_rank}, but topology {config.shape} has nodes 0 to "
            f"{config.topology.nodes - 1}"
        )
    visible = machine.visible
    if gpu and visible and config.topology.devices > len(visible):
        yield (
            f"topology {config.shape} needs {config.topology.devices} devices on each node, but "
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} shows {len(visible)}\n"
            f"  remedy: topology.devices={len(visible)}, or make more devices visible"
        )


def _loop_options(config: Config, gpu: bool) -> Iterator[str]:
    """What does not work, among the options that make a step cheaper."""
    if config.compile and config.sync_bn and not gpu:
        yield (
            "compile=true does not work with sync_bn=true on CPU: the statistics are exchanged by "
            "Python code there, which a static graph cannot hold\n"
            "  remedy: compile=false, or sync_bn=false"
        )
    if config.gradients.dtype == "float16" and not gpu:
        yield (
            "gradients.dtype=float16 does not work on CPU: Paddle's gloo adds float16 wrongly\n"
            "  remedy: gradients.dtype=bfloat16, or null"
        )
    if config.gradients.dtype and config.dtype == "float64":
        yield (
            f"gradients.dtype={config.gradients.dtype} would round away what dtype=float64 is for\n"
            "  remedy: gradients.dtype=null"
        )
    if config.optimizer.fused and (config.optimizer.name, config.dtype) != ("momentum", "float32"):
        yield (
            f"optimizer.fused=true: Paddle has no fused {config.optimizer.name} for "
            f"{config.dtype}, only momentum for float32 and 16 bits\n"
            "  remedy: optimizer.fused=false"
        )


def _preparation(config: Config) -> Iterator[str]:
    if config.dataset.name != "imagenet":
        yield (
            f"task=prepare reads folders of images, which dataset={config.dataset.name} is not\n"
            "  remedy: dataset=imagenet dataset.path=FOLDER"
        )
    if config.topology.nodes > 1:
        yield (
            f"task=prepare runs on one machine, but topology {config.shape} has "
            f"{config.topology.nodes}\n  remedy: topology=1x1, and copy the result to the others"
        )
    if config.prepare.verify == (config.prepare.output is not None):
        both = config.prepare.verify
        make, check = "prepare.output=FOLDER", "prepare.verify=true"
        if both:
            make, check = "prepare.verify=false", "prepare.output=null"
        yield (
            "task=prepare needs prepare.output, or prepare.verify=true, and not both\n"
            f"  remedy: {make} makes a prepared dataset of the images in dataset.path; "
            f"{check} checks the prepared dataset in dataset.path"
        )


def _loading(config: Config, machine: Machine) -> Iterator[str]:
    name = config.dataset.name
    if config.dataset.cutout and name not in IN_MEMORY:
        yield (
            f"dataset.cutout={config.dataset.cutout} is an augmentation of "
            f"{' and '.join(IN_MEMORY)}, not of {name}\n  remedy: dataset.cutout=0"
        )
    if config.loader in ("turbojpeg", "dali") and name not in PHOTOGRAPHS:
        kept = "is held in memory" if name in IN_MEMORY else "is made on the fly"
        yield (
            f"loader={config.loader} decodes photographs, but {name} {kept}\n  remedy: loader=auto"
        )
    elif config.loader == "dali" and not uses_gpu(config, machine):
        yield (
            "loader=dali decodes on a GPU, and this run has none\n"
            "  remedy: loader=turbojpeg, which is faster on CPU than DALI's CPU backend"
        )
    elif config.loader == "dali" and not machine.has_dali:
        yield (
            "loader=dali: NVIDIA DALI is not installed\n"
            "  remedy: loader=turbojpeg, or use an image with DALI (cu126, cu129)"
        )


def chosen_loader(config: Config) -> str:
    """How batches are made: memory, turbojpeg, dali or paddle."""
    if config.loader != "auto":
        return config.loader
    if config.dataset.name in IN_MEMORY:
        return "memory"
    return "turbojpeg" if config.dataset.name in PHOTOGRAPHS else "paddle"


@dataclass(frozen=True)
class Machine:
    """What this node has, as far as it can be told without importing Paddle or CUDA.

    Attributes:
        visible: the devices CUDA_VISIBLE_DEVICES names; None where it is not set (all of them).
        nvidia_driver: whether the driver's device files are there.
        paddle_for_gpu: whether the installed Paddle is a GPU build.
        has_dali: whether NVIDIA DALI is installed.
    """

    visible: tuple[str, ...] | None
    nvidia_driver: bool
    paddle_for_gpu: bool
    has_dali: bool = False

    @property
    def has_gpu(self) -> bool:
        """Whether Paddle can compute on a GPU here."""
        return self.nvidia_driver and self.paddle_for_gpu and self.visible != ()

    @classmethod
    def this(cls) -> Machine:
        """The machine this process runs on."""
        value = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        names = tuple(n.strip() for n in value.split(",") if n.strip() not in ("", "-1"))
        try:
            importlib.metadata.version("paddlepaddle-gpu")
            paddle_for_gpu = True
        except importlib.metadata.PackageNotFoundError:
            paddle_for_gpu = False
        return cls(
            visible=None if value == "all" else names,
            nvidia_driver=Path("/dev/nvidiactl").exists(),
            paddle_for_gpu=paddle_for_gpu,
            has_dali=_is_installed("nvidia", "dali"),
        )


def _is_installed(package: str, module: str) -> bool:
    """Whether package.module can be imported, as far as can be told without importing it."""
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(f"{package}.{module}") is not None
    )


def uses_gpu(config: Config, machine: Machine | None = None) -> bool:
    """Whether the run is meant for a GPU: as configured, else where this node has one."""
    return config.device == "gpu" or (
        config.device == "auto" and (machine or Machine.this()).has_gpu
    )
