"""Whether the nodes reach each other's ports, and what their clocks say at one moment."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# What a node saw once it had everyone's facts: `clock`, its time() at that moment, and
# `unreached`, for each node why it could not be reached (None: it could, or it is the node itself).
View = dict[str, Any]

CONNECT_SECONDS = 3.0


@contextlib.contextmanager
def listening(node: int) -> Iterator[int]:
    """Answer on a free port, which is the context's value, with this node's number."""
    with socket.create_server(("", 0), backlog=128) as server:
        answering = threading.Thread(target=_answer, args=(server, _greeting(node)), daemon=True)
        answering.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread from `accept`
            answering.join()


def look(facts: Sequence[dict[str, Any]], node: int) -> View:
    """Note the time and try the other nodes' ports.

    Call it as soon as the exchange of facts has returned: it returns on all nodes at one moment,
    as nearly as messages travel equally fast to them (milliseconds), so the clocks can be compared.

    Args:
        facts: of all nodes, in order; their `address` and `port` are used.
        node: this node's number.
    """
    clock = time.time()
    return {"clock": clock, "unreached": reach(facts, node)}


def reach(facts: Sequence[dict[str, Any]], node: int) -> list[str | None]:
    """Why each node's port cannot be reached from here; None for those that answer, and itself."""

    def attempt(other: dict[str, Any]) -> str | None:
        if other["node"] == node:
            return None
        return _try(str(other["address"]), int(other["port"]), _greeting(other["node"]))

    with ThreadPoolExecutor(min(64, len(facts))) as pool:
        return list(pool.map(attempt, facts))


def _try(address: str, port: int, expected: bytes) -> str | None:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
            answer = b""
            while len(answer) < len(expected) and (part := connection.recv(len(expected))):
                answer += part
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None if answer == expected else "something else answers there"


def _greeting(node: int) -> bytes:
    return b"fleet-recipes node %d\n" % node


def _answer(server: socket.socket, greeting: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        with connection, contextlib.suppress(OSError):  # who has left needs no answer
            connection.settimeout(CONNECT_SECONDS)
            connection.sendall(greeting)
