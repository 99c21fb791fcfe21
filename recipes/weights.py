"""Weights of a model in a file of others: safetensors, or the pickles that Paddle writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recipes import tensors
from recipes.config import UserError
from recipes.pickles import PickledArray, read_pickle

SUFFIXES = (".pdparams", ".safetensors")
_KINDS = "fib"  # of NumPy's dtypes: float, signed int, bool


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read named arrays from a .safetensors or .pdparams file, without running code from it.

    Bfloat16 values, which NumPy does not have, are given as float32.

    Raises:
        UserError: the file is damaged, or holds anything but arrays.
    """
    try:
        data = path.read_bytes()
        weights = _of_safetensors(data) if path.suffix == ".safetensors" else _of_pickle(data)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _unreadable(path, error) from error
    for name, value in weights.items():
        # Paddle's pickles hold bfloat16 as uint16, which would be read as other numbers.
        if not isinstance(value, np.ndarray) or value.dtype.kind not in _KINDS:
            raise _unreadable(path, f"its entry {name!r} is not an array of float, int or bool")
    return weights


def _unreadable(path: Path, reason: object) -> UserError:
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in f"{reason}")
    shown = text if len(text) < 300 else f"{text[:300]} …"
    return UserError(
        f"{path}: not readable as weights: {shown}",
        "fetch the file again, or give another one with model.pretrained",
    )


def _of_safetensors(data: bytes) -> dict[str, np.ndarray]:
    return {
        name: _from_bfloat16(array) if array.dtype == np.uint16 else array
        for name, array in tensors.decode(data).items()
    }


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _of_pickle(data: bytes) -> dict[str, Any]:
    try:
        # Python 2 wrote some of the published files, hence the encoding.
        loaded = read_pickle(data, "latin1")
    except EOFError:
        raise ValueError("Ran out of input: it ends too early") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not named arrays")
    # Paddle adds a table of parameter names, and may write a tensor as (name, array).
    loaded.pop("StructuredToParameterName@@", None)
    weights = {}
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise ValueError(f"it names an array by a {type(name).__name__}")
        inner = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        weights[name] = inner.array() if isinstance(inner, PickledArray) else inner
    return weights
