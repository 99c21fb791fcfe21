"""The one source of randomness for samples: (seed, epoch, sample index)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SAMPLE_PURPOSE = 0x73616D706C65  # keeps this random stream apart from others of the same seed


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch, the same in any process.

    Philox is counter-based (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011):
    the seed makes the key, and epoch and index the high words of the counter, so no two samples
    ever share a random number. A new generator takes about 8 microseconds.

    Args:
        seed, epoch, index: each in [0, 2**64).
    """
    key = np.array([seed, _SAMPLE_PURPOSE], dtype=np.uint64)
    counter = np.array([0, 0, epoch, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def sample_uniforms(seed: int, epoch: int, indices: ArrayLike, count: int) -> NDArray[np.float64]:
    """``sample_rng(seed, epoch, index).random(count)`` for each index, the same bits.

    One generator is set back for each sample, at 1.5 microseconds. Computing Philox in NumPy for
    all samples at once takes 0.4 in batches of 512, but 2.3 in batches of 64.

    Args:
        seed, epoch: each in [0, 2**64).
        indices: integers[b] in [0, 2**64).
        count: numbers for each sample.

    Returns:
        float64[b, count] in [0, 1).
    """
    wanted = np.asarray(indices, dtype=np.uint64)
    uniforms = np.empty((len(wanted), count))
    generator = sample_rng(seed, epoch, 0)
    bits = generator.bit_generator
    state: Any = bits.state  # nothing drawn: as a new generator's, but for the counter
    counter = state["state"]["counter"]
    for row, index in zip(uniforms, wanted, strict=True):
        counter[3] = index
        bits.state = state
        generator.random(out=row)
    return uniforms
