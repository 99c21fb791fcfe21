"""Conversations of chance with the coordinator of a job: none ends it, and nothing of them stays.

The service runs in the test's own thread, so that whatever it raises fails the test.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from meeting import SECRET, broken
from mutations import ODD, mutated, mutated_json

from recipes.rendezvous import Coordinator
from recipes.rendezvous.authentication import Answer, Channel
from recipes.rendezvous.connections import Connection
from recipes.rendezvous.secret import Secret

QUICK, THOROUGH = 200, 10_000
SETTINGS = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
GROWTH = 40 << 20  # bytes that a process may grow by meanwhile: Hypothesis keeps some itself

HELLO = {"type": "hello", "node": 2, "nodes": 3, "host": "ghost", "session": "g"}
SPOKEN: tuple[dict[str, Any], ...] = (
    HELLO,
    {"type": "alive"},
    {"type": "again"},
    {"type": "bye"},
    {"type": "exchange", "name": "preflight", "value": {"a": [1, 2]}, "deadline": 30},
    {"type": "exchange", "name": "end of the run", "value": True, "deadline": 86400.0},
    {"type": "stop", "step": 7},
    {"type": "failed", "failure": broken(2, "the disk is full")},
    {"type": "failed", "failure": broken(2, "a rank died", fatal=True, consequence=True)},
)
PLAIN = (
    b"fleet-recipes 1 challenge 0123456789abcdef0123456789abcdef",
    b"answer 0123456789abcdef0123456789abcdef " + b"0" * 64,
    b"welcome " + b"0" * 64,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    json.dumps(HELLO).encode(),
)

LINES = [json.dumps(each).encode() for each in SPOKEN]
# What is said, and whether it is said under the seal.
Said = list[tuple[bool, bytes]]

CHANCE = st.integers(0, 2**64).map(random.Random)
MESSAGES = st.sampled_from(SPOKEN) | st.builds(mutated_json, st.sampled_from(SPOKEN), CHANCE)
ENCODED = (
    MESSAGES.map(lambda message: json.dumps(message).encode())
    | st.builds(mutated, st.sampled_from(LINES), CHANCE)
    | st.binary(max_size=300)
    | st.sampled_from([json.dumps(each).encode() for each in ODD])
)
RAW = st.builds(mutated, st.sampled_from(PLAIN), CHANCE) | st.binary(max_size=600)
DRAWN = st.lists(st.tuples(st.booleans() | st.just(True), ENCODED | RAW), max_size=5)


def by_chance(chance: random.Random) -> Said:
    """The same kinds of things, made ten times faster than Hypothesis draws them."""
    said: Said = []
    for _ in range(chance.randrange(6)):
        kind = chance.randrange(6)
        if kind < 2:
            words = json.dumps(mutated_json(chance.choice(SPOKEN), chance)).encode()
        elif kind < 4:
            words = mutated(chance.choice(LINES if kind == 2 else PLAIN), chance)
        elif kind == 4:
            words = chance.choice(LINES)
        else:
            words = chance.randbytes(chance.randrange(600))
        said.append((chance.random() < 0.8, words))
    return said


SEEDED = CHANCE.map(by_chance)


class Service:
    """A job of three whose nodes 0 and 1 are there, served in this thread."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(3, 0, 1e9, SECRET, restarts=10**9)
        self.members = [self._join(node) for node in (0, 1)]
        self.coordinator._met = True

    def _join(self, node: int) -> socket.socket:
        joined, channel = self.proven()
        hello = HELLO | {"node": node, "session": f"of node {node}"}
        joined.sendall(channel.seal(json.dumps(hello).encode()))
        self.serve()
        assert node in self.coordinator._members
        joined.setblocking(False)
        return joined

    def serve(self) -> None:
        self.coordinator._serve(0)

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.coordinator.port), timeout=5)
        self.serve()
        return made

    def proven(self, secret: Secret = SECRET) -> tuple[socket.socket, Channel]:
        """A connection that has proved itself."""
        made = self.connect()
        answer = Answer(secret, made.recv(200).removesuffix(b"\n"))
        made.sendall(answer.line)
        self.serve()
        return made, answer.judge(made.recv(200).split(b"\n")[0])

    def converse(self, words: Iterator[bytes], connection: socket.socket) -> None:
        """Say what is to be said, until it is said or the coordinator has had enough."""
        for known in self.coordinator._members.values():
            known.heard = time.monotonic()  # else another could come in its place
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            for each in words:
                connection.sendall(each)
                self.serve()
                self.coordinator._check_deadlines(time.monotonic())
        self.serve()
        for member in self.members:  # takes in what it is told
            with contextlib.suppress(BlockingIOError):
                while member.recv(1 << 16):
                    pass

    def check(self) -> None:
        """The job goes on, and nothing is left of who has gone."""
        assert {0, 1} <= self.coordinator._members.keys()
        assert self.coordinator._over is None
        assert len(self.coordinator._guests) <= 1  # closed, and not yet noticed
        assert len(self.coordinator._exchanges) <= 16

    def close(self) -> None:
        for member in self.members:
            member.close()
        everyone: list[Connection] = [*self.coordinator._members.values()]
        for connection in (*everyone, *self.coordinator._guests):
            self.coordinator._drop(connection)
        self.coordinator._listener.close()
        self.coordinator._selector.close()


@contextlib.contextmanager
def memory_stays_flat() -> Iterator[None]:
    process = psutil.Process(os.getpid())
    gc.collect()
    before, files = process.memory_info().rss, process.num_fds()
    yield
    gc.collect()
    assert process.memory_info().rss - before < GROWTH
    assert process.num_fds() <= files + 4


def strangers(count: int, conversations: st.SearchStrategy[Said]) -> None:
    """Conversations without the secret."""
    service = Service()

    @settings(max_examples=count, **SETTINGS)  # type: ignore[arg-type]
    @given(conversations)
    def run(said: Said) -> None:
        lines = (words + b"\n" * whole for whole, words in said)
        service.converse(lines, service.connect())
        service.check()

    with memory_stays_flat():
        run()
        assert service.coordinator._cause is None  # not even a failure was noted
    service.close()


def members(count: int, conversations: st.SearchStrategy[Said]) -> None:
    """Conversations of a node 2 that has the secret, with and without its hello."""
    service = Service()

    @settings(max_examples=count, **SETTINGS)  # type: ignore[arg-type]
    @given(st.integers(0, 4), conversations)
    def run(greets: int, said: Said) -> None:
        connection, channel = service.proven()
        first = [(True, json.dumps(HELLO).encode())] if greets else []
        lines = (channel.seal(each) if sealed else each for sealed, each in [*first, *said])
        service.converse(lines, connection)
        over = service.coordinator._over
        if over is not None:  # its right: a failure that would come again
            assert over["fatal"]
            service.coordinator._over = None
        service.check()

    with memory_stays_flat():
        run()
    service.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_strangers_in_short() -> None:
    strangers(QUICK, DRAWN)


def test_members_in_short() -> None:
    members(QUICK, DRAWN)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_strangers() -> None:
    strangers(THOROUGH, SEEDED)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_members() -> None:
    members(THOROUGH, SEEDED)
