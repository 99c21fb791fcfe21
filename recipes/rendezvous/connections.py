"""The coordinator's end of a connection: its proof, and what goes in and out without waiting."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.rendezvous.authentication import (
    LINE_BYTES,
    REFUSED,
    Challenge,
    Channel,
    OtherSecret,
    Unproven,
)
from recipes.rendezvous.lines import Lines, TooLong
from recipes.rendezvous.messages import MESSAGE_BYTES, TO_COORDINATOR, decode, encode
from recipes.rendezvous.secret import Secret

_RECEIVE_BYTES = 1 << 16
_SEND_BYTES = 1 << 18


class Connection:
    """A connection to the coordinator, of a member or of anybody.

    Attributes:
        address: of its other end.
        since: when it came.
        heard: when something was last heard of it.
        node: its number; None before its hello.
        session: which process it is; a connection made anew has the same.
        owed: how often it was told to try again and has not yet said that it does. What it says
            until then belongs to an attempt that is over.
        parting: its last word has been said, and nothing counts that it still says.
        gone: it is closed.
    """

    def __init__(self, accepted: socket.socket, address: str, secret: Secret) -> None:
        self.socket = accepted
        self.address = address
        self.since = self.heard = time.monotonic()
        self.node: int | None = None
        self.session = ""
        self.host = ""
        self.owed = 0
        self.parting = self.gone = False
        self._challenge = Challenge(secret)
        self._channel: Channel | None = None
        self._lines = Lines(LINE_BYTES)
        self._outgoing = bytearray(self._challenge.line)

    @property
    def name(self) -> str:
        """How messages name the member."""
        return f"node {self.node} ({self.host}, {self.address})"

    @property
    def proven(self) -> bool:
        """Whether it has proved that it knows the secret."""
        return self._channel is not None

    @property
    def held_back(self) -> int:
        """Bytes that its other end has not yet taken."""
        return len(self._outgoing)

    def queue(self, message: Mapping[str, Any] | bytes) -> None:
        """Have a message go out; nothing does to who has not proved anything."""
        if self._channel is not None and not (self.parting or self.gone):
            encoded = message if isinstance(message, bytes) else encode(message)
            self._outgoing += self._channel.seal(encoded)

    def send(self) -> None:
        """Send what can be sent without waiting."""
        # Who cannot be reached is found out by its silence, or by the end of what it says.
        with contextlib.suppress(OSError):
            while self._outgoing:
                sent = self.socket.send(self._outgoing[:_SEND_BYTES])
                del self._outgoing[:sent]
        if self.parting and not self._outgoing:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> bool:
        """Take in what has come, without waiting; whether the other end still speaks."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES if self.proven else LINE_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        if not data:
            return False
        self.heard = time.monotonic()
        if not self.parting:
            self._lines.add(data)
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """The messages that are complete.

        Raises:
            Unproven: the other end is none of the job's.
            Malformed: it is, and has sent what is no message.
            Forged: so has somebody in its name.
            TooLong: a line has no end within its bound.
        """
        while not (self.gone or self.parting):
            try:
                line = self._lines.next()
            except TooLong:
                if self.proven:
                    raise
                raise Unproven("it spoke, and is not of this program") from None
            if line is None:
                return
            if self._channel is None:
                self._prove(line)
            else:
                yield decode(self._channel.open(line), TO_COORDINATOR)

    def _prove(self, answer: bytes) -> None:
        try:
            self._channel, welcome = self._challenge.judge(answer)
        except OtherSecret:
            self._outgoing += REFUSED + b"\n"
            self.send()
            raise
        self._lines.most = MESSAGE_BYTES
        self._outgoing += welcome
        self.send()

    def close(self) -> None:
        """End it."""
        self.gone = True
        self._outgoing.clear()
        self.socket.close()
