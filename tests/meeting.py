"""Members, their coordinator and strangers, in threads of a test's process, over loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from recipes.config import UserError
from recipes.rendezvous import MEET, Coordinator, JobFailed, Member, node_failure
from recipes.rendezvous.authentication import Answer, Channel
from recipes.rendezvous.lines import Lines
from recipes.rendezvous.secret import Secret

SECRET = Secret.of("the secret of the jobs of these tests")
SILENCE = 2.0
SOON = 5.0  # seconds that nothing here should take


@contextlib.contextmanager
def coordinator(nodes: int, silence: float = SILENCE, restarts: int = 0) -> Iterator[Coordinator]:
    service = Coordinator(nodes, 0, silence, SECRET, restarts)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        assert not service.is_alive()


@contextlib.contextmanager
def job(
    nodes: int, silence: float = SILENCE, restarts: int = 0
) -> Iterator[tuple[Coordinator, list[Member]]]:
    """A job whose members have all connected."""
    with coordinator(nodes, silence, restarts) as service, contextlib.ExitStack() as stack:
        members = [stack.enter_context(member(service, node, nodes)) for node in range(nodes)]
        yield service, members


@contextlib.contextmanager
def member(
    service: Coordinator, node: int, nodes: int, silence: float = SILENCE
) -> Iterator[Member]:
    joined = Member(node, nodes, silence, SECRET)
    joined.connect("127.0.0.1", service.port, SOON)
    try:
        yield joined
    finally:
        joined.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls made at the same time; an exception is a result too."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (JobFailed, UserError) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def exchange(members: list[Member], name: str = MEET) -> list[Any]:
    """Let each give its number, and return what each got."""
    return together(*(lambda m=m: m.exchange(name, m.node, SOON) for m in members))


def told(member: Member, seconds: float = SOON) -> JobFailed:
    """What a member that is at something else is told, within some seconds."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            member.check()
        except JobFailed as failed:
            return failed
        time.sleep(0.02)
    raise AssertionError("nothing was told")


class Ghost:
    """A connection that proves itself, and from there says only what a test has it say."""

    def __init__(self, port: int, secret: Secret = SECRET) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SOON)
        self._lines = Lines(1 << 24)
        answer = Answer(secret, self.line())
        self.socket.sendall(answer.line)
        self.channel: Channel = answer.judge(self.line())

    def line(self) -> bytes:
        """The next line that comes.

        Raises:
            EOFError: there is none.
        """
        while (line := self._lines.next()) is None:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._lines.add(data)
        return line

    def say(self, content: bytes | dict[str, Any]) -> None:
        """Say a message, or anything else under the seal."""
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.socket.sendall(self.channel.seal(raw))

    def messages(self) -> list[dict[str, Any]]:
        """All that comes until the connection ends."""
        found = []
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                found.append(json.loads(self.channel.open(self.line())))
        return found

    def close(self) -> None:
        """Break the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello(port: int, node: int, nodes: int, **changes: Any) -> Ghost:
    """A connection that has said hello and says no more."""
    ghost = Ghost(port)
    content = {"type": "hello", "node": node, "nodes": nodes, "host": "ghost", "session": "g"}
    ghost.say(content | changes)
    return ghost


def broken(node: int, message: str, **changes: Any) -> dict[str, Any]:
    return node_failure(node, "Test", message, "mend it", **changes)
