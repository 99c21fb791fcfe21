"""Who does not know a job's secret, or misuses it, and what becomes of the job: nothing, or its end
with a message."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from meeting import (
    SECRET,
    SILENCE,
    SOON,
    Ghost,
    broken,
    coordinator,
    exchange,
    hello,
    job,
    member,
    together,
    told,
)

from recipes.config import UserError
from recipes.rendezvous import MEET, Coordinator, Member, timing
from recipes.rendezvous.coordinator import MOST_GUESTS
from recipes.rendezvous.messages import MESSAGE_BYTES
from recipes.rendezvous.secret import VARIABLE, Secret

OTHERS = Secret.of("the secret of another job")
IDLE = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, count = map(int, sys.argv[1:])
idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(timing, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(timing, "TICK_SECONDS", 0.02)


def say(port: int, *words: bytes) -> bytes:
    """Say something on a connection of one's own; all that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        try:
            for each in words:
                stranger.sendall(each)
            stranger.shutdown(socket.SHUT_WR)
            return stranger.makefile("rb").read()
        except OSError:  # cut off before it has said all
            return b""


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """Connections of another process that say nothing."""
    command = [sys.executable, "-c", IDLE, str(port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            yield
        finally:
            process.kill()


# --- without the secret -------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_forged_hello_and_failure_do_nothing(
    claimed: int, caplog: pytest.LogCaptureFixture
) -> None:
    greeting = {"type": "hello", "node": claimed, "nodes": 2, "host": "x", "session": "x"}
    failure = broken(1, "\x1b[31mforged", fatal=True)
    lines = [json.dumps(each).encode() + b"\n" for each in (greeting, {"failure": failure})]
    with coordinator(2) as service, member(service, 0, 2) as zero:
        assert b"forged" not in say(service.port, *lines)  # before the nodes have met
        with member(service, 1, 2) as one:
            assert exchange([zero, one]) == [[0, 1]] * 2
            say(service.port, *lines)
            assert exchange([zero, one], "next") == [[0, 1]] * 2
            assert [each.check() for each in (zero, one)] == [False] * 2
    assert "dropped a connection from 127.0.0.1: it spoke, and is not of this program" in (
        caplog.text
    )
    assert "forged" not in caplog.text


def test_what_a_member_said_is_worth_nothing_on_another_connection() -> None:
    with job(2) as (service, members):
        exchange(members)
        real = Ghost(service.port)
        sealed = real.channel.seal(json.dumps({"type": "bye"}).encode())
        other = Ghost(service.port)
        other.socket.sendall(sealed)
        assert other.messages() == []
        real.close()
        assert exchange(members, "next") == [[0, 1]] * 2


def test_two_jobs_on_one_port_do_not_mix(caplog: pytest.LogCaptureFixture) -> None:
    with job(2) as (service, members):
        lost = Member(1, 2, SILENCE, OTHERS)
        with pytest.raises(UserError) as caught:
            lost.connect("127.0.0.1", service.port, 0.1)
        assert f"node 1: node 0 at 127.0.0.1:{service.port}: what answers there has another" in (
            str(caught.value)
        )
        assert VARIABLE in caught.value.remedy
        assert "topology.master=HOST:ANOTHER_PORT" in caught.value.remedy
        assert exchange(members) == [[0, 1]] * 2
    assert "it does not know this job's secret" in caplog.text
    assert "trying again for 0 s" in caplog.text  # said at once, not only at the end


def test_another_secret_is_the_reason_also_once_node_0_has_given_up() -> None:
    service = Coordinator(2, 0, SILENCE, OTHERS)
    service.start()
    with ThreadPoolExecutor(1) as pool:
        lost = Member(1, 2, SILENCE, SECRET)
        connecting = pool.submit(lost.connect, "127.0.0.1", service.port, 1.5)
        time.sleep(0.5)
        service.stop()
        with pytest.raises(UserError, match="what answers there has another secret"):
            connecting.result()


def test_a_node_with_another_secret_is_told_of_where_one_is_missing() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        with pytest.raises(UserError):
            Member(1, 2, SILENCE, OTHERS).connect("127.0.0.1", service.port, 0.1)
        with pytest.raises(Exception, match="node 1 of 2 did not arrive") as caught:
            zero.exchange(MEET, 0, 0.2)
    assert "came with another secret than node 0's, the last from 127.0.0.1" in str(caught.value)


def test_a_member_outwaits_a_job_that_is_about_to_end() -> None:
    earlier = Coordinator(2, 0, SILENCE, OTHERS)
    earlier.start()
    with ThreadPoolExecutor(1) as pool:
        one = Member(1, 2, SILENCE, SECRET)
        connected = pool.submit(one.connect, "127.0.0.1", earlier.port, SOON)
        time.sleep(0.3)
        earlier.stop()
        with contextlib.ExitStack() as stack:
            later = Coordinator(2, earlier.port, SILENCE, SECRET)
            later.start()
            stack.callback(later.stop)
            assert connected.result() == "127.0.0.1"
            zero = stack.enter_context(member(later, 0, 2))
            assert exchange([zero, one]) == [[0, 1]] * 2
            one.close()


def test_a_flood_makes_few_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with coordinator(2) as service:
        for _ in range(200):
            say(service.port, b"GET / HTTP/1.0\r\n\r\n")
    assert len(caplog.records) == 1


def test_the_log_counts_what_it_has_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "TELL_SECONDS", 0.5)
    with coordinator(2) as service:
        for _ in range(10):
            say(service.port, b"\x1b]0;title\x07\n")
        time.sleep(0.6)
        say(service.port, b"\x1b]0;title\x07\n")
    assert len(caplog.records) == 2
    assert "(9 more since the last such line)" in caplog.text
    assert "\x1b" not in caplog.text


def test_two_thousand_idle_connections_keep_nobody_out() -> None:
    with job(2) as (service, members), idle_connections(service.port, 2000):
        assert len(service._guests) <= MOST_GUESTS
        assert exchange(members) == [[0, 1]] * 2
        with Ghost(service.port) as late:  # gets as far as its hello
            late.say({"type": "hello", "node": 1, "nodes": 2, "host": "x", "session": "x"})
            assert late.messages()[-1]["failure"]["type"] == "DuplicateNode"


def test_a_process_that_may_open_no_more_files_goes_on() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with job(2) as (service, members):
        used = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, hard))
        try:
            with idle_connections(service.port, 100):
                assert exchange(members) == [[0, 1]] * 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert service.is_alive()
        assert exchange(members, "next") == [[0, 1]] * 2


def test_who_says_nothing_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at all, a byte now and then, or no hello after the proof."""
    monkeypatch.setattr(timing, "HANDSHAKE_SECONDS", 0.6)
    with job(2) as (service, members):
        silent = socket.create_connection(("127.0.0.1", service.port), timeout=SOON)
        slow = socket.create_connection(("127.0.0.1", service.port), timeout=SOON)
        proven = Ghost(service.port)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < SOON:
                slow.sendall(b"a")
                time.sleep(0.05)
        assert time.monotonic() - began < SOON
        assert silent.makefile("rb").read().startswith(b"fleet-recipes 1 challenge ")
        assert proven.messages() == []
        assert exchange(members) == [[0, 1]] * 2
        for each in (silent, slow, proven):
            each.close()


def test_it_listens_on_the_address_that_is_given() -> None:
    service = Coordinator(1, 0, SILENCE, SECRET, address="127.0.0.2")
    service.start()
    try:
        socket.create_connection(("127.0.0.2", service.port), timeout=SOON).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", service.port), timeout=SOON)
        assert service.listens_at == "127.0.0.2"
    finally:
        service.stop()


# --- with the secret ----------------------------------------------------------------------------

FAILURE = broken(1, "x")


@pytest.mark.parametrize(
    "message",
    [
        {"type": "failed", "failure": {}},
        {"type": "failed"},
        {"type": "failed", "failure": FAILURE | {"message": 5}},
        {"type": "failed", "failure": FAILURE | {"rank": "0"}},
        {"type": "failed", "failure": FAILURE | {"fatal": 1}},
        {"type": "failed", "failure": FAILURE | {"more": 1}},
        {"type": "failed", "failure": FAILURE | {"message": "x" * 100_000}},
        {"type": "exchange", "name": MEET, "value": 1, "deadline": "soon"},
        {"type": "exchange", "name": MEET, "value": 1, "deadline": float("nan")},
        {"type": "exchange", "name": MEET, "value": 1, "deadline": float("inf")},
        {"type": "exchange", "name": MEET, "value": 1, "deadline": -1},
        {"type": "exchange", "name": MEET, "value": 1, "deadline": True},
        {"type": "exchange", "name": ["meet"], "value": 1, "deadline": 1},
        {"type": "exchange", "name": "x" * 1000, "value": 1, "deadline": 1},
        {"type": "exchange", "name": MEET, "deadline": 1},
        {"type": "stop", "step": "now"},
        {"type": "stop", "step": 10**30},
        {"type": "hello", "node": 2, "nodes": 3, "host": "x", "session": "x"},
        {"type": "who"},
        {"type": ["bye"]},
        {},
        b"",
        b"[" * 100_000,
        b"9" * 10_000,
        b"\xff",
        b"null",
    ],
    ids=lambda message: repr(message)[:60],
)
def test_a_member_that_says_what_is_no_message_is_lost(message: bytes | dict[str, Any]) -> None:
    with coordinator(3) as service, member(service, 0, 3) as zero, member(service, 1, 3) as one:
        ghost = hello(service.port, 2, 3)
        ghost.say(message)
        for failed in together(lambda: told(zero), lambda: told(one)):
            assert failed.failure["type"] == "NodeLost"
            assert failed.failure["node"] == 2
            assert "node 2 (ghost, 127.0.0.1) is lost: it sent what is no message" in str(failed)
        assert service.is_alive()
        ghost.close()


def test_a_line_without_end_is_cut_off() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        ghost, sent = hello(service.port, 1, 2), 0
        with contextlib.suppress(OSError):
            while sent < 63_000_000:
                sent += ghost.socket.send(b"x" * 100_000)
        assert sent < 5 * MESSAGE_BYTES  # the rest is in the system's buffers
        assert "it sent what is no message" in str(told(zero))
        ghost.close()


def test_exchanges_that_nobody_needs_are_cut_off() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        ghost = hello(service.port, 1, 2)
        with contextlib.suppress(OSError):
            for number in range(53_000):
                ghost.say({"type": "exchange", "name": f"{number}", "value": 0, "deadline": 600})
        assert "(more exchanges than there are)" in str(told(zero))
        assert len(service._exchanges) <= 16
        ghost.close()


def test_a_message_that_somebody_slips_in_ends_the_connection() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        ghost = hello(service.port, 1, 2)
        ghost.socket.sendall(b"0" * 32 + b'{"type": "bye"}\n')
        assert "it sent what is no message" in str(told(zero))
        ghost.close()


def test_no_terminal_obeys_what_a_member_says() -> None:
    ugly = "\x1b[31mred\x07\x9b2J\u202eback\r"
    with coordinator(2) as service, member(service, 0, 2) as zero:
        ghost = hello(service.port, 1, 2, host=f"host{ugly}")
        failure = broken(1, f"{ugly}\nsecond line") | {"traceback": f"trace\n{ugly}"}
        ghost.say({"type": "failed", "failure": failure | {"remedy": ugly, "type": ugly}})
        failed = told(zero).failure
        ghost.close()
        assert failed["message"].endswith("\nsecond line")
        for name in ("message", "remedy", "traceback", "type"):
            shown = failed[name].replace("\n", "")
            assert "red" in shown
            assert shown.isprintable(), shown
    with coordinator(2) as service, member(service, 0, 2) as zero:
        hello(service.port, 1, 2, host=f"host{ugly}").close()
        assert "host\\x1b[31mred" in str(told(zero))
        assert str(told(zero)).isprintable()


def test_a_node_that_does_not_listen_holds_up_nobody() -> None:
    large = "x" * 2_000_000
    with (
        coordinator(3, silence=60) as service,
        member(service, 0, 3) as zero,
        member(service, 1, 3) as one,
        hello(service.port, 2, 3) as deaf,
    ):
        for name in ("first", "second", "third"):
            deaf.say({"type": "exchange", "name": name, "value": large, "deadline": 60})
            results = together(
                lambda name=name: len(zero.exchange(name, large, SOON)),  # type: ignore[misc]
                lambda name=name: len(one.exchange(name, large, SOON)),  # type: ignore[misc]
            )
            assert results == [3, 3]
        assert service._members[2].held_back > 0


def test_a_refused_member_hears_why_whatever_else_it_has_said() -> None:
    with job(2) as (service, members):
        exchange(members)
        for _ in range(20):
            twin = hello(service.port, 1, 2, session="another")
            with contextlib.suppress(OSError):
                for _ in range(50):
                    twin.say({"type": "alive"})
            assert twin.messages()[-1]["failure"]["type"] == "DuplicateNode"
            twin.close()
        assert exchange(members, "next") == [[0, 1]] * 2


def test_what_the_coordinator_says_is_checked_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    for words in (b"nonsense", b'{"type": "all", "name": 5}', b"[" * 50_000, b"{}"):
        with coordinator(2) as service, member(service, 1, 2) as one:
            ends = time.monotonic() + SOON
            while 1 not in service._members:
                assert time.monotonic() < ends
                time.sleep(0.01)
            service._members[1].queue(words)
            assert told(one).failure["type"] == "NoContact"
    assert caplog.text == ""
