"""A record: complete or refused, and free of what names a machine."""

from __future__ import annotations

import copy
import getpass
import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import dumped, little_memory, mutated, mutated_json
from records import COMMIT, a_record

from benchmarks import compare, report
from recipes import telemetry
from recipes.benchmark import record
from recipes.benchmark.record import Record, Throughput
from recipes.config import UserError

HERE = Path("r.json")


def refusal(content: Any) -> str:
    with pytest.raises(UserError) as caught:
        record.parse(content, HERE)
    assert "r.json" in caught.value.message
    assert caught.value.remedy
    return caught.value.message


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_a_record_is_read_as_it_was_written(
    devices: int, split: bool, gpu: bool, tmp_path: Path
) -> None:
    made = record.parse(a_record(devices, split=split, gpu=gpu), HERE)
    record.write(tmp_path / "new" / "r.json", made)
    assert record.read(tmp_path / "new" / "r.json") == made
    assert (made.topology, made.world_size) == (f"1x{devices}", devices)
    assert made.loop_step == pytest.approx(0.64)


def fields(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of the schema in a record; what a config or a list holds is not the schema's."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict) and key not in ("config", "packages", "paddle", "phases"):
            yield from fields(value, (*path, key))


@pytest.mark.parametrize("path", list(fields(a_record())), ids=".".join)
def test_an_incomplete_record_is_refused_by_the_name_of_what_is_missing(
    path: tuple[str, ...],
) -> None:
    content = a_record()
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    if path == ("schema",):
        assert "schema None" in refusal(content)
    else:
        assert re.search(rf"incomplete, {re.escape('.'.join(path))}\b.* missing", refusal(content))


def test_what_lacks_in_a_list_is_named() -> None:
    content = a_record(2)
    del content["usage"]["ranks"][1]["load"]
    assert "usage.ranks[1].load missing" in refusal(content)
    content = a_record(2, gpu=True)
    del content["machine"]["gpus"][0]["name"]
    assert "machine.gpus[0].name missing" in refusal(content)


@pytest.mark.parametrize(
    "key", ["model.name", "topology.devices", "benchmark.repeats", "amp.level"]
)
def test_a_composed_configuration_must_be_whole(key: str) -> None:
    content = a_record()
    section, name = key.split(".")
    del content["config"][section][name]
    assert f"incomplete, config.{key} missing" in refusal(content)


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_is_refused(schema: Any) -> None:
    content = a_record() | {"schema": schema}
    assert f"schema {schema!r} is not one that this version reads (1)" in refusal(content)


@pytest.mark.parametrize("content", [[], 7, None, "text", {}])
def test_what_is_no_record_is_refused(content: Any) -> None:
    refusal(content)


def change(*path: str | int) -> Callable[[Any], Callable[[Any], None]]:
    def to(value: Any) -> Callable[[Any], None]:
        def apply(content: Any) -> None:
            for key in path[:-1]:
                content = content[key]
            content[path[-1]] = value

        return apply

    return to


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change("unheard_of")(1), "unheard_of"),
        (change("throughput", "unheard_of")(1), "throughput.unheard_of"),
        (change("throughput", "median")("fast"), "throughput.median"),
        (change("throughput", "median")(200.0), "not those of its samples"),
        (change("throughput", "lowest")(1.0), "not those of its samples"),
        (change("throughput", "samples")([100.0]), "throughput.samples has 1 of 5"),
        (change("throughput", "samples")([]), "throughput.samples has 0 of 5"),
        (change("throughput", "samples", 2)(-1.0), "greater than 0"),
        (change("throughput", "samples", 2)(float("nan")), "greater than 0"),
        (change("throughput", "data_wait")([]), "throughput.data_wait"),
        (change("usage", "kind")("tpu"), "usage.kind=tpu"),
        (change("usage", "ranks")([]), "usage.ranks must be those of 1x1"),
        (change("usage", "ranks", 0, "rank")(1), "usage.ranks must be those of 1x1"),
        (change("split", "step")(0.7), "the parts add up to 0.64 s, and the step took 0.7 s"),
        (change("split", "step")(float("nan")), "add up"),
        (change("split", "phases", "rest")(-0.01), "negative"),
        (change("split", "phases")({"forward": 0.641}), "split.phases must be data_wait, input"),
        (change("split", "steps")([]), "split.steps must be of 1 ranks"),
        (change("machine", "cores")("two"), "machine.cores"),
        (change("code", "clean")("perhaps"), "code.clean"),
    ],
)
def test_a_contradiction_is_refused(apply: Callable[[Any], None], message: str) -> None:
    content = a_record()
    apply(content)
    assert message in refusal(content)


def test_parts_that_miss_the_step_by_less_than_a_twentieth_are_taken() -> None:
    content = a_record()
    content["split"]["step"] = 0.64 * 1.05
    assert record.parse(content, HERE).split is not None
    content["split"]["step"] = 0.64 / 0.949
    refusal(content)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        record.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json: not a JSON file"):
        record.read(tmp_path / "bad.json")


def test_an_incomplete_record_is_not_written(tmp_path: Path) -> None:
    made = record.parse(a_record(), HERE)
    made.throughput.samples.pop()
    with pytest.raises(UserError, match="samples has 4 of 5"):
        record.write(tmp_path / "r.json", made)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=50, deadline=None)
@given(samples=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9))
def test_throughput_describes_its_samples(samples: list[float]) -> None:
    found = Throughput.of(samples, samples)
    assert sum(each <= found.median for each in samples) * 2 >= len(samples)
    assert sum(each >= found.median for each in samples) * 2 >= len(samples)
    assert (found.lowest, found.highest) == (min(samples), max(samples))


# --- what may be published


def test_nothing_names_this_machine() -> None:
    """All that a record takes from its surroundings, with everything that could be told."""
    environment = telemetry.environment(["secret-host"])
    environment["image"] = "registry.internal:5000/team/fleet-recipes:cpu"
    made = {
        "software": vars(record.software_of(environment)),
        "machine": str(record.machine_of(environment)),
        "config": record.published(
            {
                "dataset": {"path": "/home/someone/data/imagenet", "name": "imagenet"},
                "model": {"pretrained": "https://host.internal/w/r50.safetensors", "arguments": {}},
                "topology": {"master": "secret-host:1234", "node_rank": 3, "nodes": 2},
                "benchmark": {"output": "/home/someone/out"},
                "resume": "~/runs/a",
                "schedule": {"milestones": [30, 60]},
            }
        ),
        "command": record.published_command(
            [
                *("task=benchmark", "dataset.path=/home/someone/data/imagenet", "model=resnet50"),
                *("topology.master=secret-host", "topology.node_rank=0", "+topology.master=x"),
                *("hydra.run.dir=/home/someone/out", "benchmark.output=/x/y"),
            ]
        ),
    }
    text = json.dumps(made)
    for secret in ("secret-host", "registry", "internal", "someone", "/home", str(Path.home())):
        assert secret not in text, secret
    assert socket.gethostname() not in text
    assert f"/{getpass.getuser()}" not in text
    assert made["config"]["dataset"] == {"path": "…/imagenet", "name": "imagenet"}
    assert made["config"]["model"]["pretrained"] == "…/r50.safetensors"
    assert made["config"]["topology"] == {"master": None, "node_rank": None, "nodes": 2}
    assert made["config"]["schedule"] == {"milestones": [30, 60]}
    assert made["command"] == (
        "python train.py task=benchmark dataset.path=…/imagenet model=resnet50"
    )
    assert made["software"]["image"] == "fleet-recipes:cpu"


def test_a_relative_path_stays() -> None:
    for text in ("data/cifar10", "resnet18", "Linux-6.18-x86_64", "a:b", ""):
        assert record.last_part(text) == text
    for text in ("/data/x", "/data/x/", "~/x", "../../x", "http://h/x", "s3://b/x"):
        assert record.last_part(text) == "…/x"


@pytest.mark.parametrize(
    ("git", "image", "code"),
    [
        ({"commit": COMMIT, "dirty": False}, None, (COMMIT, True)),
        ({"commit": COMMIT, "dirty": True}, None, (COMMIT, False)),
        (None, {"image": {"revision": COMMIT}}, (COMMIT, True)),
        (None, {"image": {"revision": f"{COMMIT}-modified"}}, (COMMIT, False)),
        (None, {"image": {"revision": "unknown"}}, None),
        (None, "an-image", None),
        (None, None, None),
    ],
)
def test_the_commit_comes_from_git_or_from_the_image(
    git: Any, image: Any, code: tuple[str, bool] | None
) -> None:
    environment = {"git": git, "image": image}
    if code is None:
        with pytest.raises(UserError, match="which commit"):
            record.code_of(environment)
    else:
        found = record.code_of(environment)
        assert (found.commit, found.clean) == code


def test_an_image_is_known_by_the_head_of_its_description() -> None:
    head = {"variant": "cpu", "base": "registry.internal/debian:12", "revision": COMMIT}
    environment = telemetry.environment() | {"image": {"image": head, "debian": {"packages": {}}}}
    assert record.software_of(environment).image == head | {"base": "debian:12"}


# --- for people


def test_the_summary_has_the_figures() -> None:
    content = a_record(2, (10.0, 12.0, 11.0, 9.0, 13.0))
    text = record.summary(record.parse(content, HERE))
    assert "ResNet18 on digits, 1x2 (2 ranks), 64 images a step" in text
    assert "11.0 images/s (median of 5, 9.0 to 13.0)" in text
    assert "512 MiB" in text
    assert "0.90 cores a rank" in text
    assert re.search(r"data wait +10\.0 ms +2%", text)
    assert re.search(r"communication +40\.0 ms +6%", text)
    gpu = record.summary(record.parse(a_record(gpu=True, split=False), HERE))
    assert "90% of a device" in gpu
    assert "forward" not in gpu
    silent = a_record(2, gpu=True)
    for rank in silent["usage"]["ranks"]:
        rank["load"] = None
    assert "load     not known" in record.summary(record.parse(silent, HERE))


def test_a_record_survives_its_own_dataclass() -> None:
    content = a_record(3)
    before = copy.deepcopy(content)
    assert isinstance(record.parse(content, HERE), Record)
    assert content == before


@pytest.mark.parametrize("way", ["bytes", "values"])
def test_mutations_of_a_record_give_a_message_or_what_can_be_shown(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    chance, path = random.Random(0), tmp_path / "r.json"
    whole = a_record(2)
    other = record.parse(a_record(4), HERE)
    told = taken = 0
    for _ in range(150):
        data = dumped(whole)
        data = mutated(data, chance) if way == "bytes" else dumped(mutated_json(whole, chance))
        path.write_bytes(data)
        try:
            with little_memory(256):
                made = record.read(path)
        except UserError as error:
            told += len(error.message) < 2000 and error.message.isprintable()
            continue
        taken += 1
        record.summary(made)
        compare.differences(made, other)
        compare.describe_setup(made, other, ("a", "b"))
        compare.describe_speeds(made, other, ("a", "b"))
        report.render({"r": made, "other": other}, tmp_path)
    assert taken
    assert told + taken == 150


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${config.seed}", "???"])
def test_a_record_that_refers_elsewhere_is_refused(text: str) -> None:
    content = a_record()
    content["machine"]["cpu"] = text
    assert "refers to other values" in refusal(content)


@pytest.mark.parametrize("nodes", [0, -1, 10**9, "1", True, 1.0])
def test_a_topology_that_cannot_be_is_refused(nodes: Any) -> None:
    content = a_record()
    content["config"]["topology"]["nodes"] = nodes
    assert "config.topology.nodes is no count" in refusal(content)
