"""Named arrays as the bytes of a safetensors file, and back.

An array of dtype uint16 holds the bits of bfloat16 values: that is how Paddle hands bfloat16 to
NumPy (it has no uint16 of its own). Such arrays are stored as BF16.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import safetensors

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file.

    Raises:
        TypeError: an array's dtype cannot be stored.
    """
    # The library reads the arrays by address, so they are held until it is done. NumPy has no
    # bfloat16, hence no `safetensors.numpy.save`.
    held = {
        # `ascontiguousarray` would make a 0-d array 1-d.
        name: np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    allowed = {np.dtype(code) for code in DTYPES.values()}
    for name, array in held.items():
        if array.dtype not in allowed:
            raise TypeError(f"{name}: arrays of {array.dtype} cannot be stored")
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16" if array.dtype == np.uint16 else array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in held.items()
    }
    return bytes(safetensors.serialize(specs))


def decode(data: bytes) -> dict[str, np.ndarray]:
    """The arrays in the bytes of a safetensors file; they take as much memory as these.

    Raises:
        ValueError: the bytes are no safetensors file, or hold a dtype that is not in `DTYPES`.
    """
    try:
        views = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    arrays = {}
    for name, view in views:
        if view["dtype"] not in DTYPES:
            raise ValueError(f"{name} is of {view['dtype']}, which is not read here")
        arrays[name] = np.frombuffer(view["data"], DTYPES[view["dtype"]]).reshape(view["shape"])
    return arrays
