"""Weights of others: read right, or refused in one message, whatever is in the file."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from mutations import dumped, little_memory, mutated, mutated_json
from safetensors.numpy import save

from recipes.config import UserError
from recipes.weights import read_weights

MUTATIONS = 300
# What a file of a few kilobytes may take, the message's own making included.
MEBIBYTES = 256
VALUES = {
    "conv.weight": np.arange(24, dtype="float32").reshape(2, 3, 4),
    "bn.mean": np.ones(5, "float64"),
    "steps": np.array(7, "int64"),
}


def pickled(protocol: int) -> bytes:
    held = OrderedDict(**VALUES, **{"StructuredToParameterName@@": {"conv.weight": "conv2d_0.w_0"}})
    return pickle.dumps(held, protocol=protocol)


def check_read(path: Path) -> bool:
    """Whether it was read; what was read is arrays of numbers, no larger than the file."""
    size = path.stat().st_size
    refused, weights = None, {}
    try:
        with little_memory(MEBIBYTES):
            weights = read_weights(path)
    except UserError as error:
        refused = error.message
    if refused is not None:
        assert str(path) in refused
        assert refused.isprintable()
        assert len(refused) < 1000
        return False
    assert all(array.dtype.kind in "fib" for array in weights.values())
    assert all(array.nbytes <= 2 * size for array in weights.values())
    return True


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_mutated_pickles_are_read_or_refused(tmp_path: Path, protocol: int) -> None:
    chance = random.Random(protocol)
    whole, path = pickled(protocol), tmp_path / "w.pdparams"
    read = 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(whole, chance))
        read += check_read(path)
    assert 0 < read < MUTATIONS


def test_mutated_safetensors_are_read_or_refused(tmp_path: Path) -> None:
    chance = random.Random(1)
    whole, path = save(VALUES), tmp_path / "w.safetensors"
    length = struct.unpack("<Q", whole[:8])[0]
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    read = 0
    for number in range(2 * MUTATIONS):
        if number % 2:
            path.write_bytes(mutated(whole, chance))
        else:
            text = dumped(mutated_json(header, chance))
            path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        read += check_read(path)
    assert 0 < read < 2 * MUTATIONS


def test_bfloat16_is_read_by_value(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    spec = safetensors.TensorSpec(
        dtype="bfloat16", shape=[3], data_ptr=bits.ctypes.data, data_len=bits.nbytes
    )
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(safetensors.serialize({"w": spec})))
    found = read_weights(path)["w"]
    assert found.dtype == np.float32
    assert found[:2].tolist() == [1.0, -2.5]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "?", "<i8"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_any_layout_keeps_its_values(tmp_path: Path, protocol: int, dtype: str, order: Any) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4), dtype, order=order)
    path = tmp_path / "w.pdparams"
    path.write_bytes(pickle.dumps({"w": array, "empty": array[:0]}, protocol=protocol))
    found = read_weights(path)
    assert np.array_equal(found["w"], array)
    assert found["w"].dtype == array.dtype.newbyteorder("=")
    assert found["empty"].shape == (0, 4)


def long_binput(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


# Pickles of a few bytes that would take gigabytes, or change this very process.
BOMBS = {
    "a note numbered 2**31": b"\x80\x02}" + long_binput(2**31) + b".",
    "an array of 2**40 numbers": pickle.dumps({"w": np.ones(1)}, 2).replace(
        b"(K\x01K\x01\x85q", b"(K\x01\x8a\x06\x00\x00\x00\x00\x00\x01\x85q"
    ),
    "a text of 2**40 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "a frame of 2**40 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    "copies of copies": b"\x80\x02("
    + b"K\x00" * 1000
    + b"lq\x00c__builtin__\ntuple\nq\x01"
    + b"h\x01h\x00\x85R" * 20000
    + b".",
    "attributes of a class": b"\x80\x02ccollections\nOrderedDict\n}U\x04evilK\x01s\x86b.",
    "attributes of a function": b"\x80\x02c_codecs\nencode\nN}U\x08__code__K\x01s\x86b.",
    "a deep list": b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b".",
    "a number of 10,000 digits": b"I" + b"9" * 10_000 + b"\n.",
    "a terminal's escape": b"cos\x1b[31m\nsystem\x07\n.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_or_does_nothing(tmp_path: Path, bomb: str) -> None:
    path = tmp_path / "w.pdparams"
    path.write_bytes(BOMBS[bomb])
    # Python's interpreter keeps notes in a dictionary, and takes what there is of a frame.
    assert check_read(path) == (bomb in ("a note numbered 2**31", "a frame of 2**40 bytes"))


def test_the_large_array_is_one() -> None:
    assert BOMBS["an array of 2**40 numbers"] != pickle.dumps({"w": np.ones(1)}, 2)


def test_a_pickle_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = dict(vars(OrderedDict)), dict(vars(np.ndarray)), vars(io.BytesIO).keys()
    for bomb in BOMBS.values():
        path = tmp_path / "w.pdparams"
        path.write_bytes(bomb)
        check_read(path)
    assert before == (dict(vars(OrderedDict)), dict(vars(np.ndarray)), vars(io.BytesIO).keys())
