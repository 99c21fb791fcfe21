"""The configuration: what composes, what is refused, and in which words."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from recipes import backbones, bounds, config
from recipes.config import Config, ConfigError, Machine, TopologyConfig, UserError
from recipes.data.sampler import batch_bounds, share_bounds
from recipes.topology import Topology

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
CPU = Machine(visible=None, nvidia_driver=False, paddle_for_gpu=False)
GPU = Machine(visible=None, nvidia_driver=True, paddle_for_gpu=True)
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if "recipe" not in str(path)
)
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
# What some choices need besides.
COMPANIONS = {
    "model=paddleclas": ["model.name=MobileNetV3_small_x1_0"],
    "dataset=imagenet": ["dataset.path=/data"],
    "task=evaluate": ["checkpoint=outputs/run/checkpoints/best"],
    "task=prepare": ["dataset=imagenet", "dataset.path=/data", "prepare.output=/prepared"],
}
PREPARE = "task=prepare dataset=imagenet dataset.path=/data"
# Words of the libraries that say nothing to a user.
INTERNAL = re.compile(
    r"Traceback|object_type|full_key|reference_type|\w+Config\b|NoneType|Optional|Dict\[|hydra\.cc"
)


def made(*overrides: str, machine: Machine = CPU) -> Config:
    config.register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra_compose("config", overrides=list(overrides))
    return config.from_hydra(composed, machine)


@functools.cache
def default() -> DictConfig:
    config.register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra_compose("config")


def changed(key: str, value: Any) -> Config:
    """As `made` with one key set, without composing anew, which takes a tenth of a second."""
    composed = copy.deepcopy(default())
    try:
        OmegaConf.update(composed, key, value)
    except OverflowError as error:  # Hydra's too
        raise config.not_composed(error, []) from error
    return config.from_hydra(composed, CPU)


def refusal(*overrides: str, machine: Machine = CPU) -> str:
    """What the user reads."""
    return refusal_of(lambda: made(*overrides, machine=machine))


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(config.MISTAKES) as caught:
        call()
    text = config.explain(caught.value)
    assert not INTERNAL.search(text), text
    return text


# --- what composes


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes(choice: str) -> None:
    group, name = choice.split("=")
    found = made(choice, *COMPANIONS.get(choice, []), machine=GPU)
    chosen = OmegaConf.load(CONF / group / f"{name}.yaml")
    assert isinstance(chosen, DictConfig)
    assert len(chosen) > 0
    section = OmegaConf.structured(found)[group]
    for key in map(str, chosen):
        if not OmegaConf.is_missing(chosen, key) and chosen[key] is not None:
            assert section[key] == chosen[key]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_a_suitable_machine(name: str) -> None:
    imagenet = ["dataset.path=/data"] if name.startswith("imagenet") else []
    found = made(f"recipe={name}", *imagenet, machine=GPU if imagenet else CPU)
    assert found.recipe_name == name
    if shape := re.search(r"\d+x\d+$", name):
        assert str(found.shape) == shape[0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("swap", [False, True])
def test_the_command_line_wins_over_a_recipe(name: str, swap: bool) -> None:
    arguments = [
        f"recipe={name}",
        *("topology=1x8", "model=resnet50", "dataset=synthetic", "amp=off", "optimizer=adamw"),
        *("schedule=step", "epochs=7", "optimizer.base_lr=0.5", "batch_size=16"),
        "global_batch_size=null",
    ]
    found = made(*(reversed(arguments) if swap else arguments))
    assert str(found.shape) == "1x8"
    assert (found.model.name, found.dataset.name, found.amp.level) == (
        *("ResNet50", "synthetic"),
        "off",
    )
    assert (found.optimizer.name, found.schedule.name, found.epochs) == ("adamw", "step", 7)
    assert found.optimizer.base_lr == 0.5
    assert (found.batch_size, found.global_batch_size) == (16, 128)
    assert found.recipe_name == name


def test_a_recipe_wins_over_the_defaults() -> None:
    found = made("recipe=cifar10_resnet18")
    assert (found.dataset.name, found.epochs, found.optimizer.weight_decay) == (
        "cifar10",
        100,
        5e-4,
    )


def test_backbone_arguments_are_open() -> None:
    found = made("+model.arguments.scale=0.5", "+model.arguments.nested={a:[1,2]}")
    assert found.model.arguments == {"scale": 0.5, "nested": {"a": [1, 2]}}


def test_compose_for_a_rank_gives_the_run_folder_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config.register_schema()
    found, folder = config.compose(CONF, ["hydra.run.dir=here/run", "epochs=3"])
    assert (found.epochs, folder) == (3, Path("here/run"))
    assert list(tmp_path.iterdir()) == []
    _, folder = config.compose(CONF, ["recipe=digits_resnet18"])
    assert re.fullmatch(r"outputs/\d{8}-\d{6}-\d{6}-digits_resnet18", str(folder))


# --- what is refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("foo=1", "unknown key foo: `--help` lists the keys"),
        ("+foo=1", "unknown key foo: `--help` lists the keys"),
        ("++foo.bar=1", "unknown key foo: `--help` lists the keys"),
        ("log.evry=3", "unknown key log.evry: did you mean log.every?"),
        ("+log.evry=3", "unknown key log.evry: did you mean log.every?"),
        ("+dataset.sise=3", "unknown key dataset.sise"),
        ("bach_size=3", "unknown key bach_size: did you mean batch_size?"),
        ("log={foo:1}", "unknown key log.foo"),
        ("model.arguments.x=3", "remedy: +model.arguments.x=…"),
        ("epochs=abc", "epochs: Value 'abc'"),
        ("epochs=1.5", "epochs: Value '1.5'"),
        ("epochs=", "epochs: Value ''"),
        ("epochs=true", "epochs: Value 'True'"),
        ("epochs=[1]", "epochs: Value '[1]'"),
        ("epochs=null", "epochs must have a value, not null"),
        ("model.name=null", "model.name must have a value, not null"),
        ("schedule.milestones=[1,null]", "schedule.milestones[1] must have a value, not null"),
        ("schedule.milestones=[a]", "schedule.milestones[0]: Value 'a'"),
        ("schedule.milestones=3", "schedule.milestones must be a list, such as [30,60,80]"),
        ("log=abc", "log holds keys of its own: give them as log.KEY=VALUE"),
        ("schedule.milestones={a:1}", "schedule.milestones must be a list, such as [30,60,80]"),
        ("model.arguments=3", "give them as +model.arguments.KEY=VALUE"),
        ("model.arguments=[3]", "give them as +model.arguments.KEY=VALUE"),
        ("model.arguments=null", "model.arguments must have a value, not null"),
        ("sync_bn=maybe", "sync_bn: Value 'maybe' is not a valid bool"),
        ("label_smoothing=x", "label_smoothing: Value 'x'"),
        ("device={a:b}", "device: Cannot convert 'dict' to string"),
        ("batch_size=${nope}", "batch_size: Interpolation key 'nope' not found"),
        ("dataset.path=${oc.env:NO_SUCH_VARIABLE}", "'NO_SUCH_VARIABLE' not found"),
        ("epochs=${dataset}", "epochs refers to a group of keys, not to a value"),
        ("epochs=${epochs}", "epochs: Recursive interpolation"),
        ("model=paddleclas", "model.name is not set\n  remedy: model.name=…"),
        ("dataset.image_size=???", "dataset.image_size is not set"),
        ("model=resnet99", "model=resnet99 is not one of paddleclas, resnet18, resnet50"),
        ("model=a/b", "model=a/b is not one of paddleclas"),
        ("model=resnet5O", "did you mean model=ResNet50"),
        ("optimizer=sgd", "remedy: did you mean optimizer=momentum?"),
        ("recipe=digits", "remedy: did you mean recipe=digits_resnet18?"),
        ("topology=3x5x2", "or another NODESxDEVICES, such as topology=3x2"),
        ("topology=0x4", "topology.nodes=0 must be a number greater than 0"),
        ("topology=4x0", "topology.devices=0 must be a number greater than 0"),
        ("topology=1x5000", "topology.devices=5000 must be at most 256"),
        ("topology=70000x1", "topology.nodes=70000 must be at most 10,000"),
        ("foo=[1", "'foo=[1' is not a setting"),
        ("train", "'train' is not a setting"),
        ("a b=3", "'a b=3' is not a setting"),
        ("topology=1x1,1x2", "'topology=1x1,1x2': it has a comma\n  remedy: --multirun"),
        ("~foo", "'foo' does not exist"),
        ("+model=resnet18", "model appears more than once"),
    ],
)
def test_a_mistake_is_explained_in_a_line_or_two(override: str, message: str) -> None:
    text = refusal(override)
    assert message in text
    assert len(text.splitlines()) <= 2


@settings(max_examples=10, deadline=None)
@given(nodes=st.integers(1, 999), devices=st.integers(1, 99), sign=st.sampled_from("xX"))
def test_any_topology_goes_by_its_name(nodes: int, devices: int, sign: str) -> None:
    assert made(f"topology={nodes}{sign}{devices}").shape == Topology(nodes, devices)


@pytest.mark.parametrize(
    "word", ["ResNet34", "resnet34", "MobileNetV3-small-x1.0", "PPLCNET_X0_25", "dla46_c"]
)
def test_any_backbone_goes_by_its_name(word: str) -> None:
    found = made(f"model={word}").model
    assert found.name in backbones.names()
    letters = re.compile(r"[^a-z0-9]")
    assert letters.sub("", found.name.lower()) == letters.sub("", word.lower())
    assert found == dataclasses.replace(made("model=resnet18").model, name=found.name)


CHOICE_KEYS = [
    *("task.name", "dataset.name", "dataset.on_corrupt", "model.stem", "model.data_format"),
    *("amp.level", "amp.dtype", "optimizer.name", "schedule.name", "device", "dtype"),
    *("network.name", "loader", "prepare.format", "prepare.chroma"),
]


@pytest.mark.parametrize("key", CHOICE_KEYS)
def test_words_outside_of_the_list(key: str) -> None:
    assert f"{key}=fast is not one of " in refusal_of(lambda: changed(key, "fast"))


POSITIVE = [
    *("topology.nodes", "topology.devices", "epochs", "max_steps", "batch_size"),
    *("global_batch_size", "accumulate", "eval_batch_size", "log.every", "save.every_epochs"),
    *("save.keep", "threads", "dataset.image_size", "dataset.num_classes", "dataset.prefetch"),
    *("dataset.train_size", "dataset.eval_size", "model.num_classes", "optimizer.clip_norm"),
    *("amp.initial_loss_scale", "optimizer.epsilon", "schedule.gamma", "deadlines.start"),
    *("deadlines.prepare", "deadlines.step", "deadlines.silence", "deadlines.grace"),
    *("deadlines.read", "dataset.max_pixels", "benchmark.steps"),
    *("benchmark.repeats", "prepare.quality", "prepare.shard_mib", "prepare.workers"),
    *("gradients.bucket_mib", "save.every_steps", "save.keep_finished"),
]
NOT_NEGATIVE = [
    *("seed", "dataset.workers", "dataset.max_skipped", "log.images", "optimizer.base_lr"),
    *("optimizer.weight_decay", "schedule.warmup_epochs", "restarts", "prepare.short_side"),
    *("dataset.cutout", "benchmark.warmup", "benchmark.split_steps"),
]
BELOW_ONE = ["label_smoothing", "optimizer.momentum", "optimizer.beta1", "optimizer.beta2"]


def number_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every key of the schema that holds a number."""
    for name, value in vars(node).items():
        kind = str(type(node).__dataclass_fields__[name].type)
        if hasattr(value, "__dataclass_fields__"):
            yield from number_keys(value, f"{prefix}{name}.")
        elif re.match(r"(int|float)\b", kind):
            yield prefix + name


def test_every_number_has_its_bounds() -> None:
    bounded = [*bounds.POSITIVE, *bounds.NOT_NEGATIVE, *bounds.AT_MOST_ONE, *bounds.BELOW_ONE]
    assert sorted([*bounded, *bounds.ELSEWHERE]) == sorted(number_keys(Config()))
    assert set(POSITIVE) == set(bounds.POSITIVE)
    assert set(NOT_NEGATIVE) == set(bounds.NOT_NEGATIVE)


NUMBERS = (
    st.integers(-(10**30), 10**30)
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400)])
    | st.floats()
    | st.sampled_from([5e-324, 1e-30, 1e30, 1.7e308, -0.0])
)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(number_keys(Config()))), value=NUMBERS)
def test_any_number_composes_or_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: float
) -> None:
    """What composes also reads back, with derived values, and lies within float32."""
    try:
        found = changed(key, value)
    except config.MISTAKES as mistake:
        text = config.explain(mistake)
        assert key.rpartition(".")[2] in text
        assert not INTERNAL.search(text)
        assert len(text) < 1000
        return
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(config.dump(found), encoding="utf-8")
    assert config.load(path) == found
    for each in number_keys(Config()):
        number = getattr_path(found, each)
        assert number is None or (abs(number) < 3e38 and abs(int(number)) < 2**103)
        if isinstance(number, int):
            assert -(2**63) <= number < 2**63


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(["dataset.path", "resume", "topology.master", "model.name", "loader"]),
    text=st.text(st.characters(), max_size=20)
    | st.sampled_from(["\0", "a\nb", "\x1b[31m", "\udcff", "a" * 300, "a/" * 3000, "", " "]),
)
def test_any_text_composes_or_is_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, key: str, text: str
) -> None:
    assume("$" not in text and text != "???")  # what OmegaConf makes of these is tested above
    try:
        found = changed(key, text)
    except config.MISTAKES as mistake:
        told = config.explain(mistake)
        assert key in told
        assert len(told) < 1000
        assert told.replace("\n", "").isprintable() or any(
            unicodedata.category(letter) in ("Zs", "Zl", "Zp", "Cf", "Co", "Cn") for letter in told
        )
        return
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(config.dump(found), encoding="utf-8")
    assert config.load(path) == found
    Path(text).exists()  # a path may lead nowhere, but may be asked


@pytest.mark.parametrize("key", POSITIVE)
def test_numbers_that_must_be_positive(key: str) -> None:
    for value in (0, -1):
        text = refusal_of(functools.partial(changed, key, value))
        assert re.search(rf"{key}={value}(\.0)? must be a number greater than 0", text)


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_numbers_that_must_not_be_negative(key: str) -> None:
    text = refusal_of(lambda: changed(key, -1))
    assert re.search(rf"{key}=-1(\.0)? must be a number that is not negative", text)
    assert getattr_path(changed(key, 0), key) == 0


@pytest.mark.parametrize("key", BELOW_ONE)
def test_shares(key: str) -> None:
    for value in (1.0, -0.1, math.nan):
        text = refusal_of(functools.partial(changed, key, value))
        assert f"{key}={value} must be in [0, 1)" in text
    assert getattr_path(changed(key, 0.0), key) == 0


def float_keys(node: Any, prefix: str = "") -> list[str]:
    found = []
    for name, value in vars(node).items():
        if hasattr(value, "__dataclass_fields__"):
            found += float_keys(value, f"{prefix}{name}.")
        elif "float" in str(type(node).__dataclass_fields__[name].type) and "list" not in str(
            type(node).__dataclass_fields__[name].type
        ):
            found.append(f"{prefix}{name}")
    return found


@pytest.mark.parametrize("key", float_keys(Config()))
def test_no_number_may_be_infinite_or_none_at_all(key: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        text = refusal_of(functools.partial(changed, key, value))
        assert f"{key}={value} must be " in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"seed={2**63}", "must be at most 9,223,372,036,854,775,807"),
        ("model.pretrained_sha256=xyz", "model.pretrained_sha256=xyz must be 64 hexadecimal"),
        ("schedule.final_lr_factor=1.5", "schedule.final_lr_factor=1.5 must be in [0, 1]"),
        ("schedule.milestones=[0,1]", "schedule.milestones[0]=0.0 must be"),
        ("schedule.milestones=[1,nan]", "schedule.milestones[1]=nan must be"),
        ("schedule.milestones=[-3]", "schedule.milestones[0]=-3.0 must be"),
    ],
)
def test_other_numbers(override: str, message: str) -> None:
    assert message in refusal(override)


def test_a_number_too_large_for_a_float_is_no_crash() -> None:
    assert "max_steps=10^80… must be at most" in refusal(f"max_steps=1{'0' * 400}")
    assert "epochs=-10^80… must be" in refusal(f"epochs=-1{'0' * 400}")
    assert made(f"seed={2**63 - 1}").seed == 2**63 - 1


def test_all_mistakes_are_named_at_once() -> None:
    text = refusal("epochs=0", "device=tpu", "label_smoothing=2", "log.every=-1")
    for key in ("epochs=0", "device=tpu", "label_smoothing=2", "log.every=-1"):
        assert key in text
    assert len(text.splitlines()) == 4


CUDA_0 = Machine(visible=(), nvidia_driver=True, paddle_for_gpu=True)
CUDA_2 = Machine(visible=("3", "5"), nvidia_driver=True, paddle_for_gpu=True)
NO_DRIVER = Machine(visible=None, nvidia_driver=False, paddle_for_gpu=True)
DALI = Machine(visible=None, nvidia_driver=True, paddle_for_gpu=True, has_dali=True)
PHOTOS = "dataset=imagenet dataset.path=/data"
NO_BUILD = Machine(visible=None, nvidia_driver=True, paddle_for_gpu=False)


@pytest.mark.parametrize(
    ("overrides", "machine", "message", "remedy"),
    [
        ("device=gpu", NO_BUILD, "lacks a GPU build of Paddle", "device=cpu"),
        ("device=gpu", NO_DRIVER, "lacks the NVIDIA driver", "device=cpu"),
        ("device=gpu", CUDA_0, "lacks a visible device (CUDA_VISIBLE_DEVICES)", "device=cpu"),
        ("amp=o1", CPU, "amp.level=O1 has no effect on CPU: Paddle computes in", "amp=off"),
        ("amp=o2 device=cpu", GPU, "amp.level=O2 has no effect on CPU", "amp=off"),
        ("amp=o2 amp.dtype=bfloat16", CUDA_0, "has no effect on CPU", "amp=off"),
        ("dtype=float64", GPU, "dtype=float64 is for proofs on CPU", "device=cpu"),
        ("dtype=float64 amp=o1", CPU, "dtype=float64 is for proofs", "amp=off"),
        ("compile=true sync_bn=true", CPU, "compile=true does not work with", "sync_bn=false"),
        ("gradients.dtype=float16", CPU, "adds float16 wrongly", "gradients.dtype=bfloat16"),
        ("dtype=float64 gradients.dtype=bfloat16", CPU, "would round away", "gradients.dtype=null"),
        ("optimizer=adamw optimizer.fused=true", CPU, "no fused adamw", "optimizer.fused=false"),
        ("optimizer.fused=true dtype=float64", CPU, "no fused momentum for float64", "fused=false"),
        ("task=evaluate", CPU, "task=evaluate needs a checkpoint", "checkpoint=outputs/"),
        ("runs.remove=failed", CPU, "is read by task=runs only", "task=runs"),
        ("checkpoint=x", CPU, "checkpoint=x is read by task=evaluate only", "resume=PATH"),
        ("task=evaluate checkpoint=x resume=auto", CPU, "resume=auto continues", "resume=null"),
        ("task=benchmark resume=x", CPU, "resume=x: task=benchmark starts afresh", "resume=null"),
        ("task=benchmark max_steps=7", CPU, "of benchmark.steps=20 make 120", "max_steps=null"),
        ("benchmark.name=bench-1", CPU, "benchmark.name=bench-1 must be of letters", ""),
        ("benchmark.name=a/b", CPU, "benchmark.name=a/b must be of letters", ""),
        ("benchmark.name=.a", CPU, "benchmark.name=.a must be of letters", ""),
        ("schedule=step schedule.milestones=[]", CPU, "schedule=step needs", "[30,60,80]"),
        (
            "schedule.milestones=[3,1]",
            CPU,
            "schedule.milestones=[3.0,1.0] must ascend",
            "=[1.0,3.0]",
        ),
        ("dataset=imagenet", CPU, "dataset=imagenet needs dataset.path", "train_list.txt"),
        ("task=prepare prepare.output=x", CPU, "which dataset=digits is not", "dataset=imagenet"),
        (PREPARE, CPU, "task=prepare needs prepare.output, or prepare.verify=true", "FOLDER"),
        (f"{PREPARE} prepare.output=x prepare.verify=true", CPU, "and not both", "dataset.path"),
        (f"{PREPARE} prepare.output=x topology=2x4", CPU, "runs on one machine", "topology=1x1"),
        (f"{PREPARE} prepare.output=x prepare.quality=101", CPU, "quality=101 must be at most", ""),
        ("dataset=synthetic dataset.eval_size=null", CPU, "dataset=synthetic needs", "eval_size"),
        ("topology=1x4", CUDA_2, "CUDA_VISIBLE_DEVICES=3,5 shows 2", "topology.devices=2"),
        ("topology.node_rank=1", CPU, "topology.node_rank=1, but topology 1x1", "nodes 0 to 0"),
        ("loader=turbojpeg", CPU, "loader=turbojpeg decodes photographs, but digits is", "auto"),
        ("loader=turbojpeg dataset=synthetic", CPU, "synthetic is made on the fly", "loader=auto"),
        ("loader=dali dataset=cifar10", DALI, "cifar10 is held in memory", "loader=auto"),
        (f"loader=dali {PHOTOS}", CPU, "loader=dali decodes on a GPU", "loader=turbojpeg"),
        (f"loader=dali {PHOTOS} device=cpu", DALI, "decodes on a GPU", "loader=turbojpeg"),
        (f"loader=dali {PHOTOS}", GPU, "loader=dali: NVIDIA DALI is not installed", "turbojpeg"),
        (f"dataset.cutout=8 {PHOTOS}", CPU, "dataset.cutout=8 is an augmentation of", "cutout=0"),
        ("dataset.cutout=8 dataset=synthetic", CPU, "not of synthetic", "dataset.cutout=0"),
        ("batch_size=null", CPU, "both null", "set one of them"),
        (
            "batch_size=32 global_batch_size=100 topology=1x4",
            *(CPU, "makes 128 images a step, but global_batch_size=100", "makes it 25"),
        ),
        ("batch_size=1", CPU, "leaves 1 images for each", ": batch_size=2 or more"),
        (
            "batch_size=32 global_batch_size=3 topology=1x4",
            *(CPU, "leaves 0.75 images for each", "batch_size=null global_batch_size=8 or more"),
        ),
        (
            "batch_size=null global_batch_size=15 accumulate=2 topology=1x4",
            *(CPU, "1x4 x accumulate=2", "global_batch_size=16 or more"),
        ),
    ],
)
def test_impossible_combinations(
    overrides: str, machine: Machine, message: str, remedy: str
) -> None:
    text = refusal(*overrides.split(), machine=machine)
    assert message in text
    assert remedy in text


@pytest.mark.parametrize(
    ("overrides", "machine"),
    [
        ("amp=o2 amp.dtype=bfloat16", GPU),
        ("amp=o1 topology=1x2", CUDA_2),
        ("device=gpu topology=1x8", GPU),
        ("device=cpu topology=1x8", CUDA_2),
        ("dtype=float64", CPU),
        ("dtype=float64 device=cpu", GPU),
        ("compile=true sync_bn=true gradients.dtype=float16 optimizer.fused=true", GPU),
        ("compile=true gradients.dtype=bfloat16 affinity=split", CPU),
        ("device=auto", CUDA_0),
        (f"loader=dali {PHOTOS}", DALI),
        (f"loader=turbojpeg {PHOTOS}", CPU),
        (f"loader=paddle dataset.workers=8 {PHOTOS}", CPU),
        ("loader=paddle dataset=cifar10 dataset.cutout=8", CPU),
        ("task=evaluate checkpoint=x", CPU),
    ],
)
def test_possible_combinations(overrides: str, machine: Machine) -> None:
    assert made(*overrides.split(), machine=machine).epochs == 1


@settings(max_examples=20, deadline=None)
@given(warmup=st.integers(0, 50), steps=st.integers(1, 50), repeats=st.integers(1, 9))
def test_the_steps_of_a_benchmark_follow(warmup: int, steps: int, repeats: int) -> None:
    composed = copy.deepcopy(default())
    asked = {"warmup": warmup, "steps": steps, "repeats": repeats}
    OmegaConf.update(composed, "benchmark", asked)
    assert config.from_hydra(composed, CPU).max_steps is None  # of another task they are nothing
    OmegaConf.update(composed, "task.name", "benchmark")
    found = config.from_hydra(composed, CPU)
    assert found.max_steps == warmup + steps * repeats
    assert found.log.every == steps
    assert found.epochs >= found.max_steps
    again = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.structured(found))
    assert config.from_hydra(again, CPU) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("2, 5", ("2", "5")),
        ("GPU-a", ("GPU-a",)),
    ],
)
def test_visible_devices(
    monkeypatch: pytest.MonkeyPatch, value: str | None, visible: tuple[str, ...] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert Machine.this().visible == visible
    assert Machine(visible, True, True).has_gpu == (visible != ())


@pytest.mark.parametrize(
    ("overrides", "loader"),
    [
        ("dataset=digits", "memory"),
        ("dataset=cifar10 dataset.workers=3", "memory"),
        (PHOTOS, "turbojpeg"),
        ("dataset=synthetic", "paddle"),
        (f"{PHOTOS} loader=dali", "dali"),
        ("dataset=digits loader=paddle", "paddle"),
    ],
)
def test_the_loader_suits_the_data(overrides: str, loader: str) -> None:
    assert config.chosen_loader(made(*overrides.split(), machine=DALI)) == loader


def test_this_machine_is_asked_for_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda *_, found=found: found)
        assert Machine.this().has_dali == (found is not None)


# --- batch sizes

SMALL = st.integers(1, 9)


def sized(nodes: int, devices: int, accumulate: int, **sizes: Any) -> Config:
    shape = TopologyConfig(nodes, devices)
    return config.with_batch_sizes(Config(topology=shape, accumulate=accumulate, **sizes))


@given(nodes=SMALL, devices=SMALL, accumulate=SMALL, per_device=st.integers(1, 500))
def test_the_global_batch_follows(
    nodes: int, devices: int, accumulate: int, per_device: int
) -> None:
    if per_device == 1:
        with pytest.raises(ConfigError, match="leaves 1 images"):
            sized(nodes, devices, accumulate, batch_size=1)
        return
    found = sized(nodes, devices, accumulate, batch_size=per_device)
    assert found.batch_size == per_device
    assert found.global_batch_size == nodes * devices * accumulate * per_device
    again = sized(nodes, devices, accumulate, global_batch_size=found.global_batch_size)
    assert again == found
    assert config.with_batch_sizes(found) == found


@given(
    nodes=SMALL,
    devices=SMALL,
    accumulate=SMALL,
    whole=st.integers(1, 5000),
    epoch=st.integers(1, 4),
)
def test_the_batch_of_a_device_is_the_samplers_largest_share(
    nodes: int, devices: int, accumulate: int, whole: int, epoch: int
) -> None:
    shares = nodes * devices * accumulate
    if whole < 2 * shares:
        with pytest.raises(ConfigError, match=rf"use at least 2.*={2 * shares} or more"):
            sized(nodes, devices, accumulate, global_batch_size=whole)
        return
    found = sized(nodes, devices, accumulate, global_batch_size=whole)
    assert found.global_batch_size == whole
    largest = 0
    for batch in np.diff(batch_bounds(epoch * whole, whole)):
        largest = max(largest, int(np.diff(share_bounds(int(batch), shares)).max()))
    assert found.batch_size == largest


@given(devices=SMALL, accumulate=SMALL, per_device=st.integers(2, 99), whole=st.integers(2, 5000))
def test_both_sizes_have_to_agree(
    devices: int, accumulate: int, per_device: int, whole: int
) -> None:
    shares = devices * accumulate
    assume(whole >= 2 * shares)
    sizes = {"batch_size": per_device, "global_batch_size": whole}
    if per_device * shares - shares < whole <= per_device * shares:
        assert sized(1, devices, accumulate, **sizes).batch_size == per_device
        return
    with pytest.raises(ConfigError) as caught:
        sized(1, devices, accumulate, **sizes)
    assert f"but global_batch_size={whole}" in caught.value.message
    assert f"which makes it {math.ceil(whole / shares)})" in caught.value.remedy


# --- files

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda text: "$" not in text and "\\" not in text and text != "???"
)


@settings(max_examples=10, deadline=None)
@given(
    name=TEXT | st.sampled_from(["007", "1e5", "true", "null", "~", "off", "a: b", "# x", "- y"]),
    path=st.none() | TEXT,
    lr=st.floats(0, 1e30),
    seed=st.integers(0, 2**63 - 1),
    milestones=st.lists(st.floats(0.001, 1e6)).map(sorted),
    arguments=st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(st.booleans())),
    devices=SMALL,
)
def test_a_run_folders_configuration_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, Any], devices: int, **drawn: Any
) -> None:
    before = changed("epochs", 3)
    before.recipe_name, before.dataset.path = drawn["name"], drawn["path"]
    before.optimizer.base_lr, before.seed = drawn["lr"], drawn["seed"]
    before.schedule.milestones, before.model.arguments = drawn["milestones"], arguments
    before.topology.devices, before.batch_size, before.global_batch_size = devices, None, 999
    before = config.with_batch_sizes(before)
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(config.dump(before), encoding="utf-8")
    assert config.load(path) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("a: [1", "not a YAML file"),
        ("- 1\n- 2\n", "it holds no keys"),
        ("just words", "no"),
        ("foo: 1\n", "unknown key foo"),
        ("epochs: many\n", "epochs: Value 'many'"),
        ("epochs: 0\n", "epochs=0 must be"),
        ("log: {evry: 3}\n", "unknown key log.evry: did you mean log.every?"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(made_text(text))
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert not INTERNAL.search(str(caught.value)), caught.value


def made_text(change: str) -> str:
    """A whole configuration with a change, where the change is one of keys."""
    if not re.match(r"\w+: [^\[]", change):
        return change
    whole = OmegaConf.create(config.dump(made()))
    return OmegaConf.to_yaml(OmegaConf.merge(whole, OmegaConf.create(change)))


def test_a_user_error_survives_another_process() -> None:
    import pickle

    for error in (UserError("what", "how"), ConfigError("what")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (again.message, again.remedy, str(again)) == (
            error.message,
            error.remedy,
            str(error),
        )
    assert str(UserError("what", "how")) == "what\n  remedy: how"


# --- before anything is imported or made

PARENT = """
import json, resource, runpy, sys
status = 0
try:
    sys.argv = ["train.py", *sys.argv[1:]]
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    status = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = [n for n in ("paddle", "paddleclas", "cv2", "sklearn", "visualdl") if n in sys.modules]
print(json.dumps({"status": status, "seconds": used.ru_utime + used.ru_stime, "heavy": heavy}))
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("foo=1", "error: unknown key foo"),
        ("dataset.workers=500000", "error: dataset.workers=500000 must be at most 256"),
        ("epochs=abc", "error: epochs: Value 'abc'"),
        ("amp=o1 device=cpu", "error: amp.level=O1 has no effect on CPU"),
        ("task=evaluate", "error: task=evaluate needs a checkpoint"),
        ("topology=foo", "error: topology=foo is not one of"),
        ("batch_size=1", "error: global_batch_size=1 leaves 1 images"),
        ("model.name=Nonsense topology=1x2", "error: model.name=Nonsense is not one of"),
        ("model.num_classes=4", "error: model.num_classes=4, but digits has 10 classes"),
        ("batch_size=2000", "error: the training set has 1437 images, fewer than the 2000"),
        ("--multirun epochs=0 seed=1,-2", "seed=-2 must be"),
    ],
)
def test_a_rejected_run_is_quick_and_leaves_nothing(
    tmp_path: Path, overrides: str, message: str
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-c", PARENT, *overrides.split()),
            *(f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'runs'}"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert found["status"] == 2
    assert found["heavy"] == []
    # Processor time: other work on the machine does not count.
    assert found["seconds"] < 2.0
    # Hydra writes what a multirun was before its first run begins.
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left <= {"runs", "runs/multirun.yaml"}


def getattr_path(node: Any, key: str) -> Any:
    for name in key.split("."):
        node = getattr(node, name)
    return node


@pytest.mark.parametrize(
    ("folder", "message"),
    [("a" * 300, "File name too long"), ("'a\x1bb'", "hydra.run.dir=")],
)
def test_a_run_folder_that_cannot_be_is_named(tmp_path: Path, folder: str, message: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={folder}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert message in ended.stderr
    assert "remedy: " in ended.stderr
    assert "\x1b" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", "."])
def test_a_run_is_not_left_in_the_working_folder(tmp_path: Path, folder: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={folder}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "error: hydra.run.dir is empty, or this very folder" in ended.stderr
    assert ended.returncode == 2
    assert list(tmp_path.iterdir()) == []
