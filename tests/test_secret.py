"""The secret of a job: where it comes from, and the proof and the seal that are made with it."""

from __future__ import annotations

import itertools
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.config import UserError
from recipes.launcher_environment import without_foreign
from recipes.rendezvous import secret
from recipes.rendezvous.authentication import (
    LINE_BYTES,
    Answer,
    Challenge,
    Forged,
    OtherSecret,
    Sealer,
    Unproven,
)
from recipes.rendezvous.secret import FILE_VARIABLE, VARIABLE, Secret

OURS = Secret.of("the secret of this job")


# --- where it comes from ------------------------------------------------------------------------


def test_it_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("the secret of this job\n")
    assert secret.find({VARIABLE: "the secret of this job"}) == OURS
    assert secret.find({FILE_VARIABLE: str(file)}) == OURS
    both = {VARIABLE: "the secret of another", FILE_VARIABLE: str(file)}
    assert secret.find(both) == Secret.of("the secret of another")
    assert secret.find({}) is None
    assert secret.find({VARIABLE: "", FILE_VARIABLE: ""}) is None
    assert OURS.key.hex() not in repr(OURS)


def test_going_without_has_to_be_said() -> None:
    found = secret.find({VARIABLE: "none"})
    assert found is not None
    assert found.open
    assert not OURS.open


@pytest.mark.parametrize(("name", "where"), [(VARIABLE, ""), (FILE_VARIABLE, "what ")])
def test_what_can_be_guessed_is_refused_and_not_shown(
    name: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("hunter2")
    given = "hunter2" if name == VARIABLE else str(tmp_path / "secret")
    with pytest.raises(UserError) as caught:
        secret.find({name: given})
    assert f"{name}{f': {where}{given} holds' if where else ''} has 7 characters" in str(
        caught.value
    )
    assert "openssl rand -hex 16" in caught.value.remedy
    assert "hunter2" not in f"{caught.value}{caught.value.remedy}"


def test_the_first_of_many_nodes_makes_the_file_for_all(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "secret"
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(secret.find, [{FILE_VARIABLE: str(path)}] * 64))
    assert len(found) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "binary", "large", "below a file"])
def test_a_file_that_is_none_is_told(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "binary":
        path.write_bytes(b"\xff" * 40)
    elif kind == "large":
        path.write_text("x" * 5000)
    else:
        path.write_text("x")
        path /= "secret"
    with pytest.raises(UserError) as caught:
        secret.find({FILE_VARIABLE: str(path)})
    assert str(path) in str(caught.value)


def test_without_one_the_message_carries_a_fresh_one() -> None:
    first, second = secret.missing(2), secret.missing(2)
    assert f"{VARIABLE} is not set" in str(first)
    assert f"export {VARIABLE}=" in first.remedy
    assert first.remedy != second.remedy


def test_ranks_do_not_get_it() -> None:
    environment = {VARIABLE: "x" * 16, FILE_VARIABLE: "/x", "HOME": "/"}
    assert without_foreign(environment) == {"HOME": "/"}


# --- the proof ----------------------------------------------------------------------------------


def answer_of(known: Secret, challenge: Challenge) -> Answer:
    return Answer(known, challenge.line.removesuffix(b"\n"))


def test_two_that_know_it_understand_each_other_and_nobody_else() -> None:
    challenge = Challenge(OURS)
    answer = answer_of(OURS, challenge)
    coordinator, welcome = challenge.judge(answer.line.removesuffix(b"\n"))
    member = answer.judge(welcome.removesuffix(b"\n"))
    for words in (b"first", b"second", b""):
        assert coordinator.open(member.seal(words).removesuffix(b"\n")) == words
        assert member.open(coordinator.seal(words).removesuffix(b"\n")) == words
    for line in (challenge.line, answer.line, welcome):
        assert len(line) <= LINE_BYTES
        assert OURS.key.hex().encode() not in line


def test_another_secret_is_refused_at_either_end() -> None:
    other = Secret.of("the secret of another job")
    challenge = Challenge(OURS)
    with pytest.raises(OtherSecret):
        challenge.judge(answer_of(other, challenge).line.removesuffix(b"\n"))
    answer = answer_of(OURS, challenge)
    for reply in (b"refused", b"welcome " + b"0" * 64, b""):
        with pytest.raises(OtherSecret):
            answer.judge(reply)


def test_a_proof_is_worth_nothing_elsewhere() -> None:
    challenge = Challenge(OURS)
    answer = answer_of(OURS, challenge)
    line = answer.line.removesuffix(b"\n")
    challenge.judge(line)
    with pytest.raises(OtherSecret):  # on another connection
        Challenge(OURS).judge(line)
    with pytest.raises(OtherSecret):  # sent back to who made it
        answer.judge(b"welcome " + line.split()[2])


@given(st.binary(max_size=200))
def test_any_bytes_are_no_proof(data: bytes) -> None:
    with pytest.raises(Unproven):
        Challenge(OURS).judge(data)
    with pytest.raises(Unproven):
        Answer(OURS, data)
    with pytest.raises(Unproven):
        answer_of(OURS, Challenge(OURS)).judge(data)


# --- the seal -----------------------------------------------------------------------------------


def test_lines_open_in_their_order_only() -> None:
    said = [b"one", b"two", b"three"]
    sealer = Sealer(b"key")
    lines = [sealer.seal(each).removesuffix(b"\n") for each in said]
    for order in itertools.product(range(3), repeat=3):
        opener, opened = Sealer(b"key"), []
        try:
            for each in order:
                opened.append(opener.open(lines[each]))
        except Forged:
            assert order != (0, 1, 2)
        assert opened == said[: len(opened)]


@given(st.binary(max_size=100), st.data())
def test_a_line_that_was_changed_does_not_open(content: bytes, data: st.DataObject) -> None:
    line = bytearray(Sealer(b"key").seal(content).removesuffix(b"\n"))
    line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Forged):
        Sealer(b"key").open(bytes(line))
    with pytest.raises(Forged):
        Sealer(b"another").open(bytes(line))
