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
import errno
import json
import os
import queue
import selectors
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from recipes.config import UserError

DEFAULT_PORT = 6170
HEARTBEAT_SECONDS = 1.0
# A failure on one node makes others fail: the cause is picked once these have had time to report.
SETTLE_SECONDS = 2.0
_TICK_SECONDS = 0.1
_RECEIVE_BYTES = 1 << 16
# A member not heard of for so long has gone, if another one comes under its number.
_PRESENT_SECONDS = 5 * HEARTBEAT_SECONDS
_HELLO_BYTES = 1 << 12  # no hello is longer

# node, rank, type, message, remedy, traceback; `consequence`: it failed because another did;
# `fatal`: another attempt would fail as well.
Failure = dict[str, Any]

MEET = "meet"  # the exchange that every attempt begins with


class JobFailed(Exception):
    """The job has failed on some node.

    Attributes:
        failure: where and why, the same on every node.
        again: whether the nodes are to meet for another attempt.
    """

    def __init__(self, failure: Failure, *, again: bool) -> None:
        super().__init__(failure["message"])
        self.failure = failure
        self.again = again


def node_failure(
    node: int,
    kind: str,
    message: str,
    remedy: str,
    *,
    consequence: bool = False,
    fatal: bool = False,
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
        "fatal": fatal,
    }


@dataclass
class _Connection:
    """One member, as the coordinator sees it.

    Attributes:
        node: its number; None before its hello.
        session: which process it is; a connection made anew has the same.
        owed: how often it was told to try again and has not yet said that it does. What it says
            until then belongs to an attempt that is over.
    """

    socket: socket.socket
    address: str
    node: int | None = None
    session: str = ""
    host: str = ""
    owed: int = 0
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
        restarts: how many failures the job may have and be started again.

    Raises:
        UserError: the port is in use.
    """

    def __init__(self, nodes: int, port: int, silence: float, restarts: int = 0) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._nodes = nodes
        self._restarts = restarts
        self._met = False
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
        # Node 0's own, at which the others have reached it; None until one has. A name need not
        # resolve to it here: /etc/hosts often gives a machine's own name a loopback address.
        self.address: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[_Connection] = []
        self._exchanges: dict[str, _Exchange] = {}
        self._reports: list[Failure] = []
        self._settled_at: float | None = None
        self._over: Failure | None = None
        self._left: dict[int, str] = {}  # nodes that said goodbye, with their names
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stop`."""
        said_alive = 0.0
        while not self._stopping.is_set():
            self._serve(_TICK_SECONDS)
            now = time.monotonic()
            if now - said_alive >= HEARTBEAT_SECONDS:
                said_alive = now
                self._tell_all(type="alive")
            self._check_deadlines(now)
        self._serve(0)  # a last word of the node that stops it
        if self._reports and self._over is None:
            self._restarts = 0
            self._finish(self._cause())
        for connection in list(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def stop(self) -> None:
        """End the service.

        If a failure has been reported, the members are told; those that are still there lose
        contact.
        """
        self._stopping.set()
        self.join(5)

    def _serve(self, seconds: float) -> None:
        """Take in what arrives within some time."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:  # not dropped by what came before it
                self._receive(key.data)

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
        if connection.node is None and len(connection.buffer) > _HELLO_BYTES:
            self._drop(connection)
        for line in lines:
            if connection not in self._connections:
                return
            try:
                self._handle(connection, json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                # Not one of ours: a port scan, or another program. Of a member, it is the end.
                self._lost(connection, "it sent what is no message")

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "hello":
            self._welcome(connection, message)
        elif connection.node is None:
            self._drop(connection)
        elif kind == "bye":
            self._left[connection.node] = connection.name
            self._drop(connection)
        elif kind == "again":
            connection.owed = max(0, connection.owed - 1)
        elif connection.owed:
            pass
        elif kind == "exchange":
            self._gather(connection.node, message)
        elif kind == "stop":
            self._tell_all(type="stop", step=int(message["step"]))
        elif kind == "failed":
            self._report(message["failure"])

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
                fatal=True,
            )
        twin = next((each for each in self._connections if each.node == node), None)
        if twin is not None and twin.session == str(hello["session"]):
            self._lost(twin, "it lost contact, and has come back")
            twin = None
        elif twin is not None and time.monotonic() - twin.heard > _PRESENT_SECONDS:
            self._lost(twin, f"{connection.host} ({connection.address}) has come in its place")
            twin = None
        if problem is None and twin is not None:
            problem = node_failure(
                node,
                "DuplicateNode",
                f"two machines say topology.node_rank={node}: {twin.host} ({twin.address}) and "
                f"{connection.host} ({connection.address})",
                "give each machine its own topology.node_rank",
                fatal=True,
            )
        if problem is not None:
            connection.send(type="failed", failure=problem, again=False)
            self._drop(connection)
            if not self._met:  # a job that runs goes on: the stranger is the one that is wrong
                self._finish(problem)
            return
        connection.node, connection.session = node, str(hello["session"])
        reached_at = connection.socket.getsockname()[0]
        if node != 0 and (self.address is None or not reached_at.startswith("127.")):
            self.address = reached_at
        self._left.pop(node, None)
        if self._over is not None:
            connection.send(type="failed", failure=self._over, again=False)

    def _gather(self, node: int, message: dict[str, Any]) -> None:
        name, value = message["name"], message["value"]
        ends = time.monotonic() + float(message["deadline"])
        exchange = self._exchanges.setdefault(name, _Exchange(ends))
        exchange.values[node] = value
        if len(exchange.values) == self._nodes:
            values = [exchange.values[each] for each in range(self._nodes)]
            del self._exchanges[name]
            self._met = True
            self._tell_all(type="all", name=name, values=values)

    def _report(self, failure: Failure) -> None:
        if self._over is not None:
            return
        self._reports.append(failure)
        if self._settled_at is None:
            self._settled_at = time.monotonic() + SETTLE_SECONDS
            self._tell_all(type="who")  # a rank of some node may be what the others wait for

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
            elif name != MEET:  # there, a node that left may come again
                self._miss_those_who_left(exchange)
        if self._settled_at is not None and now > self._settled_at:
            self._finish(self._cause())

    def _cause(self) -> Failure:
        """The report that the others follow from."""
        own = [report for report in self._reports if not report["consequence"]]
        return (own or self._reports)[0]

    def _miss_those_who_left(self, exchange: _Exchange) -> None:
        """Report nodes that an exchange needs and that have said goodbye; once each."""
        for node in [node for node in self._left if node not in exchange.values]:
            self._report(
                node_failure(
                    node,
                    "NodeLost",
                    f"{self._left.pop(node)} left before the end",
                    "see what it says",
                )
            )

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
            fatal=True,
        )

    def _finish(self, failure: Failure) -> None:
        again = self._restarts > 0 and not failure["fatal"]
        self._restarts -= again
        self._settled_at = None
        self._reports.clear()
        self._over = None if again else failure
        # A node that came back is waiting for the next attempt already.
        waiting = self._exchanges.get(MEET) if again else None
        self._exchanges = {MEET: waiting} if waiting else {}
        early = waiting.values if waiting else {}
        for connection in list(self._connections):
            if connection.node is not None and connection.node not in early:
                connection.owed += again
                connection.send(type="failed", failure=failure, again=again)

    def _tell_all(self, **message: Any) -> None:
        for connection in list(self._connections):
            if connection.node is not None:
                connection.send(**message)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()


class Member:
    """This node's line to the coordinator.

    Args:
        node: this node's number.
        nodes: how many the job has.
        silence: seconds without a word after which the coordinator counts as lost.
    """

    def __init__(self, node: int, nodes: int, silence: float) -> None:
        self.node = node
        self._nodes = nodes
        self._silence = silence
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._failed: JobFailed | None = None
        self._session = uuid.uuid4().hex
        self.stop_step: int | None = None  # as some node has asked of all

    def connect(self, host: str, port: int, deadline: float) -> str:
        """Reach the coordinator and say hello.

        Args:
            host: a name or an address; names are resolved at each try.
            deadline: seconds to keep trying.

        Returns:
            This node's address on the way to the coordinator.

        Raises:
            UserError: the name does not resolve, or nobody answers.
        """
        if self._socket is not None:  # a connection that was lost
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        connection = self._reach(host, port, deadline)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._failed = None
        self._inbox = queue.Queue()
        self._send(
            type="hello",
            node=self.node,
            nodes=self._nodes,
            host=socket.gethostname(),
            session=self._session,
        )
        threading.Thread(target=self._listen, args=(connection, self._inbox), daemon=True).start()
        threading.Thread(target=self._beat, args=(connection,), daemon=True).start()
        return str(connection.getsockname()[0])

    def _reach(self, host: str, port: int, deadline: float) -> socket.socket:
        ends = time.monotonic() + deadline
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=2)
                if connection.getsockname() != connection.getpeername():
                    return connection
                # Where nobody listens on this machine, TCP can connect a port to itself.
                connection.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            except OSError as error:
                if time.monotonic() > ends:
                    raise self._unreachable(host, port, deadline, error) from None
                time.sleep(0.2)

    def exchange(self, name: str, value: Any, deadline: float) -> list[Any]:
        """Give a value and get every node's, by node number.

        Args:
            deadline: seconds that the coordinator waits for all nodes.

        Raises:
            JobFailed: a node did not come in time, or the job failed meanwhile.
        """
        self._send(type="exchange", name=name, value=value, deadline=deadline)
        while True:
            message = self._next(deadline + self._silence + 2 * SETTLE_SECONDS)
            if message is None:
                raise self._fail(self._lost_contact())
            if message["type"] == "all" and message["name"] == name:
                return list(message["values"])

    def report(self, failure: Failure) -> JobFailed:
        """Tell a failure, and wait for the cause that the coordinator picks.

        Returns:
            What every node is told; raise it.
        """
        self._send(type="failed", failure=failure)
        try:
            while self._next(self._silence + 3 * SETTLE_SECONDS) is not None:
                pass
        except JobFailed as told:
            # Without contact the coordinator's word is missing, and this node's own remains.
            return told if told.failure["type"] != "NoContact" else self._fail(failure)
        return self._fail(failure)

    def tell(self, failure: Failure) -> None:
        """Tell a failure without waiting."""
        self._send(type="failed", failure=failure)

    def check(self) -> bool:
        """Look whether something has been told, without waiting.

        Returns:
            Whether the coordinator asks for a rank of this node that holds up others.

        Raises:
            JobFailed: the job has failed on some node.
        """
        asked = False
        while (message := self._next(0)) is not None:
            asked |= message["type"] == "who"
            if message["type"] == "stop":
                self.stop_step = message["step"]
        return asked

    def stop_all(self, step: int) -> None:
        """Have every node's ranks stop once they have done `step` optimizer steps."""
        self._send(type="stop", step=step)

    def close(self) -> None:
        """Leave in good order."""
        if self._socket is not None:
            self._send(type="bye")
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    def _next(self, seconds: float) -> dict[str, Any] | None:
        if self._failed is not None:
            raise self._failed
        try:
            message = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if message["type"] == "failed":
            raise self._fail(message["failure"], again=message["again"])
        return message

    def _fail(self, failure: Failure, *, again: bool = False) -> JobFailed:
        self._failed = JobFailed(failure, again=again)
        return self._failed

    def expect_another_attempt(self) -> None:
        """Forget a failure that was told with `again`, and say so."""
        told, self._failed = self._failed, None
        if told is not None and told.again:
            self._send(type="again")

    def _listen(self, connection: socket.socket, inbox: queue.Queue[dict[str, Any]]) -> None:
        """In a thread: put what the coordinator says into the inbox, and notice its silence."""
        connection.settimeout(self._silence)
        buffer = b""
        while True:
            try:
                data = connection.recv(_RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                inbox.put({"type": "failed", "failure": self._lost_contact(), "again": False})
                return
            *lines, buffer = (buffer + data).split(b"\n")
            try:
                messages = [json.loads(line) for line in lines]
            except ValueError:  # not the coordinator, or its words cut short when it was frozen
                inbox.put({"type": "failed", "failure": self._lost_contact(), "again": False})
                return
            for message in messages:
                if message["type"] != "alive":
                    inbox.put(message)

    def _beat(self, connection: socket.socket) -> None:
        """In a thread: tell that this node is alive."""
        while connection is self._socket:
            self._send(type="alive")
            time.sleep(HEARTBEAT_SECONDS)

    def _send(self, **message: Any) -> None:
        # Who cannot be reached is found out by its silence.
        with self._sending, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _lost_contact(self) -> Failure:
        return node_failure(
            self.node,
            "NoContact",
            f"node {self.node} has lost contact with node 0: its connection broke, or nothing "
            f"was heard for {self._silence:.0f} s",
            "see whether node 0 runs and what it says; check the network between the two",
        )

    def _unreachable(self, host: str, port: int, deadline: float, error: OSError) -> UserError:
        if isinstance(error, socket.gaierror):
            return UserError(
                f"node {self.node}: topology.master={host} does not resolve to an address "
                f"(tried for {deadline:.0f} s): {error.strerror}",
                "give node 0's address, or a name that this machine can resolve",
            )
        return UserError(
            f"node {self.node}: node 0 at {host}:{port} did not answer within {deadline:.0f} s: "
            f"{error.strerror or error}",
            "start the command on node 0 (topology.node_rank=0), and see that this machine may "
            "connect to that port",
        )


class Alone:
    """The line of a job of one node: to nobody.

    Args:
        restarts: how many failures it may have and be started again.
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self.stop_step: int | None = None

    def stop_all(self, step: int) -> None:
        """There are no others."""

    def exchange(self, name: str, value: Any, deadline: float) -> list[Any]:
        """The own value."""
        del name, deadline
        return [value]

    def report(self, failure: Failure) -> JobFailed:
        """What to raise."""
        again = self._restarts > 0 and not failure["fatal"]
        self._restarts -= again
        return JobFailed(failure, again=again)

    def tell(self, failure: Failure) -> None:
        """There is nobody to tell."""

    def check(self) -> bool:
        """Nobody asks."""
        return False
