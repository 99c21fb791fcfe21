"""Whose a run folder is: refused to a second run, free after any end, on any file system."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from claims import ROOT, held_elsewhere

from recipes import claim
from recipes.claim import Claimed
from recipes.config import UserError


@pytest.fixture(params=[True, False], ids=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A file system with locks, and one without, where beats are fast enough for a test."""
    if not request.param:

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", refuse)
        monkeypatch.setattr(fcntl, "fcntl", refuse)
        monkeypatch.setattr(claim, "STILL_SECONDS", claim.BEAT_SECONDS + 1)
    return bool(request.param)


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path, locks: bool) -> None:
    with held_elsewhere(tmp_path / "run", locks=locks) as other:
        with pytest.raises(Claimed) as caught, claim.held(tmp_path / "run"):
            pytest.fail("both hold it")
        told = rf"process {other.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"
        assert re.search(told, caught.value.message)
        assert str(tmp_path / "run") in caught.value.message
        assert "hydra.run.dir=" in caught.value.remedy
        holder = claim.holder_of(tmp_path / "run")
        assert holder is not None
        assert holder.pid == other.pid
    assert claim.holder_of(tmp_path / "run") is None
    with claim.held(tmp_path / "run"):
        pass


def test_a_disk_without_room_for_the_claim_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(UserError, match="No space left"), claim.held(tmp_path / "run"):
        pytest.fail("held")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_killed_run_does_not_hold_it_any_more(tmp_path: Path, locks: bool) -> None:
    with held_elsewhere(tmp_path, locks=locks) as other:
        other.kill()
        other.wait()
        began = time.monotonic()
        with claim.held(tmp_path):
            assert other.poll() is not None
        waited = time.monotonic() - began
        assert waited < 1 if locks else waited < 2 * claim.BEAT_SECONDS


def test_ranks_that_outlive_their_parent_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "RANKS_SECONDS", 0.3)
    with held_elsewhere(tmp_path) as parent:
        with held_elsewhere(tmp_path, how="shared_by_rank"):
            with held_elsewhere(tmp_path, how="shared_by_rank"):  # of another node, say
                parent.kill()
                parent.wait()
                with (
                    pytest.raises(Claimed, match=rf"ranks of .*process {parent.pid} on"),
                    claim.held(tmp_path),
                ):
                    pytest.fail("ranks still write there")
            assert claim.holder_of(tmp_path) is not None
        with claim.held(tmp_path):  # as soon as they are gone
            pass


def test_one_waits_for_ranks_that_are_about_to_end(tmp_path: Path) -> None:
    with (
        held_elsewhere(tmp_path) as parent,
        held_elsewhere(tmp_path, how="shared_by_rank") as rank,
    ):
        parent.kill()
        parent.wait()
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.5; kill -9 {rank.pid}"])
        with claim.held(tmp_path):
            assert rank.wait(1) < 0


def test_what_a_process_forks_does_not_hold_it(tmp_path: Path) -> None:
    """Decoders may outlive a killed run for a moment, and write nothing."""
    code = (
        "import os, sys, time; from pathlib import Path; from recipes import claim\n"
        f"with claim.held(Path({str(tmp_path)!r})):\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    print('forked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        with claim.held(tmp_path):
            os.killpg(process.pid, 0)  # the forked one lives
    finally:
        os.killpg(process.pid, 9)


def test_of_many_that_come_together_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from recipes import claim\n"
        "sys.stdin.readline()\n"
        "try:\n"
        f"    with claim.held(Path({str(tmp_path / 'run')!r})): time.sleep(1.5)\n"
        "except claim.Claimed: sys.exit(2)"
    )
    command = [sys.executable, "-c", code]
    everyone = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for each in everyone:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    assert sorted(each.wait() for each in everyone) == [0, 2, 2, 2, 2, 2]


@pytest.mark.usefixtures("locks")
def test_an_unused_folder_is_left_empty_and_a_used_one_keeps_the_file(tmp_path: Path) -> None:
    with claim.held(tmp_path / "a" / "run"):
        pass
    assert list((tmp_path / "a" / "run").iterdir()) == []
    with claim.held(tmp_path):
        (tmp_path / "config.yaml").write_text("")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "config.yaml", claim.FILE}
    assert (tmp_path / claim.FILE).read_bytes() == b""


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with (
        pytest.raises(UserError, match="/proc/none/run cannot be written"),
        claim.held(Path("/proc/none/run")),
    ):
        pass


def test_whatever_the_file_says_the_message_is_one_line(tmp_path: Path) -> None:
    chance = random.Random(0)
    good = json.dumps({"host": "h", "pid": 1, "since": "2026-01-01T00:00:00"}).encode()
    with held_elsewhere(tmp_path):
        for _ in range(100):
            data = bytearray(good)
            for _ in range(3):
                data[chance.randrange(len(data))] = chance.randrange(256)
            (tmp_path / claim.FILE).write_bytes(data * chance.choice((1, 1, 1000)))
            with pytest.raises(Claimed) as caught, claim.held(tmp_path):
                pass
            assert caught.value.message.isprintable()


def test_a_link_in_place_of_the_claim_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / claim.FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"), claim.held(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"
