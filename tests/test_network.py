"""Which address, interface and variables a node uses."""

import socket
from collections import namedtuple

import psutil
import pytest

from recipes import network
from recipes.config import Config, NetworkConfig, UserError

Address = namedtuple("Address", "address")


def config(name: str = "auto", interface: str | None = None) -> Config:
    return Config(network=NetworkConfig(name, interface))


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "lo": [Address("127.0.0.1"), Address("::1")],
        "eth0": [Address("10.0.0.7")],
        "ib0": [Address("10.1.0.7")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)


def test_the_own_address_on_the_way_to_this_machine_is_loopback() -> None:
    assert network.own_address("127.0.0.1", 6170) == "127.0.0.1"
    assert network.own_address("localhost", 6170) == "127.0.0.1"


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(UserError) as caught:
        network.own_address("no-such-host.invalid", 6170)
    assert "topology.master=no-such-host.invalid does not resolve" in caught.value.message
    assert "every machine can resolve" in caught.value.remedy


def test_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unreachable)
    with pytest.raises(UserError, match=r"no route to topology.master=192.0.2.1: Network is unre"):
        network.own_address("192.0.2.1", 6170)


def test_the_interface_that_holds_an_address() -> None:
    assert network.interface_of("127.0.0.1") in psutil.net_if_addrs()
    assert network.interface_of("192.0.2.1") is None


@pytest.mark.usefixtures("two_cards")
def test_one_of_several_interfaces() -> None:
    assert [network.interface_of(a) for a in ("10.0.0.7", "10.1.0.7", "::1")] == [
        "eth0",
        "ib0",
        "lo",
    ]


def test_a_free_port_can_be_listened_on() -> None:
    port = network.free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert 0 < port < 65536


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("name", "infiniband"), [("auto", {}), ("ethernet", "1"), ("infiniband", "0")]
)
def test_both_libraries_take_the_route_to_node_0(name: str, infiniband: str) -> None:
    wanted = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    if infiniband:
        wanted["NCCL_IB_DISABLE"] = infiniband
    assert network.environment(config(name), "10.0.0.7", {}) == wanted


@pytest.mark.usefixtures("two_cards")
def test_a_chosen_interface_wins_over_the_route() -> None:
    wanted = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert network.environment(config(interface="ib0"), "10.0.0.7", {}) == wanted


@pytest.mark.usefixtures("two_cards")
def test_the_users_variables_win_one_by_one() -> None:
    present = {"NCCL_SOCKET_IFNAME": "^docker0", "NCCL_IB_DISABLE": "0", "HOME": "/root"}
    assert network.environment(config("ethernet", "ib0"), "10.0.0.7", present) == {
        "GLOO_SOCKET_IFNAME": "ib0"
    }


@pytest.mark.usefixtures("two_cards")
def test_one_node_keeps_gloo_on_the_loopback_and_leaves_nccl_alone() -> None:
    assert network.environment(config(), None, {}) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.usefixtures("two_cards")
def test_an_address_that_no_interface_has_sets_nothing() -> None:
    assert network.environment(config(), "192.0.2.1", {}) == {}


@pytest.mark.usefixtures("two_cards")
def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        network.environment(config(interface="eth9"), "10.0.0.7", {})
    assert f"network.interface=eth9 does not exist on {socket.gethostname()}" in str(caught.value)
    assert caught.value.remedy == "it has eth0, ib0, lo"


@pytest.mark.usefixtures("two_cards")
def test_a_variable_that_names_no_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError) as caught:
        network.environment(config(), None, {"GLOO_SOCKET_IFNAME": "eth9"})
    assert f"GLOO_SOCKET_IFNAME=eth9 does not exist on {socket.gethostname()}" in str(caught.value)
    assert caught.value.remedy == "it has eth0, ib0, lo"
    assert network.environment(config(), None, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize(
    ("text", "exists"),
    [
        *(("eth", True), ("=eth", False), ("=eth0", True), ("wlan,ib", True), ("eno", False)),
        ("^docker", True),
    ],
)
def test_nccls_selection_has_to_find_an_interface(
    text: str, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "uses_gpu", lambda _: True)
    present = {"NCCL_SOCKET_IFNAME": text}
    if exists:
        network.environment(config(), "10.0.0.7", present)
    else:
        with pytest.raises(UserError, match="NCCL_SOCKET_IFNAME"):
            network.environment(config(), "10.0.0.7", present)
    monkeypatch.setattr(network, "uses_gpu", lambda _: False)
    network.environment(config(), "10.0.0.7", present)  # on CPU nobody reads it


@pytest.mark.parametrize(
    ("master", "found", "address"),
    [
        ("10.9.8.7", ["10.9.8.7"], "10.9.8.7"),
        ("gpu1", ["10.9.8.7"], "10.9.8.7"),
        ("gpu1", ["10.9.8.7", "10.9.8.6"], ""),  # any of them may be meant
        ("elsewhere", ["10.0.0.1"], ""),  # such as the outside of a NAT
        ("gpu1", ["127.0.1.1"], ""),  # Debian's own name for itself
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.2", ["127.0.0.2"], "127.0.0.2"),
        ("unknown", [], ""),
    ],
)
def test_node_0_listens_where_the_others_come_if_that_is_known(
    master: str, found: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object) -> list[object]:
        assert host == master
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, kind, 0, "", (each, 0)) for each in found for kind in (1, 2)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    own = {"10.9.8.7": "eth0", "10.9.8.6": "eth1", "127.0.0.1": "lo"}
    monkeypatch.setattr(network, "interface_of", own.get)
    assert network.address_to_listen_on(master) == address
