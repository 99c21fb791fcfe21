"""Which address and interface a node uses to talk to the others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from recipes.config import Config, UserError, uses_gpu

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`.

    Raises:
        UserError: the name does not resolve.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: it asks the kernel for the route
            return str(probe.getsockname()[0])
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"topology.master={host} does not resolve to an address: {reason}",
            "give node 0's address, or a name that every machine can resolve",
        ) from None
    except OSError as error:
        raise UserError(f"there is no route to topology.master={host}: {error.strerror}") from None


def address_to_listen_on(master: str) -> str:
    """The one address of this machine, node 0, by which the others come; empty where that is not
    known: then it is any of them.

    Args:
        master: the name or address that leads to node 0.
    """
    try:
        found = {each[4][0] for each in socket.getaddrinfo(master, None, socket.AF_INET)}
    except (OSError, UnicodeError):
        return ""
    if len(found) != 1:
        return ""
    address = str(found.pop())
    if ipaddress.ip_address(address).is_loopback:
        # A name that leads to loopback here may lead here from elsewhere.
        return address if master in (address, "localhost") else ""
    return address if interface_of(address) is not None else ""


def interface_of(address: str) -> str | None:
    """The name of the interface that holds an address; None where no one does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return None


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def environment(config: Config, address: str | None, present: Mapping[str, str]) -> dict[str, str]:
    """Variables that lead NCCL and gloo to the right network; the user's own win.

    Args:
        address: this node's on the way to node 0; None for a job of one node.
        present: the environment as it is.

    Raises:
        UserError: ``network.interface``, or what one of the user's variables names, does not
            exist here.
    """
    interface = config.network.interface
    if interface is not None:
        _check_interface("network.interface", interface)
    elif present.get(_GLOO):
        _check_interface(_GLOO, present[_GLOO])
    if uses_gpu(config) and present.get(_NCCL):
        _check_selection(_NCCL, present[_NCCL])
    if interface is None:
        interface = interface_of(address or "127.0.0.1")
    wanted = {}
    if interface is not None:
        # One node: gloo would else ask for the host's name, which need not resolve.
        wanted[_GLOO] = interface
        if address is not None:
            wanted[_NCCL] = interface
    if config.network.name == "ethernet":
        wanted["NCCL_IB_DISABLE"] = "1"
    elif config.network.name == "infiniband":
        wanted["NCCL_IB_DISABLE"] = "0"
    return {name: value for name, value in wanted.items() if name not in present}


def _check_interface(key: str, name: str) -> None:
    if name not in psutil.net_if_addrs():
        raise _no_interface(key, name)


def _check_selection(key: str, text: str) -> None:
    """NCCL's: beginnings of names, after ``=`` whole names, after ``^`` those not to be taken."""
    if text.startswith("^"):
        return
    exact, wanted = text.startswith("="), text.removeprefix("=").split(",")
    names = [*psutil.net_if_addrs()]
    if not any(
        name == each if exact else name.startswith(each) for name in names for each in wanted
    ):
        raise _no_interface(key, text)


def _no_interface(key: str, name: str) -> UserError:
    return UserError(
        f"{key}={name} does not exist on {socket.gethostname()}",
        f"it has {', '.join(sorted(psutil.net_if_addrs()))}",
    )
