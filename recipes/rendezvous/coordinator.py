"""The service on node 0 through which the nodes of a job meet."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipes.config import UserError
from recipes.forms import Malformed
from recipes.rendezvous import timing
from recipes.rendezvous.authentication import Forged, OtherSecret, Unproven
from recipes.rendezvous.connections import Connection
from recipes.rendezvous.failures import Failure, node_failure
from recipes.rendezvous.lines import TooLong
from recipes.rendezvous.messages import MEET, MESSAGE_BYTES, encode
from recipes.rendezvous.refusals import Refusals
from recipes.rendezvous.secret import VARIABLE, Secret

MOST_GUESTS = 128  # connections that have not said hello; the oldest makes room for another
_MOST_EXCHANGES = 16  # open at a time; the nodes go through them one after the other
_ACCEPTED_AT_ONCE = 64
_LAST_WORDS_SECONDS = 1.0


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
        secret: of the job; who does not know it is dropped, and the job goes on.
        restarts: how many failures the job may have and be started again.
        address: to listen on; empty: all of this machine's.

    Raises:
        UserError: the port is in use.
    """

    def __init__(
        self,
        nodes: int,
        port: int,
        silence: float,
        secret: Secret,
        restarts: int = 0,
        address: str = "",
    ) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._nodes = nodes
        self._secret = secret
        self._restarts = restarts
        self._met = False
        self._silence = silence
        try:
            self._listener = socket.create_server((address, port), backlog=128)
        except OSError as error:
            raise UserError(
                f"node 0: cannot listen on port {port}: {os.strerror(error.errno or 0)}",
                "another run may use it: end that one, or give all nodes "
                f"topology.master=HOST:{port + 1}",
            ) from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.listens_at = address or "127.0.0.1"  # for the member on this machine
        # Node 0's own, at which the others have reached it; None until one has. A name need not
        # resolve to it here: /etc/hosts often gives a machine's own name a loopback address.
        self.address: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[Connection, None] = {}  # before their hello, the oldest first
        self._members: dict[int, Connection] = {}
        self._refusals = Refusals()
        self._exchanges: dict[str, _Exchange] = {}
        self._cause: Failure | None = None
        self._settled_at: float | None = None
        self._over: Failure | None = None
        self._left: dict[int, str] = {}  # nodes that said goodbye, with their names
        self._stopping = threading.Event()
        self._answers: dict[str, Callable[[Connection, dict[str, Any]], None]] = {
            "alive": lambda _connection, _message: None,
            "bye": self._say_goodbye,
            "again": self._expect_again,
            "exchange": self._gather,
            "stop": self._pass_on_stop,
            "failed": lambda _connection, message: self._report(message["failure"]),
        }

    def run(self) -> None:
        """Serve until `stop`."""
        said_alive = 0.0
        while not self._stopping.is_set():
            self._serve(timing.TICK_SECONDS)
            now = time.monotonic()
            if now - said_alive >= timing.HEARTBEAT_SECONDS:
                said_alive = now
                self._tell_all(type="alive")
            self._check_deadlines(now)
        self._serve(0)  # a last word of the node that stops it
        if self._cause is not None and self._over is None:
            self._restarts = 0
            self._finish(self._cause)
        self._let_last_words_go()
        for connection in [*self._members.values(), *self._guests]:
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

    # --- connections ----------------------------------------------------------------------------

    def _serve(self, seconds: float) -> None:
        """Take in what arrives within some time, and send what can be sent."""
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
                continue
            connection = key.data
            if events & selectors.EVENT_WRITE and not connection.gone:
                self._send(connection)
            if events & selectors.EVENT_READ and not connection.gone:
                self._receive(connection)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no descriptor is left; who waits is taken once there is one
                if not self._make_room("this process may open no more files"):
                    time.sleep(timing.TICK_SECONDS)
                return
            if len(self._guests) >= MOST_GUESTS:
                self._make_room("others have come since, and it has said nothing")
            accepted.setblocking(False)
            connection = Connection(accepted, address[0], self._secret)
            self._guests[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._send(connection)

    def _make_room(self, why: str) -> bool:
        """Drop the oldest of those that have not said hello; whether there was one."""
        oldest = next(iter(self._guests), None)
        if oldest is not None:
            self._refuse(oldest, why)
        return oldest is not None

    def _receive(self, connection: Connection) -> None:
        if not connection.receive():
            self._lost(connection, "its connection broke")
            return
        try:
            for message in connection.messages():
                self._handle(connection, message)
        except OtherSecret as fault:
            self._refuse(connection, f"{fault} ({VARIABLE})", stranger=True)
        except Unproven as fault:
            self._refuse(connection, str(fault))
        except (Malformed, Forged, TooLong) as fault:
            what = f"it sent what is no message{f' ({fault})' if str(fault) else ''}"
            if connection.node is None:
                self._refuse(connection, what)
            else:
                self._lost(connection, what)
        if not connection.gone:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        """Send what can be sent now, and hear of it when the rest can."""
        connection.send()
        events = selectors.EVENT_READ
        if connection.held_back:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _tell(self, connection: Connection, message: dict[str, Any] | bytes) -> None:
        connection.queue(message)
        if not connection.gone:
            self._send(connection)

    def _tell_all(self, **message: Any) -> None:
        encoded = encode(message)
        for connection in list(self._members.values()):
            self._tell(connection, encoded)
            if connection.held_back > (self._nodes + 1) * MESSAGE_BYTES:
                self._lost(connection, "it takes nothing in")

    def _let_last_words_go(self) -> None:
        ends = time.monotonic() + _LAST_WORDS_SECONDS
        everyone = [*self._members.values(), *self._guests]
        while time.monotonic() < ends and any(each.held_back for each in everyone):
            self._serve(timing.TICK_SECONDS)

    def _part(self, connection: Connection) -> None:
        """Say no more to a connection, and wait a while for its other end to have heard all.

        Closed at once, what it has said meanwhile could keep it from that.
        """
        connection.parting = True
        connection.since = time.monotonic()
        self._guests[connection] = None
        self._send(connection)

    def _refuse(self, connection: Connection, why: str, *, stranger: bool = False) -> None:
        if not connection.parting:
            self._refusals.note(connection.address, why, stranger=stranger)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection.gone:
            return
        self._guests.pop(connection, None)
        if connection.node is not None and self._members.get(connection.node) is connection:
            del self._members[connection.node]
        self._selector.unregister(connection.socket)
        connection.close()

    # --- what members say -----------------------------------------------------------------------

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message["type"]
        if connection.node is None:
            if kind != "hello":
                raise Malformed("no hello")
            self._welcome(connection, message)
        elif kind == "hello":
            raise Malformed("a second hello")
        elif not connection.owed or kind in ("bye", "again"):
            self._answers[kind](connection, message)

    def _welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        node = hello["node"]
        connection.host = hello["host"]
        problem = self._wrong_count(connection, node, hello["nodes"])
        twin = self._members.get(node)
        if twin is not None and twin.session == hello["session"]:
            self._lost(twin, "it lost contact, and has come back")
            twin = None
        elif twin is not None and time.monotonic() - twin.heard > timing.PRESENT_SECONDS:
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
            connection.queue({"type": "failed", "failure": problem, "again": False})
            self._part(connection)
            if not self._met:  # a job that runs goes on: the stranger is the one that is wrong
                self._finish(problem)
            return
        connection.node, connection.session = node, hello["session"]
        del self._guests[connection]
        self._members[node] = connection
        reached_at = connection.socket.getsockname()[0]
        if node != 0 and (self.address is None or not reached_at.startswith("127.")):
            self.address = reached_at
        self._left.pop(node, None)
        if self._over is not None:
            self._tell(connection, {"type": "failed", "failure": self._over, "again": False})

    def _wrong_count(self, connection: Connection, node: int, nodes: int) -> Failure | None:
        if nodes == self._nodes and 0 <= node < nodes:
            return None
        return node_failure(
            node,
            "WrongNodeCount",
            f"{connection.host} ({connection.address}) came as node {node} of {nodes}, "
            f"but node 0's topology has {self._nodes} nodes",
            "give every node the same topology, and node_rank 0 to nodes-1",
            fatal=True,
        )

    def _say_goodbye(self, connection: Connection, _message: dict[str, Any]) -> None:
        if connection.node is not None:
            self._left[connection.node] = connection.name
        self._drop(connection)

    def _expect_again(self, connection: Connection, _message: dict[str, Any]) -> None:
        connection.owed = max(0, connection.owed - 1)

    def _pass_on_stop(self, _connection: Connection, message: dict[str, Any]) -> None:
        self._tell_all(type="stop", step=message["step"])

    def _gather(self, connection: Connection, message: dict[str, Any]) -> None:
        name = message["name"]
        if name not in self._exchanges and len(self._exchanges) >= _MOST_EXCHANGES:
            raise Malformed("more exchanges than there are")
        ends = time.monotonic() + message["deadline"]
        exchange = self._exchanges.setdefault(name, _Exchange(ends))
        if connection.node is not None:
            exchange.values[connection.node] = message["value"]
        if len(exchange.values) == self._nodes:
            values = [exchange.values[each] for each in range(self._nodes)]
            del self._exchanges[name]
            self._met = True
            self._tell_all(type="all", name=name, values=values)

    # --- failures -------------------------------------------------------------------------------

    def _report(self, failure: Failure) -> None:
        """Take note of a failure: the cause is the first that does not follow from another."""
        if self._over is not None:
            return
        follows = self._cause is not None and self._cause["consequence"]
        if self._cause is None or (follows and not failure["consequence"]):
            self._cause = failure
        if self._settled_at is None:
            self._settled_at = time.monotonic() + timing.SETTLE_SECONDS
            self._tell_all(type="who")  # a rank of some node may be what the others wait for

    def _lost(self, connection: Connection, how: str) -> None:
        node, name = connection.node, connection.name
        self._drop(connection)
        if node is not None and not connection.parting:
            self._report(
                node_failure(
                    node,
                    "NodeLost",
                    f"{name} is lost: {how}",
                    "see whether the machine runs and its network reaches node 0",
                )
            )

    def _check_deadlines(self, now: float) -> None:
        for connection in list(self._members.values()):
            if now - connection.heard > self._silence:
                self._lost(connection, f"nothing was heard of it for {self._silence:.0f} s")
        for connection in list(self._guests):
            if now - connection.since > timing.HANDSHAKE_SECONDS:
                self._refuse(connection, "it has not said who it is in time")
        for name, exchange in list(self._exchanges.items()):
            if now > exchange.ends:
                del self._exchanges[name]
                self._report(self._missing(name, exchange))
            elif name != MEET:  # there, a node that left may come again
                self._miss_those_who_left(exchange)
        if self._settled_at is not None and now > self._settled_at and self._cause is not None:
            self._finish(self._cause)

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
        absent = [node for node in missing if node not in self._members]
        who = ", ".join(f"node {node}" for node in absent or missing)
        what = "did not arrive" if absent else f"did not come to '{name}'"
        here = sorted(connection.name for connection in self._members.values())
        return node_failure(
            (absent or missing)[0],
            "NodeMissing",
            f"{who} of {self._nodes} {what} in time; here: {', '.join(here)}"
            + (self._refusals.hint() if absent else ""),
            "start the same command there with its topology.node_rank, and see that the machine "
            f"reaches node 0 and has the same {VARIABLE}; deadlines.start=… waits longer",
            fatal=True,
        )

    def _finish(self, failure: Failure) -> None:
        again = self._restarts > 0 and not failure["fatal"]
        self._restarts -= again
        self._settled_at = self._cause = None
        self._over = None if again else failure
        # A node that came back is waiting for the next attempt already.
        waiting = self._exchanges.get(MEET) if again else None
        self._exchanges = {MEET: waiting} if waiting else {}
        early = waiting.values if waiting else {}
        for node, connection in list(self._members.items()):
            if node not in early:
                connection.owed += again
                self._tell(connection, {"type": "failed", "failure": failure, "again": again})
