"""Comparing what snapshots hold, for tests."""

from __future__ import annotations

import numpy as np


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether two mappings hold the same arrays, bit by bit."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and left[key].tobytes() == right[key].tobytes()
        for key in left
    )
