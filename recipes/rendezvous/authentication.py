"""Proof that both ends of a connection know the job's secret, and a seal on all they say after.

The coordinator sends a challenge, a number that is never used again. The member answers with a
number of its own and a proof over both; the coordinator welcomes it with another proof over both.
A proof is an HMAC (RFC 2104, SHA-256) under the secret, so it tells nothing of the secret, and is
worth nothing on another connection. From the same two numbers each direction gets a key of its own;
every line then carries an HMAC over its place in the order and its content. A line that was
changed, left out, repeated, moved or taken from elsewhere does not open.

What is said can be read by who listens in: it is sealed, not encrypted.
"""

from __future__ import annotations

import hmac
import re
import secrets

from recipes.rendezvous.secret import Secret

LINE_BYTES = 128  # no line of the proof is longer
_SEAL = 32  # characters
_CHALLENGE = re.compile(rb"fleet-recipes 1 challenge ([0-9a-f]{32})")
_ANSWER = re.compile(rb"answer ([0-9a-f]{32}) ([0-9a-f]{64})")
_WELCOME = re.compile(rb"welcome ([0-9a-f]{64})")
REFUSED = b"refused"


class Unproven(Exception):
    """The other end did not prove that it knows the secret; the message says what it did."""


class OtherSecret(Unproven):
    """It speaks as this program does, and has another secret."""


class Forged(ValueError):
    """A line that the other end did not say, or not here."""


class Sealer:
    """Seals the lines of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def _next_seal(self, content: bytes) -> bytes:
        numbered = self._number.to_bytes(8, "big") + content
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256").hex()[:_SEAL].encode()

    def seal(self, content: bytes) -> bytes:
        """A content without line ends as a line, with its end."""
        return self._next_seal(content) + content + b"\n"

    def open(self, line: bytes) -> bytes:
        """The content of a line, without its end.

        Raises:
            Forged: it is not the next one of this direction.
        """
        content = line[_SEAL:]
        if not hmac.compare_digest(self._next_seal(content), line[:_SEAL]):
            raise Forged
        return content


class Channel:
    """The two directions of a connection, once both ends have proved themselves."""

    def __init__(self, outgoing: bytes, incoming: bytes) -> None:
        self._outgoing = Sealer(outgoing)
        self._incoming = Sealer(incoming)
        self.seal = self._outgoing.seal
        self.open = self._incoming.open


class Challenge:
    """The coordinator's part: one for each connection."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._number = secrets.token_hex(16).encode()
        self.line = b"fleet-recipes 1 challenge " + self._number + b"\n"

    def judge(self, answer: bytes) -> tuple[Channel, bytes]:
        """Judge a member's answer.

        Returns:
            The channel, and the line that welcomes the member.

        Raises:
            Unproven: the member does not know the secret.
        """
        found = _ANSWER.fullmatch(answer)
        if found is None:
            raise Unproven("it spoke, and is not of this program")
        numbers = self._number + found[1]
        if not hmac.compare_digest(_proof(self._secret, b"member", numbers), found[2]):
            raise OtherSecret("it does not know this job's secret")
        welcome = b"welcome " + _proof(self._secret, b"coordinator", numbers) + b"\n"
        to_coordinator, to_member = _keys(self._secret, numbers)
        return Channel(to_member, to_coordinator), welcome


class Answer:
    """A member's part.

    Args:
        challenge: the first line that the coordinator has sent.

    Raises:
        Unproven: it is no challenge.
    """

    def __init__(self, secret: Secret, challenge: bytes) -> None:
        found = _CHALLENGE.fullmatch(challenge)
        if found is None:
            raise Unproven("what answers there is not this program, or another version of it")
        self._secret = secret
        own = secrets.token_hex(16).encode()
        self._numbers = found[1] + own
        self.line = b"answer " + own + b" " + _proof(secret, b"member", self._numbers) + b"\n"

    def judge(self, welcome: bytes) -> Channel:
        """Judge the coordinator's reply.

        Raises:
            Unproven: the coordinator does not know the secret, or has refused this member.
        """
        found = _WELCOME.fullmatch(welcome)
        wanted = _proof(self._secret, b"coordinator", self._numbers)
        if found is None or not hmac.compare_digest(wanted, found[1]):
            raise OtherSecret("what answers there has another secret")
        to_coordinator, to_member = _keys(self._secret, self._numbers)
        return Channel(to_coordinator, to_member)


def _proof(secret: Secret, whose: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret.key, b"proof " + whose + numbers, "sha256").hex().encode()


def _keys(secret: Secret, numbers: bytes) -> tuple[bytes, bytes]:
    """The keys of what goes to the coordinator, and of what comes from it."""
    to_coordinator = hmac.digest(secret.key, b"to coordinator" + numbers, "sha256")
    return to_coordinator, hmac.digest(secret.key, b"to member" + numbers, "sha256")
