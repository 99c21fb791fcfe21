"""Which cores a rank may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import affinity

CORES = st.sets(st.integers(0, 300), min_size=1)


@given(CORES, st.integers(1, 12))
def test_ranks_have_equally_many_cores_and_none_in_common(cores: set[int], devices: int) -> None:
    shares = [affinity.share(cores, rank, devices) for rank in range(devices)]
    if len(cores) < devices:
        assert shares == [cores] * devices
        return
    assert {len(each) for each in shares} == {len(cores) // devices}
    assert len(set().union(*shares)) == sum(map(len, shares))
    assert set().union(*shares) <= cores
    assert sorted(shares, key=min) == shares  # neighbours stay together


@given(st.sets(st.integers(0, 255)))
def test_a_mask_of_cores_is_read_bit_by_bit(cores: set[int]) -> None:
    mask = sum(1 << core for core in cores)
    words = [mask >> 64 * index & 2**64 - 1 for index in range(4)]
    assert affinity.cores_in(words) == cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("choice", "count"), [("split", 1), ("auto", 2), ("off", 2)])
def test_a_rank_is_kept_to_its_cores(choice: str, count: int) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    program = f"""
import os
from recipes import affinity
from recipes.config import Config, TopologyConfig
from recipes.topology import Place
os.sched_setaffinity(0, {{{first}, {second}}})
config = Config(topology=TopologyConfig(1, 2), affinity="{choice}", device="cpu")
affinity.bind(config, Place(1, 2, 1, 0))
print(*sorted(os.sched_getaffinity(0)))
"""
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert list(map(int, said.split())) == [first, second][-count:]
