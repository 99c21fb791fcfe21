"""One rank's life: its word to the parent, its threads, its errors."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes import config, telemetry, worker
from recipes.config import Config, ConfigError, TopologyConfig, UserError
from recipes.metering import NonFiniteLoss
from recipes.topology import Place

ROOT = Path(__file__).parent.parent
PLACE = Place(rank=5, world_size=8, local_rank=1, node=1)


def a_config(tmp_path: Path) -> Config:
    config.register_schema()
    return config.compose(ROOT / "conf", [f"hydra.run.dir={tmp_path}", "device=cpu"])[0]


# --- given_run


def test_a_rank_gets_its_parents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = a_config(tmp_path)
    made.epochs = 17
    (tmp_path / "config.yaml").write_text(config.dump(made))
    monkeypatch.setenv(worker.RUN_VARIABLE, "the/run")
    monkeypatch.setenv(worker.REPORTS_VARIABLE, str(tmp_path))
    # The command line is the parent's business then.
    assert worker.given_run(ROOT / "conf", ["epochs=0", "nonsense"]) == (made, Path("the/run"))


def test_without_a_parent_the_command_line_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(worker.RUN_VARIABLE, raising=False)
    config.register_schema()
    run = [f"hydra.run.dir={tmp_path / 'a'}"]
    found, folder = worker.given_run(ROOT / "conf", ["epochs=4", *run])
    assert (found.epochs, folder) == (4, tmp_path / "a")
    with pytest.raises(ConfigError, match="epochs=0"):
        worker.given_run(ROOT / "conf", ["epochs=0", *run])
    assert list(tmp_path.iterdir()) == []


def test_variables_of_a_run_that_has_ended_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker.RUN_VARIABLE, str(tmp_path))
    monkeypatch.setenv(worker.REPORTS_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=f"{worker.RUN_VARIABLE}=.* of a run that has ended"):
        worker.given_run(ROOT / "conf", [])


@pytest.mark.parametrize("task", ["preflight", "runs"])
def test_a_task_without_ranks_is_refused_to_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.delenv(worker.RUN_VARIABLE, raising=False)
    config.register_schema()
    with pytest.raises(UserError, match=f"task={task} has no ranks"):
        worker.given_run(ROOT / "conf", [f"task={task}", f"hydra.run.dir={tmp_path}"])


# --- threads

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@pytest.mark.parametrize(
    ("devices", "wanted", "before", "after"),
    [
        (1, None, {}, dict.fromkeys(NAMES, "6")),
        (4, None, {}, dict.fromkeys(NAMES, "1")),
        (2, None, {}, dict.fromkeys(NAMES, "3")),
        (99, None, {}, dict.fromkeys(NAMES, "1")),
        (2, None, {"MKL_NUM_THREADS": "9"}, dict.fromkeys(NAMES, "3") | {"MKL_NUM_THREADS": "9"}),
        (2, 5, {"OMP_NUM_THREADS": "9", "PATH": "/"}, dict.fromkeys(NAMES, "5") | {"PATH": "/"}),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    wanted: int | None,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    made = Config(topology=TopologyConfig(1, devices), threads=wanted)
    worker.set_threads(made, before)
    assert before == after


# --- describe and the result of a failed run


def test_a_mistake_of_the_users_has_no_traceback() -> None:
    for error in (UserError("what", "how"), ConfigError("what"), NonFiniteLoss("what", "how")):
        found = worker.describe(error, PLACE)
        assert abs(found.pop("time") - time.time()) < 5
        assert found == {
            "node": 1,
            "rank": 5,
            "type": type(error).__name__,
            "message": "what",
            "remedy": error.remedy,
            "traceback": None,
            "consequence": False,
            "fatal": True,  # another attempt would make the same mistake
        }


def test_any_other_error_has_its_whole_chain() -> None:
    try:
        try:
            os.environ["NO_SUCH_VARIABLE"]
        except KeyError as error:
            raise RuntimeError("ünwanted\nsecond line") from error
    except RuntimeError as error:
        found = worker.describe(error, PLACE)
    assert (found["type"], found["message"]) == ("RuntimeError", "ünwanted\nsecond line")
    assert "KeyError: 'NO_SUCH_VARIABLE'" in found["traceback"]
    assert "test_worker.py" in found["traceback"]
    assert "traceback" in found["remedy"]
    assert json.loads(json.dumps(found)) == found


def test_a_failed_result_keeps_what_result_json_holds(tmp_path: Path) -> None:
    made = Config(topology=TopologyConfig(2, 4))
    failure = worker.describe(UserError("what", "how"), PLACE)
    telemetry.Result.untrained(made.shape, 1.5, "failed", error=worker.error_of(failure)).write(
        telemetry.RunFolder(tmp_path)
    )
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["status"] == "failed"
    assert (found["topology"], found["world_size"], found["wall_seconds"]) == ("2x4", 8, 1.5)
    assert found["error"] == {
        "node": 1,
        "rank": 5,
        "type": "UserError",
        "message": "what",
        "remedy": "how",
    }


# --- reports


def test_reports_are_read_back_by_kind_and_rank(tmp_path: Path) -> None:
    assert worker.read_reports(tmp_path, "started") == {}
    for rank in (0, 3, 12):
        worker.write_report(tmp_path, rank, {"pid": rank + 100}, "started")
    failure = worker.describe(RuntimeError("ünlesbar \x1b"), PLACE)
    worker.write_report(tmp_path, 3, failure, "failed")
    worker.write_report(tmp_path, 3, failure | {"rank": 4}, "failed")  # the last word counts
    assert worker.read_reports(tmp_path, "started") == {r: {"pid": r + 100} for r in (0, 3, 12)}
    assert worker.read_reports(tmp_path, "failed") == {3: failure | {"rank": 4}}
    assert worker.read_reports(tmp_path, "finished") == {}


def test_a_report_is_seen_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="disk full"):
            worker.write_report(tmp_path, 0, {"pid": 1}, "started")
    assert worker.read_reports(tmp_path, "started") == {}


@pytest.mark.parametrize("parent", [True, False])
@pytest.mark.parametrize(
    ("error", "shown"), [(None, ""), (UserError("what", "how"), ""), (KeyError("x"), "KeyError")]
)
def test_a_rank_leaves_word_of_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parent: bool,
    error: Exception | None,
    shown: str,
) -> None:
    def execute(*_: Any) -> None:
        if error:
            raise error

    monkeypatch.setattr(worker, "execute", execute)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.delenv(worker.REPORTS_VARIABLE, raising=False)
    if parent:
        monkeypatch.setenv(worker.REPORTS_VARIABLE, str(tmp_path))
    first = Place(0, 2, 0, 0)
    status = worker.run_rank(Config(), tmp_path / "run", first)
    assert status == (1 if error else 0)
    said = capsys.readouterr()
    assert shown in said.err
    started = worker.read_reports(tmp_path, "started")
    failed = worker.read_reports(tmp_path, "failed")
    finished = worker.read_reports(tmp_path, "finished")
    assert list(started) == ([0] if parent else [])
    assert list(failed) == ([0] if parent and error else [])
    assert list(finished) == ([0] if parent and not error else [])
    result = tmp_path / "run" / "result.json"
    assert result.exists() == (error is not None and not parent)  # else the parent writes it
    if isinstance(error, UserError) and not parent:
        assert "[node0 rank0]" in said.out
        assert "what" in said.out
        assert "remedy: how" in said.out


# --- signals

SLEEPER = """
import signal, sys, time
from recipes import worker
def end(number, _):
    print("ended in good order", flush=True)
    sys.exit(3)
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, end)
worker.import_paddle()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("handler", "status", "said"),
    [("own", 3, "ended in good order\n"), ("default", -signal.SIGTERM, "")],
)
def test_sigterm_means_what_it_did_before_paddle_was_imported(
    handler: str, status: int, said: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, handler],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"  # nothing of Paddle's comes before
        process.terminate()
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output, errors) == (status, said, "")


ORPHAN = """
import subprocess, sys, time
child = "from recipes import worker; worker.die_with_parent(); print('up', flush=True);"
child += "import time; time.sleep(60)"
started = subprocess.Popen([sys.executable, "-c", child])
print(started.pid, flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        try:
            assert select.select([child], [], [], 20)[0], "the child outlived its parent"
        finally:
            os.close(child)
    finally:
        parent.kill()
        parent.wait()
