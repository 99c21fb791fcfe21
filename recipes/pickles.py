"""Pickles of others that hold arrays.

A pickle is a program: it can name any function to be called, and ask for any amount of memory.
`read_pickle` runs that program with a few harmless functions of its own in place of those that it
names, so that not even NumPy's are called, and what it builds stays as large as the file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

_KINDS = "fibu"  # of NumPy's dtypes: float, signed int, bool, unsigned int
_MOST_AXES = 32


def _no_bytes() -> bytes:
    """How pickles below protocol 3 write empty bytes."""
    return b""


def _text(value: Any) -> Any:
    """What Python 2 wrote as a string, under any encoding."""
    return value.decode("latin1") if isinstance(value, bytes) else value


class _Type:
    """Stands for a `numpy.dtype`: its code, and its byte order once its state is set."""

    def __init__(self, code: Any) -> None:
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    def dtype(self) -> np.dtype[Any]:
        code, order = _text(self._code), _text(self._order)
        if not (isinstance(code, str) and 2 <= len(code) <= 3 and code[0] in _KINDS):
            raise ValueError("it holds an array that is not of numbers")
        if order not in ("<", ">", "=", "|"):
            raise ValueError("it holds an array of an unknown byte order")
        return np.dtype(code).newbyteorder(order)


class PickledArray:
    """Stands for a `numpy.ndarray`: what its state says, not looked at yet."""

    def __init__(self, *made_by: Any) -> None:
        self._made_by = made_by  # the class, a shape and a dtype that the state replaces
        self._state: Any = None

    @classmethod
    def of_buffer(cls, buffer: Any, kind: Any, shape: Any, order: Any) -> PickledArray:
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


def read_pickle(data: bytes, encoding: str) -> Any:
    """What a pickle builds; arrays are `PickledArray`.

    Args:
        encoding: of the strings that Python 2 wrote; "bytes" leaves them as they are.

    Raises:
        Exception: nearly any, where it is damaged or asks for what it should not.
    """
    return _Reader(data, encoding).load()


class _Reader(pickle._Unpickler):
    """Runs a pickle that consists of arrays, plain containers, numbers and text.

    The interpreter is Python's own in Python: the one in C takes gigabytes where a pickle numbers
    a note of its memo so, and lets it change the attributes of any object.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes, encoding: str) -> None:
        super().__init__(io.BytesIO(data), encoding=encoding)
        self._left = len(data)
        made: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": self._mapping,
            "builtins.tuple": self._tuple,  # paddle.save writes a tensor as tuple((name, array))
            "__builtin__.tuple": self._tuple,
            "_codecs.encode": self._encode,
            "builtins.bytes": _no_bytes,
            "__builtin__.bytes": _no_bytes,
            "numpy.dtype": lambda code, *_: _Type(code),
            "numpy.ndarray": PickledArray,
        }
        for package in ("numpy.core", "numpy._core"):
            made[f"{package}.multiarray._reconstruct"] = PickledArray
            made[f"{package}.multiarray.scalar"] = PickledArray  # a number
            made[f"{package}.numeric._frombuffer"] = PickledArray.of_buffer
        self._made = made

    def find_class(self, module: str, name: str) -> Any:
        found = self._made.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which arrays do not need")
        return found

    def load_build(self) -> None:
        """Set the state of a stand-in, and of nothing else."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        target = self.stack[-1]  # type: ignore[attr-defined]
        if not isinstance(target, _Type | PickledArray):
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
