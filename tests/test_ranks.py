"""This node's ranks: their logs, and the verdict on a failure."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import launch, telemetry, worker
from recipes.config import Config, TopologyConfig, UserError
from recipes.progress import RECORD
from recipes.pulse import Phase, SharedPulse
from recipes.ranks import RankLog, Ranks
from recipes.topology import Place

PLACE = Place(rank=1, world_size=4, local_rank=1, node=0)


# --- a rank's output


def a_log(folder: Path) -> RankLog:
    return RankLog(PLACE, folder / "workerlog.1", io.StringIO())


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    ends=st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=1),
    cuts=st.lists(st.integers(0, 400)),
    whole=st.booleans(),
)
def test_lines_survive_any_cut(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    ends: list[str],
    cuts: list[int],
    whole: bool,
) -> None:
    # An empty line after "\r" would make the two ends one, so such a line is not empty here.
    lines = [line or "-" for line in lines]
    text = "".join(line + ends[n % len(ends)] for n, line in enumerate(lines))
    if not whole:
        text, lines = text + "the rest", [*lines, "the rest"]
    data = text.encode()
    log = a_log(tmp_path_factory.mktemp("log"))
    found = list(log.new_lines())  # the file is not there yet
    at = 0
    for cut in sorted(cut for cut in cuts if cut < len(data)):
        with log.source.open("ab") as stream:
            stream.write(data[at:cut])
        at = cut
        found += log.new_lines()
    with log.source.open("ab") as stream:
        stream.write(data[at:])
    found += log.new_lines()
    found += log.new_lines(final=True)
    assert found == lines
    assert list(log.new_lines(final=True)) == []


def test_a_line_is_given_once_it_is_complete(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    for written, expected in (
        (b"half", []),
        (b" and half\nnext", ["half and half"]),
        (b" one\n\n", ["next one", ""]),
        (b"10 %\r20 %\r", ["10 %"]),
        (b"30 %\r\n", ["20 %", "30 %"]),
        (b"\xff\xfe\n", ["\ufffd\ufffd"]),
        (b"\xe2\x82", []),
        (b"\xac\x1e a \x0b\n", ["€\x1e a \x0b"]),  # not ends of a line, as `splitlines` has it
        (b"cut off \xe2\x82", []),
    ):
        with log.source.open("ab") as stream:
            stream.write(written)
        assert list(log.new_lines()) == expected
    assert list(log.new_lines(final=True)) == ["cut off \ufffd"]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    assert list(log.new_lines()) == []
    assert list(log.new_lines(final=True)) == []


def test_a_flood_of_output_is_taken_in_quickly(tmp_path: Path) -> None:
    log = a_log(tmp_path)
    log.source.write_bytes(b"0123456789abcdef\n" * 500_000 + b"x" * 10_000_000)
    began = time.process_time()
    assert sum(1 for _ in log.new_lines()) == 500_000
    (rest,) = log.new_lines(final=True)
    assert len(rest) == 10_000_000
    assert time.process_time() - began < 5


def test_what_concerns_a_person_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, targets, logs = a_job(tmp_path), [], []
    for rank in (0, 1):
        place = Place(rank, 2, rank, 0)
        log = RankLog(place, tmp_path / f"workerlog.{rank}", io.StringIO())
        log.source.write_text(
            f"{place.tag} 12:00:00 step 1\nbare words\n{place.tag} 12:00:00 warning: look\n"
            f'{RECORD}{{"call": "stop"}}\n{place.tag} cut'
        )
        targets.append(log.target)
        logs.append(log)
    job._logs = logs
    job._copy()
    job._copy(final=True)
    for rank, target in enumerate(targets):
        tag = f"[node0 rank{rank}]"
        assert isinstance(target, io.StringIO)
        assert target.getvalue() == (
            f"{tag} 12:00:00 step 1\n{tag} bare words\n{tag} 12:00:00 warning: look\n{tag} cut\n"
        )
    assert capsys.readouterr().out.splitlines() == [
        "[node0 rank0] 12:00:00 step 1",
        "[node0 rank0] 12:00:00 warning: look",
        "[node0 rank1] 12:00:00 warning: look",
        "[node0 rank0] cut",
    ]


# --- the cause of a failure


def a_job(folder: Path, devices: int = 4) -> Ranks:
    run = telemetry.RunFolder(folder / "run")
    job = Ranks(Config(topology=TopologyConfig(1, devices)), run)
    job._scratch = folder / "scratch"
    job._scratch.mkdir()
    (job._scratch / "launcher.log").write_text("")
    return job


def failed(job: Ranks, rank: int, error: Exception, at: float) -> None:
    report = worker.describe(error, Place(rank, 4, rank, 0)) | {"time": at}
    worker.write_report(job._scratch, rank, report, "failed")


GLOO = RuntimeError("[/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed")
STORE = RuntimeError("tcp_utils.cc:102 recv failed")
OWN = ValueError("my own fault")
USER = UserError("the disk is full", "make room")
HOST = OSError("Connection closed by peer")

Reports = list[tuple[int, Exception, float]]


@pytest.mark.parametrize(
    ("reports", "deaths", "finished", "told", "expected"),
    [
        # An error of its own comes before what it made of others, whoever wrote first.
        ([(0, GLOO, 1.0), (2, OWN, 2.0)], [0, 2], [], "", (2, "ValueError")),
        ([(0, OWN, 2.0), (3, USER, 1.0)], [3, 0], [], "", (3, "UserError")),
        ([(0, USER, 1.0), (3, OWN, 2.0)], [], [], "", (0, "UserError")),
        # A rank that was killed says nothing; the others lose it.
        ([(0, GLOO, 1.0), (1, HOST, 1.1)], [2, 0, 1], [], "", (2, "RankDied")),
        ([], [3, 0, 1], [], "", (3, "RankDied")),
        ([(0, GLOO, 1.0)], [0, 3, 1], [], "", (3, "RankDied")),
        # A rank that is done has not failed.
        ([(0, GLOO, 1.0)], [1, 2, 0], [1], "", (2, "RankDied")),
        ([(0, GLOO, 1.0)], [1, 0], [1], "", (0, "RuntimeError")),
        ([], [1, 2, 0], [0, 1, 2], "2 -6", (2, "RankDied")),
        ([], [1, 0], [0, 1], "", (1, "RankDied")),
        # No cause but one another.
        ([(1, STORE, 2.0), (0, GLOO, 1.0)], [0, 1], [], "", (0, "RuntimeError")),
        ([], [], [], "", (None, "LaunchError")),
    ],
)
def test_the_cause_of_a_failure(
    tmp_path: Path,
    reports: Reports,
    deaths: list[int],
    finished: list[int],
    told: str,
    expected: tuple[int, str],
) -> None:
    job = a_job(tmp_path)
    for rank, error, at in reports:
        failed(job, rank, error, at)
    for rank in finished:
        worker.write_report(job._scratch, rank, {}, "finished")
    job._deaths = {rank: 10.0 + order for order, rank in enumerate(deaths)}
    if told:
        tell(job, *map(int, told.split()))
    found = job.failure(1)
    assert (found["rank"], found["type"]) == expected
    # Whatever it is, it can be shown and stored.
    launch.report_failure(found, 0)
    telemetry.Result.untrained(Config().shape, 1.0, "failed", error=worker.error_of(found))


def tell(job: Ranks, rank: int, code: int) -> None:
    """As Paddle 3.3.1's launcher does."""
    (job._scratch / "launcher.log").write_text(
        "LAUNCH INFO 2026-01-01 00:00:00,000 Pod failed\nLAUNCH ERROR 2026-01-01 00:00:00,000 "
        f"Container failed !!!\nContainer rank {rank} status failed cmd ['python', '-u', "
        f"'train.py'] code {code} log /tmp/x/workerlog.{rank}\n"
    )


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-50, "was ended by signal 50"),
        (7, "ended with status 7"),
        (0, "ended without a word"),
    ],
)
@pytest.mark.parametrize("source", ["system", "launcher"])
def test_how_a_rank_ended_without_a_word(tmp_path: Path, source: str, code: int, how: str) -> None:
    job = a_job(tmp_path)
    job._deaths = {2: 1.0}
    if source == "system":
        job._statuses[2] = code
    elif code:
        tell(job, 2, code)
    found = job.failure(1)
    assert found["message"] == f"rank 2 {how}"
    assert "killed it" in found["remedy"]
    assert "rank-2.log" in found["remedy"]


def test_the_status_of_another_rank_is_not_taken(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    job._deaths = {12: 1.0}
    tell(job, 2, -9)
    assert job.failure(1)["message"] == "rank 12 ended without a word"


@pytest.mark.parametrize("running", [False, True])
def test_a_launcher_that_fails_says_why(tmp_path: Path, running: bool) -> None:
    job = a_job(tmp_path)
    (job._scratch / "launcher.log").write_bytes(b"early\n" * 2000 + b"\xff no such script\n")
    if running:
        job._pids[0] = 1
    found = job.failure(2)
    when = "while its ranks were running" if running else "before any rank started"
    assert found["message"] == f"paddle.distributed.launch ended with status 2 {when}"
    assert found["traceback"].endswith("\ufffd no such script\n")
    assert len(found["traceback"]) <= 3000


def test_a_killed_launcher_is_the_cause(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    job._deaths = {0: 1.0, 1: 1.1}
    found = job.failure(128 + 9)
    assert found["message"] == "node 0: paddle.distributed.launch was ended by SIGKILL"
    failed(job, 1, OWN, 0.5)
    assert job.failure(128 + 9)["type"] == "ValueError"


def test_a_rank_that_died_first_is_the_cause_of_later_errors(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    job._deaths = {3: 5.0, 1: 7.0}
    failed(job, 1, OWN, 6.0)
    assert (job.failure(1)["rank"], job.failure(1)["type"]) == (3, "RankDied")


def test_ranks_are_noted_in_the_order_of_their_ends(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    wait = "import sys, os; sys.stdin.read(); os._exit(int(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", wait, str(code)], stdin=subprocess.PIPE)
        for code in (0, 5, 0)
    ]
    try:
        for rank, process in enumerate(processes):
            worker.write_report(job._scratch, rank, {"pid": process.pid}, "started")
        job._watch()
        assert list(job._deaths) == []
        for rank in (2, 1):
            stdin = processes[rank].stdin
            assert stdin is not None
            stdin.close()
            ends = time.monotonic() + 20
            while rank not in job._deaths and time.monotonic() < ends:
                job._watch()
        processes[0].send_signal(signal.SIGKILL)
        ends = time.monotonic() + 20
        while len(job._deaths) < 3 and time.monotonic() < ends:
            job._watch()
        assert list(job._deaths) == [2, 1, 0]
        assert job.failure(1)["message"] == "rank 2 ended without a word"
        worker.write_report(job._scratch, 2, {}, "finished")
        assert job.failure(1)["message"] == "rank 1 ended with status 5"
        # A rank that is gone before anyone looked.
        processes[0].wait()
        worker.write_report(job._scratch, 3, {"pid": processes[0].pid}, "started")
        job._watch()
        assert list(job._deaths) == [2, 1, 0, 3]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for handle in job._handles.values():
            os.close(handle)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_stuck_rank_is_laid_to_another_node_only_where_there_is_one(
    tmp_path: Path, nodes: int
) -> None:
    made = Config(topology=TopologyConfig(nodes, 2))
    made.deadlines.step = 0.01
    job = Ranks(made, telemetry.RunFolder(tmp_path / "run"))
    job._scratch = tmp_path
    job._handles, job._pids = {0: -1}, {0: os.getpid()}
    SharedPulse(tmp_path / "pulse-0").mark(Phase.STEPPING, 3)
    time.sleep(0.1)
    found = job._overdue()
    assert found is not None
    assert found["message"].startswith("rank 0 has been in a training step for 0 s")
    assert ("another node" in found["remedy"]) == (nodes == 2)
    assert ("others" in found["message"]) == (nodes == 2)
    assert found["consequence"] == (nodes == 2)
