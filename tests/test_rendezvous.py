"""Members and their coordinator, in threads of this process, over loopback."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import (
    SECRET,
    SILENCE,
    SOON,
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
from recipes.rendezvous import MEET, Alone, Coordinator, JobFailed, Member, timing
from recipes.rendezvous.authentication import LINE_BYTES, Challenge

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(timing, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(timing, "TICK_SECONDS", 0.02)


# --- exchanges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_each_gets_all_values_by_number(nodes: int) -> None:
    with job(nodes) as (_, members):
        backwards = members[::-1]
        assert exchange(backwards) == [list(range(nodes))] * nodes
        assert exchange(members, "again") == [list(range(nodes))] * nodes


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(JSON, JSON), min_size=1, max_size=4))
def test_any_json_arrives_as_it_is(rounds: list[tuple[Any, Any]]) -> None:
    with job(2) as (_, (first, second)):
        for number, (one, two) in enumerate(rounds):
            results = together(
                lambda one=one, name=str(number): first.exchange(name, one, SOON),  # type: ignore[misc]
                lambda two=two, name=str(number): second.exchange(name, two, SOON),  # type: ignore[misc]
            )
            assert results == [[one, two]] * 2


def test_a_large_value_arrives() -> None:
    large = "x" * 3_000_000  # many times what a socket takes at once
    with job(2) as (_, (first, second)):
        results = together(
            lambda: first.exchange("large", large, SOON), lambda: second.exchange("large", 1, SOON)
        )
        assert results == [[large, 1]] * 2


def test_a_job_of_one_node_needs_nobody() -> None:
    alone = Alone(restarts=1)
    assert alone.exchange("x", 5, 1.0) == [5]
    assert alone.check() is False
    assert alone.report(broken(0, "first")).again
    assert not alone.report(broken(0, "second")).again
    assert not Alone(restarts=1).report(broken(0, "hopeless", fatal=True)).again


# --- who is missing, or should not be there -----------------------------------------------------


def test_the_word_to_stop_reaches_every_node() -> None:
    with job(3) as (_, members):
        assert [each.check() for each in members] == [False] * 3
        assert [each.stop_step for each in members] == [None] * 3
        members[1].stop_all(42)
        ends = time.monotonic() + SOON
        while any(each.stop_step is None for each in members) and time.monotonic() < ends:
            for each in members:
                each.check()
        assert [each.stop_step for each in members] == [42] * 3
    alone = Alone(0)
    alone.stop_all(42)
    assert alone.stop_step is None


def test_a_node_that_never_arrives_is_named() -> None:
    with coordinator(3) as service, member(service, 0, 3) as one, member(service, 2, 3) as two:
        started = time.monotonic()
        results = together(lambda: one.exchange(MEET, 0, 0.5), lambda: two.exchange(MEET, 2, 0.5))
        assert time.monotonic() - started < 2
    for failed in results:
        assert failed.failure["type"] == "NodeMissing"
        assert failed.failure["node"] == 1
        assert "node 1 of 3 did not arrive in time" in str(failed)
        assert "node 0 (" in str(failed)
        assert "topology.node_rank" in failed.failure["remedy"]
        assert not failed.again


def test_a_node_that_is_there_but_does_not_come_is_named() -> None:
    with job(2) as (_, (zero, one)):
        with pytest.raises(JobFailed, match="node 1 of 2 did not come to 'preflight' in time"):
            zero.exchange("preflight", 0, 0.4)
        assert told(one).failure["type"] == "NodeMissing"


def test_two_nodes_with_one_number_are_both_named() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        first = hello(service.port, 1, 2, host="alpha", session="a")
        time.sleep(0.1)
        second = hello(service.port, 1, 2, host="beta", session="b")
        failed = told(zero)
        refused = second.messages()[-1]
        first.close()
    assert failed.failure["type"] == "DuplicateNode"
    assert "two machines say topology.node_rank=1: alpha (127.0.0.1) and beta" in str(failed)
    assert failed.failure["remedy"] == "give each machine its own topology.node_rank"
    assert refused["failure"] == failed.failure


@pytest.mark.parametrize(("node", "nodes"), [(1, 3), (2, 2), (-1, 2)])
def test_another_node_count_ends_the_start(node: int, nodes: int) -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        hello(service.port, node, nodes).close()
        failed = told(zero)
        with member(service, 1, 2) as late:
            assert told(late).failure == failed.failure
    assert failed.failure["type"] == "WrongNodeCount"
    assert f"came as node {node} of {nodes}, but node 0's topology has 2 nodes" in str(failed)


@pytest.mark.parametrize(("node", "nodes"), [(1, 2), (0, 3)])
def test_a_stranger_does_not_disturb_a_job_that_runs(node: int, nodes: int) -> None:
    with job(2) as (service, members):
        exchange(members)
        refused = hello(service.port, node, nodes).messages()
        assert refused[-1]["type"] == "failed"
        assert exchange(members, "next") == [[0, 1]] * 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\xff\xfe\n",
        b"5\n",
        b"null\n",
        b"[" * 3000 + b"\n",
        b'{"type": "exchange", "name": "meet", "value": 7, "deadline": 0}\n',
        b'{"type": "hello", "node": Infinity, "nodes": 2, "host": "x", "session": "x"}\n',
        b'{"type": "hello"}\n',
        b"x" * 200_000,
    ],
)
def test_garbage_on_the_port_does_not_disturb(garbage: bytes) -> None:
    with job(2) as (service, members):
        stranger = socket.create_connection(("127.0.0.1", service.port), timeout=SOON)
        with contextlib.suppress(OSError):  # it may be cut off before it has said all
            stranger.sendall(garbage)
            stranger.makefile("rb").read()  # to the end: it is dropped
        stranger.close()
        assert exchange(members) == [[0, 1]] * 2
        assert exchange(members, "next") == [[0, 1]] * 2


# --- lines that break ---------------------------------------------------------------------------


def test_a_silent_member_is_named() -> None:
    with coordinator(2, silence=0.6) as service, member(service, 0, 2, silence=0.6) as zero:
        ghost = hello(service.port, 1, 2)
        started = time.monotonic()
        failed = told(zero)
        assert 0.6 <= time.monotonic() - started < 3
        ghost.close()
    assert failed.failure["type"] == "NodeLost"
    assert failed.failure["node"] == 1
    assert "node 1 (ghost, 127.0.0.1) is lost: nothing was heard of it" in str(failed)


def test_a_broken_connection_is_named() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        hello(service.port, 1, 2).close()
        failed = told(zero)
    assert "node 1 (ghost, 127.0.0.1) is lost: its connection broke" in str(failed)
    assert "machine runs" in failed.failure["remedy"]


def test_a_member_that_talks_nonsense_is_lost() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero:
        ghost = hello(service.port, 1, 2)
        ghost.say(b"what?")
        assert "node 1 (ghost, 127.0.0.1) is lost: it sent what is no message" in str(told(zero))
        ghost.close()


def test_a_node_that_leaves_early_is_not_waited_for() -> None:
    with job(3) as (_, (zero, one, two)):
        exchange([zero, one, two])
        one.close()
        started = time.monotonic()
        results = together(
            lambda: zero.exchange("end of the run", 0, 600),
            lambda: two.exchange("end of the run", 2, 600),
        )
        assert time.monotonic() - started < 2
    for failed in results:
        assert failed.failure["node"] == 1
        assert "left before the end" in str(failed)


def test_leaving_after_the_last_exchange_is_no_failure() -> None:
    with job(2) as (_, (zero, one)):
        exchange([zero, one])
        one.close()
        time.sleep(0.5)
        assert zero.check() is False


def test_a_coordinator_that_is_gone_is_no_contact() -> None:
    with coordinator(2) as service, member(service, 1, 2) as one:
        service.stop()
        failed = told(one)
        assert failed.failure["type"] == "NoContact"
        assert failed.failure["node"] == 1
        assert "has lost contact with node 0" in str(failed)
        assert "see whether node 0 runs" in failed.failure["remedy"]
        # The coordinator's word on a failure is missing then, and the node's own remains.
        assert str(one.report(broken(1, "what happened here"))) == "what happened here"


def test_a_silent_coordinator_is_no_contact() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Member(1, 2, 0.5, SECRET)
        served: list[socket.socket] = []

        def welcome_and_freeze() -> None:
            accepted, _ = server.accept()
            served.append(accepted)
            challenge = Challenge(SECRET)
            accepted.sendall(challenge.line)
            _, answer = challenge.judge(accepted.recv(LINE_BYTES).removesuffix(b"\n"))
            accepted.sendall(answer)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(welcome_and_freeze)
            one.connect("127.0.0.1", server.getsockname()[1], SOON)
            done.result()
        started = time.monotonic()
        with pytest.raises(JobFailed, match="node 1 has lost contact with node 0"):
            one.exchange(MEET, 1, 60)
        assert time.monotonic() - started < 3
        one.close()
        served[0].close()


def test_a_port_in_use() -> None:
    with coordinator(1) as service, pytest.raises(UserError) as caught:
        Coordinator(2, service.port, SILENCE, SECRET)
    assert f"node 0: cannot listen on port {service.port}: Address already in use" in str(
        caught.value
    )
    assert f"topology.master=HOST:{service.port + 1}" in caught.value.remedy


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError) as caught:
        Member(1, 2, SILENCE, SECRET).connect("no-such-host.invalid", 1, 0.3)
    assert "node 1: topology.master=no-such-host.invalid does not resolve" in str(caught.value)
    assert "give node 0's address" in caught.value.remedy


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError) as caught:
        Member(1, 2, SILENCE, SECRET).connect("127.0.0.1", port, 0.3)
    assert f"node 1: node 0 at 127.0.0.1:{port} did not answer within 0 s" in str(caught.value)
    assert "Connection refused" in str(caught.value)


def test_a_coordinator_that_comes_late_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    one = Member(1, 2, SILENCE, SECRET)
    services: list[Coordinator] = []

    def serve() -> None:
        services.append(Coordinator(2, port, SILENCE, SECRET))
        services[0].start()

    timer = threading.Timer(0.5, serve)
    timer.start()
    assert one.connect("127.0.0.1", port, SOON) == "127.0.0.1"
    one.close()
    timer.join()
    services[0].stop()


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cause_first", [True, False])
def test_the_cause_wins_over_consequences(cause_first: bool) -> None:
    cause = broken(1, "the disk is full")
    consequence = broken(0, "connection closed by peer", consequence=True)
    with job(3) as (_, (zero, one, two)):
        exchange([zero, one, two])

        def late(member: Member, failure: dict[str, Any]) -> JobFailed:
            time.sleep(0.1)
            return member.report(failure)

        if cause_first:
            calls = [lambda: one.report(cause), lambda: late(zero, consequence)]
        else:
            calls = [lambda: zero.report(consequence), lambda: late(one, cause)]
        results = together(*calls, lambda: told(two))
    assert [failed.failure for failed in results] == [cause] * 3
    assert not any(failed.again for failed in results)


def test_the_first_of_consequences_counts_where_there_is_no_cause() -> None:
    with job(2) as (_, (zero, one)):
        exchange([zero, one])
        zero.tell(broken(0, "first", consequence=True))
        time.sleep(0.1)
        assert str(one.report(broken(1, "second", consequence=True))) == "first"
        assert str(told(zero)) == "first"


def test_after_a_failure_all_are_asked_who_holds_up_others() -> None:
    with job(2) as (_, (zero, one)):
        exchange([zero, one])
        assert one.check() is False
        zero.tell(broken(0, "waited too long", consequence=True))
        ends = time.monotonic() + SOON
        while not one.check():
            assert time.monotonic() < ends
            time.sleep(0.01)
        one.tell(broken(1, "rank 3 is frozen"))
        assert str(told(zero)) == "rank 3 is frozen"
        assert str(told(one)) == "rank 3 is frozen"


def test_a_failure_ends_an_exchange() -> None:
    with job(2) as (_, (zero, one)):
        results = together(
            lambda: zero.exchange("preflight", 0, 60), lambda: one.report(broken(1, "no Paddle"))
        )
        assert [str(failed) for failed in results] == ["no Paddle"] * 2


def test_the_last_word_of_node_0_is_passed_on() -> None:
    with coordinator(2) as service, member(service, 0, 2) as zero, member(service, 1, 2) as one:
        exchange([zero, one])
        zero.tell(broken(0, "asked to end by SIGTERM", fatal=True))
        zero.close()
        service.stop()
        assert str(told(one)) == "asked to end by SIGTERM"


def test_what_comes_after_the_end_changes_nothing() -> None:
    with job(2, restarts=3) as (service, (zero, one)):
        exchange([zero, one])
        results = together(lambda: zero.report(broken(0, "fatal", fatal=True)), lambda: told(one))
        assert [(str(failed), failed.again) for failed in results] == [("fatal", False)] * 2
        one.close()
        zero._send(type="failed", failure=broken(0, "something else"))
        time.sleep(0.6)
        with member(service, 1, 2) as late:
            failed = told(late)
        assert (str(failed), failed.again) == ("fatal", False)


# --- restarts -----------------------------------------------------------------------------------


def test_a_job_starts_again_as_often_as_allowed() -> None:
    with job(2, restarts=2) as (_, (zero, one)):
        for attempt in range(3):
            assert exchange([zero, one]) == [[0, 1]] * 2
            results = together(
                lambda attempt=attempt: zero.report(broken(0, f"failure {attempt}")),  # type: ignore[misc]
                lambda: told(one),
            )
            assert [str(failed) for failed in results] == [f"failure {attempt}"] * 2
            assert [failed.again for failed in results] == [attempt < 2] * 2
            zero.expect_another_attempt()
            one.expect_another_attempt()


def test_a_failure_that_would_come_again_is_not_tried_again() -> None:
    with job(2, restarts=2) as (_, (zero, one)):
        exchange([zero, one])
        results = together(
            lambda: zero.report(broken(0, "no such folder", fatal=True)), lambda: told(one)
        )
        assert [failed.again for failed in results] == [False] * 2


def test_a_member_that_comes_back_is_taken_into_the_next_attempt() -> None:
    with coordinator(2, restarts=1) as service, member(service, 0, 2) as zero:
        ghost = hello(service.port, 1, 2)
        ghost.say({"type": "exchange", "name": "meet", "value": 1, "deadline": 5})
        assert zero.exchange(MEET, 0, SOON) == [0, 1]
        ghost.close()
        with member(service, 1, 2) as back:  # before node 0 has even been told

            def next_attempt() -> list[Any]:
                failed = told(zero)
                assert failed.again
                assert "its connection broke" in str(failed)
                zero.expect_another_attempt()
                return zero.exchange(MEET, "zero", SOON)

            results = together(next_attempt, lambda: back.exchange(MEET, "back", SOON))
            assert results == [["zero", "back"]] * 2
            assert exchange([zero, back], "next") == [[0, 1]] * 2


def test_a_member_that_comes_back_late_is_taken_in() -> None:
    with coordinator(2, restarts=1) as service, member(service, 0, 2) as zero:
        hello(service.port, 1, 2).close()
        assert told(zero).again
        zero.expect_another_attempt()

        def come_back() -> Any:
            time.sleep(0.5)
            with member(service, 1, 2) as back:
                return back.exchange(MEET, "back", SOON)

        results = together(lambda: zero.exchange(MEET, "zero", SOON), come_back)
        assert results == [["zero", "back"]] * 2


def test_a_member_that_connects_anew_is_not_its_own_twin() -> None:
    with coordinator(2, restarts=1) as service, member(service, 0, 2) as zero:
        one = Member(1, 2, SILENCE, SECRET)
        old = hello(service.port, 1, 2, session=one._session)  # nobody has noticed that it broke
        time.sleep(0.1)
        one.connect("127.0.0.1", service.port, SOON)

        def next_attempt() -> list[Any]:
            failed = told(zero)
            assert failed.again
            assert "is lost: it lost contact, and has come back" in str(failed)
            zero.expect_another_attempt()
            return zero.exchange(MEET, 0, SOON)

        results = together(next_attempt, lambda: one.exchange(MEET, 1, SOON))
        assert results == [[0, 1]] * 2
        one.close()
        old.close()


def test_a_successor_of_a_member_that_has_gone_silent_is_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "PRESENT_SECONDS", 0.3)
    with coordinator(2, silence=60, restarts=1) as service, member(service, 0, 2) as zero:
        gone = hello(service.port, 1, 2)
        time.sleep(0.5)
        with member(service, 1, 2) as back:
            failed = told(zero)
            assert failed.again
            assert "has come in its place" in str(failed)
            assert told(back).again  # it was not in the exchange yet
            zero.expect_another_attempt()
            back.expect_another_attempt()
            assert exchange([zero, back]) == [[0, 1]] * 2
        gone.close()


def test_words_of_an_attempt_that_is_over_do_not_reach_the_next() -> None:
    with job(2, restarts=1) as (_, (zero, one)):
        exchange([zero, one])
        failed = zero.report(broken(0, "rank 0 died"))
        assert failed.again
        # Node 1 has not looked yet, and still speaks of the first attempt.
        one._send(type="exchange", name="port", value="old", deadline=0.5)
        one._send(type="failed", failure=broken(1, "stale", fatal=True))
        zero.expect_another_attempt()
        assert told(one).again
        one.expect_another_attempt()
        assert exchange([zero, one]) == [[0, 1]] * 2
        time.sleep(0.8)  # past the old exchange's deadline
        results = together(
            lambda: zero.exchange("port", "new 0", SOON),
            lambda: one.exchange("port", "new 1", SOON),
        )
        assert results == [["new 0", "new 1"]] * 2
