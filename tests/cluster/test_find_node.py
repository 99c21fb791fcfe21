"""Who a node is and where node 0 is, from the configuration and every environment that tells."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.rendezvous import Coordinator, Member
from recipes.rendezvous.secret import Secret
from recipes.topology import (
    MASTER_VARIABLES,
    NODE_VARIABLES,
    SLURM_HOSTS_VARIABLES,
    NodeIdentity,
    find_node,
    first_host,
)

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{1,5})?", fullmatch=True)
PORTS = st.none() | st.integers(1, 65535)
NUMBERS = st.integers(0, 999)


@given(NAMES, PORTS, NUMBERS, st.dictionaries(st.sampled_from(NODE_VARIABLES), st.just("7")))
def test_the_configuration_wins(
    host: str, port: int | None, node: int, environment: dict[str, str]
) -> None:
    given_master = host if port is None else f"{host}:{port}"
    others = environment | dict.fromkeys(MASTER_VARIABLES, "other:1") | {"MASTER_PORT": "2"}
    assert find_node(given_master, node, others) == NodeIdentity(node, host, port)


@given(NAMES, PORTS, NUMBERS, st.sampled_from(NODE_VARIABLES), st.sampled_from(MASTER_VARIABLES))
def test_each_variable_is_enough(
    host: str, port: int | None, node: int, number: str, master: str
) -> None:
    environment = {number: str(node), master: host}
    if port is not None:
        environment["MASTER_PORT"] = str(port)
    assert find_node(None, None, environment) == NodeIdentity(node, host, port)


@given(st.permutations(NODE_VARIABLES))
def test_launchers_are_asked_before_batch_systems(names: list[str]) -> None:
    environment = {name: str(NODE_VARIABLES.index(name)) for name in names}
    found = find_node("host", None, environment)
    assert found is not None
    assert found.node == 0


def test_a_port_beside_a_name_that_has_one_does_not_count() -> None:
    environment = {"PADDLE_MASTER": "host:5", "MASTER_PORT": "6", "PADDLE_RANK": "1"}
    assert find_node(None, None, environment) == NodeIdentity(1, "host", 5)


def test_slurm_tells_both() -> None:
    environment = {
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[08-09]",
        "SLURM_JOB_NODELIST": "gpu[07-09]",
    }
    assert find_node(None, None, environment) == NodeIdentity(1, "gpu08", None)


@pytest.mark.parametrize("name", [*NODE_VARIABLES, *MASTER_VARIABLES, *SLURM_HOSTS_VARIABLES, ""])
def test_half_of_it_is_not_enough(name: str) -> None:
    assert find_node(None, None, {name: "1"} if name else {}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PADDLE_RANK": "one"}, "PADDLE_RANK=one is not the number of a node"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID=x is not the number of a node"),
        ({"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 is not the number of a node"),
        ({"SLURM_JOB_NODELIST": "["}, "SLURM_JOB_NODELIST=[ is not a list of hosts"),
        ({"SLURM_STEP_NODELIST": ","}, "SLURM_STEP_NODELIST=, is not a list of hosts"),
        ({"SLURM_JOB_NODELIST": "gpu[7-"}, "SLURM_JOB_NODELIST=gpu[7- is not a list of hosts"),
        ({"PADDLE_MASTER": ":5"}, "PADDLE_MASTER=:5 names no host"),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b names no host"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_ADDR and MASTER_PORT=a:x has no port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "-1"}, "=a:-1 has no port from 1 to 65535"),
    ],
)
def test_a_variable_that_tells_nothing_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_node(None, None, {"SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a"} | environment)


@pytest.mark.parametrize(
    "master",
    [
        *("host:-1", "host:0", "host:99999999", "host:port", "host:", "host:1:2", "host: 5"),
        *("", ":6170", "a..b", ".a", f"{'a' * 64}.org", ".".join(["a" * 60] * 5), "a b", "::1"),
        *("http://host", "[host]", "user@host", f"host:{'1' * 5000}"),
    ],
)
def test_a_master_that_is_none_is_named(master: str) -> None:
    with pytest.raises(ValueError, match=r"topology\.master=.* write HOST or HOST:PORT"):
        find_node(master, 0, {})


@given(st.text(max_size=12) | st.from_regex(r"[a-z.-]{0,9}:?[0-9-]{0,7}", fullmatch=True))
def test_any_text_is_a_master_or_is_refused(text: str) -> None:
    try:
        found = find_node(text, 0, {})
    except ValueError:  # its words are those of the test above
        return
    assert found is not None
    assert found.port is None or 0 < found.port < 65536
    found.master.encode("idna")  # as the resolver would


@given(st.text(st.sampled_from("ab1,[]-()x "), max_size=12))
def test_any_text_is_a_list_of_hosts_or_is_refused(text: str) -> None:
    try:
        host = first_host(text)
    except ValueError:
        return
    assert host
    assert not set(host) & set("[],")


def _fold(prefix: str, numbers: list[int], width: int) -> str:
    """Slurm's notation for hosts of one prefix, with runs as ranges."""
    parts: list[str] = []
    rest = numbers
    while rest:
        end = next((k for k in range(1, len(rest)) if rest[k] != rest[0] + k), len(rest))
        first, last = f"{rest[0]:0{width}d}", f"{rest[end - 1]:0{width}d}"
        parts.append(first if end == 1 else f"{first}-{last}")
        rest = rest[end:]
    return f"{prefix}[{','.join(parts)}]" if len(numbers) > 1 else f"{prefix}{numbers[0]:0{width}d}"


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]([a-z-]{0,6}[a-z])?", fullmatch=True),
            st.sets(st.integers(0, 9999), min_size=1, max_size=6).map(sorted),
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_first_host_of_any_slurm_list(groups: list[tuple[str, list[int], int]]) -> None:
    text = ",".join(_fold(*group) for group in groups)
    prefix, numbers, width = groups[0]
    assert first_host(text) == f"{prefix}{numbers[0]:0{width}d}"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("a,gpu[1-2]", "a"),
        ("rack[1-2]-gpu,b", "rack1-gpu"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("rack[1-2]n[03,05],b[1-2]", "rack1n03"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_node_0_learns_its_address_from_those_who_reach_it() -> None:
    """A name such as Debian's own for a machine may resolve to loopback on it, and only there."""
    known = Secret.of("the secret of this test")
    coordinator = Coordinator(3, 0, 20, known)
    coordinator.start()
    members = [Member(node, 3, 20, known) for node in range(3)]
    try:
        members[0].connect("127.0.0.1", coordinator.port, 5)
        time.sleep(0.3)
        assert coordinator.address is None
        members[1].connect("127.0.0.2", coordinator.port, 5)
        ends = time.monotonic() + 5
        while coordinator.address is None and time.monotonic() < ends:
            time.sleep(0.02)
        assert coordinator.address == "127.0.0.2"
    finally:
        for member in members:
            member.close()
        coordinator.stop()
