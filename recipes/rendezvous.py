"""Where the nodes of a job meet: a line of JSON over TCP, with a deadline on every wait.

The parent on node 0 runs a `Coordinator`; the parent on every node, node 0 included, is a `Member`.
Members exchange values (each gives one, all get all), tell that they are alive, and report
failures. The coordinator notices who is missing, who has gone silent, and which failure came first,
and tells everyone: so each node ends, and can say why.

`paddle.distributed.launch` has a rendezvous of its own, but that one waits without end and tells
no names; it starts once the nodes have met here.
"""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from recipes.config import UserError

DEFAULT_PORT = 6170
HEARTBEAT_SECONDS = 1.0
# A failure on one node makes others fail: the cause is picked once these have had time to report.
SETTLE_SECONDS = 2.0
_TICK_SECONDS = 0.1
_RECEIVE_BYTES = 1 << 16

Failure = dict[str, Any]  # node, rank, type, message, remedy, traceback, consequence


class JobFailed(Exception):
    """The job has failed on some node; `failure` says where and why, the same on every node."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure["message"])
        self.failure = failure


def node_failure(
    node: int, kind: str, message: str, remedy: str, *, consequence: bool = False
) -> Failure:
    """A failure of a whole node, in the form of a rank's report."""
    return {
        "node": node,
        "rank": None,
        "type": kind,
        "message": message,
        "remedy": remedy,
        "traceback": None,
        "consequence": consequence,
    }


@dataclass
class _Connection:
    """One member, as the coordinator sees it."""

    socket: socket.socket
    address: str
    node: int | None = None
    host: str = ""
    buffer: bytes = b""
    heard: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host}, {self.address})"

    def send(self, **message: Any) -> None:
        # A member that takes nothing in is silent as well, and found by that.
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class _Exchange:
    """A value from each node, gathered until all are there."""

    ends: float
    values: dict[int, Any] = field(default_factory=dict)


class Coordinator(threading.Thread):
    """Serves the members of one job, on node 0.

    Args:
        nodes: how many there are.
        port: to listen on; 0 takes a free one (see `port`).
        silence: seconds without a word after which a node counts as lost.

    Raises:
        UserError: the port is in use.
    """

    def __init__(self, nodes: int, port: int, silence: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._nodes = nodes
        self._silence = silence
        try:
            self._listener = socket.create_server(("", port), backlog=128)
        except OSError as error:
            raise UserError(
                f"node 0: cannot listen on port {port}: {error.strerror}",
                "another run may use it: end that one, or give all nodes "
                f"topology.master=HOST:{port + 1}",
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[_Connection] = []
        self._exchanges: dict[str, _Exchange] = {}
        self._reports: list[Failure] = []
        self._settled_at: float | None = None
        self._over: Failure | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stop`."""
        said_alive = 0.0
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            now = time.monotonic()
            if now - said_alive >= HEARTBEAT_SECONDS:
                said_alive = now
                self._tell_all(type="alive")
            self._check_deadlines(now)
        for connection in list(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def stop(self) -> None:
        """End the service; members that are still there lose contact."""
        self._stopping.set()
        self.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, address = self._listener.accept()
            accepted.settimeout(HEARTBEAT_SECONDS)
            connection = _Connection(accepted, address[0])
            self._connections.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._lost(connection, "its connection broke")
            return
        connection.heard = time.monotonic()
        *lines, connection.buffer = (connection.buffer + data).split(b"\n")
        for line in lines:
            try:
                self._handle(connection, json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._drop(connection)  # not one of ours: a port scan, or another program
                return

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "hello":
            self._welcome(connection, message)
        elif connection.node is None:
            self._drop(connection)
        elif kind == "exchange":
            self._gather(connection.node, message)
        elif kind == "failed":
            self._report(message["failure"])
        elif kind == "bye":
            self._drop(connection)

    def _welcome(self, connection: _Connection, hello: dict[str, Any]) -> None:
        node, nodes = int(hello["node"]), int(hello["nodes"])
        connection.host = str(hello["host"])
        problem = None
        if nodes != self._nodes or not 0 <= node < self._nodes:
            problem = node_failure(
                node,
                "WrongNodeCount",
                f"{connection.host} ({connection.address}) came as node {node} of {nodes}, "
                f"but node 0's topology has {self._nodes} nodes",
                "give every node the same topology, and node_rank 0 to nodes-1",
            )
        twin = next((each for each in self._connections if each.node == node), None)
        if problem is None and twin is not None:
            problem = node_failure(
                node,
                "DuplicateNode",
                f"two machines say topology.node_rank={node}: {twin.host} ({twin.address}) and "
                f"{connection.host} ({connection.address})",
                "give each machine its own topology.node_rank",
            )
        if problem is not None:
            connection.send(type="failed", failure=problem)
            if "facts" not in self._exchanges or self._exchanges["facts"].values:
                self._finish(problem)
            self._drop(connection)
            return
        connection.node = node
        if self._over is not None:
            connection.send(type="failed", failure=self._over)

    def _gather(self, node: int, message: dict[str, Any]) -> None:
        name = message["name"]
        ends = time.monotonic() + float(message["deadline"])
        exchange = self._exchanges.setdefault(name, _Exchange(ends))
        exchange.values[node] = message["value"]
        if len(exchange.values) == self._nodes:
            values = [exchange.values[each] for each in range(self._nodes)]
            del self._exchanges[name]
            self._tell_all(type="all", name=name, values=values)

    def _report(self, failure: Failure) -> None:
        self._reports.append(failure)
        if self._settled_at is None:
            self._settled_at = time.monotonic() + SETTLE_SECONDS

    def _lost(self, connection: _Connection, how: str) -> None:
        node, name = connection.node, connection.name
        self._drop(connection)
        if node is not None:
            self._report(
                node_failure(
                    node,
                    "NodeLost",
                    f"{name} is lost: {how}",
                    "see whether the machine runs and its network reaches node 0",
                )
            )

    def _check_deadlines(self, now: float) -> None:
        for connection in list(self._connections):
            if now - connection.heard > self._silence:
                self._lost(connection, f"nothing was heard of it for {self._silence:.0f} s")
        for name, exchange in list(self._exchanges.items()):
            if now > exchange.ends:
                del self._exchanges[name]
                self._report(self._missing(name, exchange))
        if self._settled_at is not None and now > self._settled_at:
            own = [report for report in self._reports if not report["consequence"]]
            self._finish((own or self._reports)[0])

    def _missing(self, name: str, exchange: _Exchange) -> Failure:
        missing = [node for node in range(self._nodes) if node not in exchange.values]
        present = {c.node for c in self._connections if c.node is not None}
        absent = [node for node in missing if node not in present]
        who = ", ".join(f"node {node}" for node in absent or missing)
        what = "did not arrive" if absent else f"did not come to '{name}'"
        here = sorted(c.name for c in self._connections if c.node is not None)
        return node_failure(
            (absent or missing)[0],
            "NodeMissing",
            f"{who} of {self._nodes} {what} in time; here: {', '.join(here)}",
            "start the same command there with its topology.node_rank, and see that the machine "
            "reaches node 0; deadlines.start=… waits longer",
        )

    def _finish(self, failure: Failure) -> None:
        self._settled_at = None
        self._reports.clear()
        self._exchanges.clear()
        self._over = failure
        self._tell_all(type="failed", failure=failure)

    def reopen(self) -> None:
        """Forget the failure, for another attempt."""
        self._over = None

    def _tell_all(self, **message: Any) -> None:
        for connection in list(self._connections):
            if connection.node is not None:
                connection.send(**message)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
