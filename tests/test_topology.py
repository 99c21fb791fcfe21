"""Where a process stands in its job."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_launcher_environment import launched

from recipes.topology import Place, Topology, place_from_environment, threads_per_rank

SMALL = st.integers(1, 64)


@given(nodes=SMALL, devices=SMALL)
def test_topology(nodes: int, devices: int) -> None:
    shape = Topology(nodes, devices)
    assert shape.world_size == sum(1 for _ in range(nodes) for _ in range(devices))
    assert str(shape) == f"{nodes}x{devices}"
    assert shape == Topology(nodes, devices)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.nodes = 1  # type: ignore[misc]


@given(data=st.data(), nodes=SMALL, devices=SMALL)
def test_every_place_is_found_from_what_the_launcher_sets(
    data: st.DataObject, nodes: int, devices: int
) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    local_rank = data.draw(st.integers(0, devices - 1))
    rank = node * devices + local_rank
    place = place_from_environment(launched(nodes, devices, rank))
    assert place == Place(rank, nodes * devices, local_rank, node)
    assert place.tag == f"[node{node} rank{rank}]"


@pytest.mark.parametrize(
    "variables", [{}, {"PADDLE_TRAINER_ID": "0"}, {"PADDLE_LOCAL_RANK": "0", "HOME": "/"}]
)
def test_outside_of_a_launch_there_is_no_place(variables: dict[str, str]) -> None:
    assert place_from_environment(variables) is None


def test_what_is_not_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="PADDLE_TRAINER_ID=first should be a number"):
        place_from_environment(launched(1, 2, 0) | {"PADDLE_TRAINER_ID": "first"})


@given(cores=st.integers(1, 512), devices=SMALL)
def test_threads_fit_the_cores(cores: int, devices: int) -> None:
    threads = threads_per_rank(cores, devices)
    assert threads >= 1
    assert threads * devices <= max(cores, devices)
    assert (threads + 1) * devices > cores  # no core is left that each could have had
