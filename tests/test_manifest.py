"""A checkpoint's files, whatever is in them: right, or one message, from the folder alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import dumped, little_memory, mutated, mutated_json

from recipes import checkpoint, manifest
from recipes.config import UserError
from recipes.manifest import Damaged, Unreadable
from recipes.position import check_state, check_within, read_position
from recipes.snapshot import Snapshot

MUTATIONS = 150
MEBIBYTES = 256
EVALUATION = {
    **{"epoch": 0, "step": 4, "top1": 0.5, "top5": 1.0, "loss": 0.7, "samples": 360},
}
STATE: dict[str, Any] = {
    "step": 6,
    "position": {
        **{"step": 6, "epoch": 1, "step_in_epoch": 2, "samples": 600},
        **{"final": EVALUATION, "best": EVALUATION, "since_event": [3.0, 90]},
    },
    "random": {"seed": 0},
    "identity": {"model": "ResNet18", "num_classes": 10, "train_size": 400},
    "schedule": {"last_epoch": 6, "last_lr": 0.1},
    "loss_scaler": {
        **{"scale": [1024.0], "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000},
        **{"decr_every_n_nan_or_inf": 1, "incr_count": 7, "decr_count": 0},
        "use_dynamic_loss_scaling": True,
    },
    "optimizer": {"type": "Momentum"},
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    snapshot = Snapshot(
        {"a.weight": np.ones((3, 2), np.float32), "b": np.array(2, np.int64)},
        {"a.weight/velocity": np.ones((3, 2), np.float32)},
        STATE,
        {"running_statistics": np.ones((2, 4), np.float32)},
    )
    return checkpoint.save(tmp_path / "checkpoints", snapshot, best=False, keep=3)


def read(path: Path) -> str | None:
    """The message that a checkpoint is refused with; None for a good one."""
    refused = None
    try:
        with little_memory(MEBIBYTES):
            state = checkpoint.load(path).state
            check_state(state)
            check_within(read_position(state), 400, 100)
    except UserError as error:
        refused = error.message
    except ValueError as error:  # of `check_state`, which callers put in a message
        refused = f"checkpoint {path}: {error}"
    if refused is not None:
        assert str(path) in refused
        assert refused.isprintable()
        assert len(refused) < 1000
    return refused


def signed(path: Path, name: str, data: bytes) -> None:
    """Change a file of a checkpoint, with checksums that are right."""
    files = {each: (path / each).read_bytes() for each in (*manifest.FILES, manifest.RANKS)}
    files[name] = data
    (path / name).write_bytes(data)
    (path / manifest.MANIFEST).write_bytes(manifest.manifest_of(files, 1))


def signed_manifest(path: Path, content: Any) -> None:
    """Write a manifest whose own checksum is right, whatever it says."""
    if isinstance(content, dict):
        content.pop("sha256", None)
        try:
            own = hashlib.sha256(manifest._canonical(content)).hexdigest()
        except TypeError:  # keys of several kinds
            own = ""
        content = {**content, "sha256": own}
    data = json.dumps(content, indent=1, sort_keys=True) + "\n"
    (path / manifest.MANIFEST).write_text(data)


FILES = (*manifest.FILES, manifest.RANKS, manifest.MANIFEST)


@pytest.mark.parametrize("name", FILES)
def test_random_damage_is_told_or_harmless(whole: Path, name: str) -> None:
    chance = random.Random(name)
    original = (whole / name).read_bytes()
    for _ in range(MUTATIONS):
        data = mutated(original, chance)
        (whole / name).write_bytes(data)
        assert (read(whole) is None) == (data == original)


@pytest.mark.parametrize("name", FILES[:-1])
def test_random_damage_with_right_checksums_is_told_or_harmless(whole: Path, name: str) -> None:
    chance = random.Random(name)
    original = (whole / name).read_bytes()
    refused = 0
    for _ in range(MUTATIONS):
        signed(whole, name, mutated(original, chance))
        refused += read(whole) is not None
    assert refused > MUTATIONS // 4


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", manifest.RANKS])
def test_forged_headers_are_told_or_harmless(whole: Path, name: str) -> None:
    chance = random.Random(name)
    data = (whole / name).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    refused = 0
    for _ in range(MUTATIONS):
        text = dumped(mutated_json(header, chance))
        signed(whole, name, struct.pack("<Q", len(text)) + text + body)
        refused += read(whole) is not None
    assert refused > MUTATIONS // 2


def test_forged_states_are_told_or_harmless(whole: Path) -> None:
    chance = random.Random(0)
    refused = 0
    for _ in range(3 * MUTATIONS):
        signed(whole, manifest.STATE, dumped(mutated_json(STATE, chance)))
        refused += read(whole) is not None
    assert MUTATIONS < refused < 3 * MUTATIONS


def test_forged_manifests_are_told_or_harmless(whole: Path) -> None:
    chance = random.Random(0)
    original = json.loads((whole / manifest.MANIFEST).read_bytes())
    refused = 0
    for _ in range(3 * MUTATIONS):
        signed_manifest(whole, mutated_json(original, chance))
        refused += read(whole) is not None
    assert MUTATIONS < refused < 3 * MUTATIONS


def every_key(content: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*prefix, key)
            yield from every_key(value, (*prefix, key))


# What nothing relies on: for a person to read, or absent in older checkpoints.
OPTIONAL = ("random", "schedule", "identity", "final", "best", "since_event", "top5")


@pytest.mark.parametrize("key", list(every_key(STATE)), ids=".".join)
def test_a_key_that_is_missing_or_of_another_kind_is_named(
    whole: Path, key: tuple[str, ...]
) -> None:
    free = key[0] in ("random", "schedule") or (key[0] == "identity" and len(key) > 1)
    value: Any
    for value in (None, "x", [], {}, -1, 10**30, float("nan")):
        state = json.loads(json.dumps(STATE))
        holder = state
        for each in key[:-1]:
            holder = holder[each]
        if value is None:
            del holder[key[-1]]
        else:
            holder[key[-1]] = value
        signed(whole, manifest.STATE, dumped(state))
        refused = read(whole)
        may_be = (
            free
            or (key[-1] in OPTIONAL and value is None)
            or (key == ("identity",) and value == {})
            or (key == ("loss_scaler",) and value == {})
            or (key[-1] == "scale" and value == 10**30)
            or (key == ("optimizer", "type") and value == "x")  # told where it is compared
            or (key[-1] in ("top1", "top5", "loss") and value != value)
        )
        assert may_be or (refused is not None and key[-1] in refused), (key, value, refused)


def test_a_position_outside_its_epoch_is_told(whole: Path) -> None:
    for change in ({"step_in_epoch": 1000}, {"epoch": 7}, {"step": 5}, {"step_in_epoch": 4}):
        state = {**STATE, "position": {**STATE["position"], **change}}
        state["step"] = state["position"]["step"]
        signed(whole, manifest.STATE, dumped(state))
        assert "position.step" in (read(whole) or "")


def replace_by_link(path: Path, other: Path) -> None:
    path.rename(other)
    path.symlink_to(other)


def replace_by_pipe(path: Path, other: Path) -> None:
    path.rename(other)
    os.mkfifo(path)


def replace_by_folder(path: Path, other: Path) -> None:
    path.rename(other)
    path.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [replace_by_link, replace_by_pipe, replace_by_folder])
def test_what_is_no_file_of_the_folder_is_not_read(
    whole: Path, tmp_path: Path, name: str, change: Callable[[Path, Path], None]
) -> None:
    change(whole / name, tmp_path / "outside")
    with pytest.raises(Unreadable, match=f"{name}: .*(it is a link|it is no regular file)"):
        checkpoint.load(whole)
    with pytest.raises(UserError, match=name):
        checkpoint.newest(whole.parent)
    assert not manifest.can_be_read(whole)


def test_a_file_that_is_huge_and_empty_takes_no_memory(whole: Path) -> None:
    """A sparse file of a terabyte; its manifest says so, and cannot know its checksum."""
    huge = 1 << 40
    with (whole / manifest.MODEL).open("r+b") as file:
        file.truncate(huge)
    assert "has 1099511627776 bytes" in (read(whole) or "")
    content = json.loads((whole / manifest.MANIFEST).read_bytes())
    content["files"][manifest.MODEL]["size"] = huge
    signed_manifest(whole, content)
    assert "memory" in (read(whole) or "")


@pytest.mark.parametrize("opening", ["[", '{"a":', "1", '"'])
def test_deep_and_long_json_is_told(whole: Path, opening: str) -> None:
    data = opening.encode() * 200_000
    signed(whole, manifest.STATE, data)
    assert "state.json" in (read(whole) or "")
    (whole / manifest.MANIFEST).write_bytes(data)
    assert "manifest.json" in (read(whole) or "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"format": 2}, r"format 2, this version reads format 1\n"),
        ({"format": "1"}, r"format '1', this version reads format 1\n"),
        ({"format": "\x1b[31m"}, r"format '\\x1b\[31m', this"),
        ({"sequence": "1"}, "sequence is not a number"),
        ({"sequence": True}, "sequence is not a number"),
        ({"files": []}, "files is missing"),
        ({"files": {}}, r"files.model.safetensors is missing"),
        ({"files": {name: {"size": 1} for name in manifest.FILES}}, "lacks its size or its sha"),
    ],
)
def test_a_manifest_of_another_version_is_not_called_damaged(
    whole: Path, content: dict[str, Any], said: str
) -> None:
    original = json.loads((whole / manifest.MANIFEST).read_bytes())
    signed_manifest(whole, {**original, **content})
    with pytest.raises(Unreadable, match=said) as error:
        checkpoint.load(whole)
    assert "resume=" in error.value.remedy
    # A newer version may sum itself up in another way.
    altered = {**original, "format": 7}
    (whole / manifest.MANIFEST).write_text(json.dumps(altered))
    with pytest.raises(Unreadable, match="format 7, this version reads format 1, or it was alt"):
        checkpoint.load(whole)


def test_bytes_that_differ_are_damage(whole: Path) -> None:
    data = (whole / manifest.MODEL).read_bytes()
    (whole / manifest.MODEL).write_bytes(data[:-1] + b"\7")
    with pytest.raises(Damaged):
        checkpoint.load(whole)
    shutil.rmtree(whole)
    with pytest.raises(UserError, match="a link to nothing"):
        checkpoint.load(whole)
