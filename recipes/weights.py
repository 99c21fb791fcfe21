"""Weights of a model in a file of others: safetensors, or the pickles that Paddle writes.

A pickle is a program: it can name any function to be called, and ask for any amount of memory.
`_Reader` runs that program with a few harmless functions of its own in place of those that it
names, so that not even NumPy's are called, and what it builds stays as large as the file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from recipes import tensors
from recipes.config import UserError

SUFFIXES = (".pdparams", ".safetensors")
_KINDS = "fib"  # of NumPy's dtypes: float, signed int, bool
_MOST_AXES = 32


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
        loaded = _Reader(data).load()
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
        weights[name] = inner.array() if isinstance(inner, _Array) else inner
    return weights


def _no_bytes() -> bytes:
    """How pickles below protocol 3 write empty bytes."""
    return b""


class _Type:
    """Stands for a `numpy.dtype`: its code, and its byte order once its state is set."""

    def __init__(self, code: Any) -> None:
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    def dtype(self) -> np.dtype[Any]:
        code = self._code
        if not (isinstance(code, str) and 2 <= len(code) <= 3 and code[0] in _KINDS + "u"):
            raise ValueError("it holds an array that is not of numbers")
        if self._order not in ("<", ">", "=", "|"):
            raise ValueError("it holds an array of an unknown byte order")
        return np.dtype(code).newbyteorder(self._order)  # type: ignore[arg-type]


class _Array:
    """Stands for a `numpy.ndarray`: what its state says, not looked at yet."""

    def __init__(self, *made_by: Any) -> None:
        self._made_by = made_by  # the class, a shape and a dtype that the state replaces
        self._state: Any = None

    @classmethod
    def of_buffer(cls, buffer: Any, kind: Any, shape: Any, order: Any) -> _Array:
        made = cls()
        made._state = (1, shape, kind, order == "F", buffer)
        return made

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def array(self) -> Any:
        """The array, without a copy of its numbers; the stand-in where it is none of numbers."""
        if self._state is None:
            raise ValueError("it holds an array without content")
        shape, kind, by_columns, content = self._state[-4:]
        if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray):
            return self
        if not isinstance(shape, tuple) or len(shape) > _MOST_AXES:
            raise ValueError("it holds an array without a shape")
        dtype = kind.dtype()
        if any(type(size) is not int or size < 0 for size in shape) or (
            math.prod(shape) * dtype.itemsize != len(content)
        ):
            raise ValueError("it holds an array whose shape does not fit its content")
        flat = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="), copy=False)
        return flat.reshape(shape, order="F" if by_columns else "C")


class _Reader(pickle._Unpickler):
    """Runs a pickle that consists of arrays, plain containers, numbers and text.

    The interpreter is Python's own in Python: the one in C takes gigabytes where a pickle numbers
    a note of its memo so, and lets it change the attributes of any object.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes) -> None:
        # Python 2 wrote some of the published files, hence the encoding.
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._left = len(data)
        made: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": self._mapping,
            "builtins.tuple": self._tuple,  # paddle.save writes a tensor as tuple((name, array))
            "__builtin__.tuple": self._tuple,
            "_codecs.encode": self._encode,
            "builtins.bytes": _no_bytes,
            "__builtin__.bytes": _no_bytes,
            "numpy.dtype": lambda code, *_: _Type(code),
            "numpy.ndarray": _Array,
        }
        for package in ("numpy.core", "numpy._core"):
            made[f"{package}.multiarray._reconstruct"] = _Array
            made[f"{package}.multiarray.scalar"] = _Array  # a number, which is no array of weights
            made[f"{package}.numeric._frombuffer"] = _Array.of_buffer
        self._made = made

    def find_class(self, module: str, name: str) -> Any:
        found = self._made.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which weights do not need")
        return found

    def load_build(self) -> None:
        """Set the state of a stand-in, and of nothing else."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        target = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(target, _Type | _Array):
            raise pickle.UnpicklingError(f"it sets the state of a {type(target).__name__}")
        target.__setstate__(state)

    def _spend(self, items: int) -> None:
        """Count what is copied: a sound file does not copy more than it holds."""
        self._left -= items
        if self._left < 0:
            raise pickle.UnpicklingError("it copies more than it holds")

    def _mapping(self, pairs: Iterable[Any] = ()) -> dict[Any, Any]:
        listed = list(pairs) if isinstance(pairs, list | tuple) else []
        self._spend(len(listed))
        return dict(listed)

    def _tuple(self, items: Any = ()) -> tuple[Any, ...]:
        self._spend(len(items))
        return tuple(items)

    def _encode(self, text: str, encoding: str) -> bytes:
        """How pickles below protocol 3 write bytes."""
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"it encodes bytes as {encoding}")
        self._spend(len(text))
        return text.encode("latin1")


_Reader.dispatch[pickle.BUILD[0]] = _Reader.load_build
