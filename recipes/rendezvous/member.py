"""A node's line to the coordinator."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import threading
import time
import uuid
from typing import Any

from recipes.config import UserError
from recipes.forms import Malformed
from recipes.rendezvous import timing
from recipes.rendezvous.authentication import LINE_BYTES, Answer, Channel, Forged, Unproven
from recipes.rendezvous.failures import Failure, JobFailed, node_failure, to_send
from recipes.rendezvous.lines import Lines, TooLong
from recipes.rendezvous.messages import MESSAGE_BYTES, TO_MEMBER, decode, encode
from recipes.rendezvous.secret import VARIABLE, Secret

_RECEIVE_BYTES = 1 << 16
_CONNECT_SECONDS = 2.0
_PROOF_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_RETRY_UNPROVEN_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Member:
    """This node's line to the coordinator.

    Args:
        node: this node's number.
        nodes: how many the job has.
        silence: seconds without a word after which the coordinator counts as lost.
        secret: of the job.
    """

    def __init__(self, node: int, nodes: int, silence: float, secret: Secret) -> None:
        self.node = node
        self._nodes = nodes
        self._silence = silence
        self._secret = secret
        self._socket: socket.socket | None = None
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._failed: JobFailed | None = None
        self._session = uuid.uuid4().hex
        self.stop_step: int | None = None  # as some node has asked of all

    def connect(self, host: str, port: int, deadline: float) -> str:
        """Reach the coordinator, prove that both know the secret, and say hello.

        Args:
            host: a name or an address; names are resolved at each try.
            deadline: seconds to keep trying.

        Returns:
            This node's address on the way to the coordinator.

        Raises:
            UserError: the name does not resolve, nobody answers, or who does has another secret.
        """
        if self._socket is not None:  # a connection that was lost
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        connection, channel = self._reach(host, port, deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._silence)
        inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._sending:
            self._socket, self._channel = connection, channel
        self._failed = None
        self._inbox = inbox
        self._send(
            type="hello",
            node=self.node,
            nodes=self._nodes,
            host=socket.gethostname(),
            session=self._session,
        )
        listen = threading.Thread(
            target=self._listen, args=(connection, channel, inbox), daemon=True
        )
        listen.start()
        threading.Thread(target=self._beat, args=(connection,), daemon=True).start()
        return str(connection.getsockname()[0])

    def _reach(self, host: str, port: int, deadline: float) -> tuple[socket.socket, Channel]:
        ends = time.monotonic() + deadline
        unproven: Unproven | None = None
        while True:
            pause = _RETRY_SECONDS
            try:
                return self._try(host, port)
            except Unproven as fault:  # perhaps of a job that is about to end
                pause = _RETRY_UNPROVEN_SECONDS
                problem = self._of_another_job(host, port, fault)
                if unproven is None:
                    _log.warning("%s; trying again for %.0f s", problem.message, deadline)
                unproven = fault
            except OSError as error:
                problem = self._unreachable(host, port, deadline, error)
                if unproven is not None:  # which has gone, at its own deadline
                    problem = self._of_another_job(host, port, unproven)
            if time.monotonic() > ends:
                raise problem
            time.sleep(pause)

    def _try(self, host: str, port: int) -> tuple[socket.socket, Channel]:
        """Connect and prove once.

        Raises:
            OSError: nobody answers.
            Unproven: who answers is not of the job.
        """
        connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        try:
            if connection.getsockname() == connection.getpeername():
                # Where nobody listens on this machine, TCP can connect a port to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            connection.settimeout(_PROOF_SECONDS)
            ends = time.monotonic() + _PROOF_SECONDS
            answer = Answer(self._secret, _read_line(connection, ends))
            connection.sendall(answer.line)
            return connection, answer.judge(_read_line(connection, ends))
        except BaseException:
            connection.close()
            raise

    def exchange(self, name: str, value: Any, deadline: float) -> list[Any]:
        """Give a value and get every node's, by node number.

        Args:
            deadline: seconds that the coordinator waits for all nodes.

        Raises:
            JobFailed: a node did not come in time, or the job failed meanwhile.
        """
        self._send(type="exchange", name=name, value=value, deadline=deadline)
        while True:
            message = self._next(deadline + self._silence + 2 * timing.SETTLE_SECONDS)
            if message is None:
                raise self._fail(self._lost_contact())
            if message["type"] == "all" and message["name"] == name:
                return list(message["values"])

    def report(self, failure: Failure) -> JobFailed:
        """Tell a failure, and wait for the cause that the coordinator picks.

        Returns:
            What every node is told; raise it.
        """
        self._send(type="failed", failure=to_send(failure))
        try:
            while self._next(self._silence + 3 * timing.SETTLE_SECONDS) is not None:
                pass
        except JobFailed as told:
            # Without contact the coordinator's word is missing, and this node's own remains.
            return told if told.failure["type"] != "NoContact" else self._fail(failure)
        return self._fail(failure)

    def tell(self, failure: Failure) -> None:
        """Tell a failure without waiting."""
        self._send(type="failed", failure=to_send(failure))

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

    def _listen(
        self, connection: socket.socket, channel: Channel, inbox: queue.Queue[dict[str, Any]]
    ) -> None:
        """In a thread: put what the coordinator says into the inbox, and notice its silence."""
        lines = Lines((self._nodes + 1) * MESSAGE_BYTES)
        # Not the coordinator, or its words cut short when it was frozen: it is as good as gone.
        with contextlib.suppress(OSError, Forged, Malformed, TooLong):
            while data := connection.recv(_RECEIVE_BYTES):
                lines.add(data)
                while (line := lines.next()) is not None:
                    message = decode(channel.open(line), TO_MEMBER)
                    if message["type"] != "alive":
                        inbox.put(message)
        inbox.put({"type": "failed", "failure": self._lost_contact(), "again": False})

    def _beat(self, connection: socket.socket) -> None:
        """In a thread: tell that this node is alive."""
        while connection is self._socket:
            self._send(type="alive")
            time.sleep(timing.HEARTBEAT_SECONDS)

    def _send(self, **message: Any) -> None:
        # Who cannot be reached is found out by its silence.
        with self._sending, contextlib.suppress(OSError):
            if self._socket is not None and self._channel is not None:
                self._socket.sendall(self._channel.seal(encode(message)))

    def _lost_contact(self) -> Failure:
        return node_failure(
            self.node,
            "NoContact",
            f"node {self.node} has lost contact with node 0: its connection broke, or nothing "
            f"was heard for {self._silence:.0f} s",
            "see whether node 0 runs and what it says; check the network between the two",
        )

    def _of_another_job(self, host: str, port: int, fault: Unproven) -> UserError:
        return UserError(
            f"node {self.node}: node 0 at {host}:{port}: {fault}",
            f"give every node of the job the same {VARIABLE}; where another job's node 0 is there, "
            "give this job topology.master=HOST:ANOTHER_PORT",
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


def _read_line(connection: socket.socket, ends: float) -> bytes:
    """A line of the proof, by a moment.

    Raises:
        OSError: the other end has gone.
        Unproven: it says nothing, or no line.
    """
    lines = Lines(LINE_BYTES)
    try:
        while (line := lines.next()) is None:
            connection.settimeout(max(0.01, ends - time.monotonic()))
            # By the byte: what follows the line is not this reader's.
            data = connection.recv(1)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            lines.add(data)
    except TooLong:
        raise Unproven("what answers there is not this program") from None
    except TimeoutError:
        raise Unproven(f"what answers there said nothing for {_PROOF_SECONDS:.0f} s") from None
    return line
