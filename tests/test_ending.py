"""A signal ends a process in time, whatever holds it, and with the right status."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes import ending, processes

ROOT = Path(__file__).resolve().parents[1]
# Each `work` is one way to be busy. `words` are written by the last words.
PROGRAM = """
import ctypes, os, signal, sys, threading, time
from recipes.ending import Interrupted, Overdue, Watch, status_of

kind, grace, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3]
watch = Watch().start()

def held():  # a library waits for a lock that is never free, whatever signals come
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)

def stubborn():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def lock():
    threading.Lock().acquire()  # and never again
    waiting = threading.Lock()
    waiting.acquire()
    waiting.acquire()

def fifo():
    os.mkfifo(folder + "/fifo")
    open(folder + "/fifo").read()

def cleanup():
    try:
        time.sleep(600)
    finally:
        held()

def child():  # that is halted, and waited for
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    stubborn()

def leaving():  # waits for a child that is halted
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    with watch.asking(lambda: None, grace / 4, "ending after this step"):
        try:
            time.sleep(600)
        finally:
            os.waitpid(child, 0)

def thread():  # Python would wait for it at the end
    threading.Thread(target=held).start()
    time.sleep(600)

def steps():  # a training: stops after its step
    asked = []
    with watch.asking(lambda: asked.append(1), grace / 2, "ending after this step"):
        while not asked:
            time.sleep(0.05)
        open(folder + "/saved", "w").close()

def long_steps():  # that does not get to the end of its step
    with watch.asking(lambda: None, grace / 2, "ending after this step"):
        time.sleep(600)

def last_words():
    open(folder + "/words", "w").close()

try:
    with watch.run(grace, "ending", last_words):
        print("ready", flush=True)
        globals()[kind]()
except Interrupted as interrupt:
    status = status_of(interrupt.number)
    print(f"politely by {interrupt}", flush=True)
watch.leave(status)
sys.exit(status)
"""
POLITELY = ["fifo", "lock", "steps", "long_steps", "thread"]
BY_FORCE = ["held", "stubborn", "cleanup", "child"]


@dataclass
class Started:
    process: subprocess.Popen[str]
    folder: Path

    def end(self, seconds: float) -> str:
        output, errors = self.process.communicate(timeout=seconds)
        assert "Traceback" not in errors
        return output


@contextlib.contextmanager
def started(kind: str, folder: Path, grace: float = 1.0, *wrapper: str) -> Iterator[Started]:
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-c", PROGRAM, kind, str(grace), str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)  # until it is in what holds it
        yield Started(process, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("kind", [*POLITELY, *BY_FORCE])
def test_a_signal_ends_the_process_in_time(kind: str, tmp_path: Path) -> None:
    number = ending.POLITE[random.randrange(len(ending.POLITE))]
    with started(kind, tmp_path) as run:
        began = time.monotonic()
        run.process.send_signal(number)
        said = run.end(15)
        took = time.monotonic() - began
    assert run.process.returncode == 128 + number
    forced = kind in BY_FORCE
    if forced or kind == "long_steps":  # others may be faster than the acknowledgement
        assert said.startswith(f"{number.name}: ending")
    assert ("by force" in said) == forced
    assert (f"politely by {number.name}" in said) == (not forced)
    assert (tmp_path / "words").exists() == forced
    assert (tmp_path / "saved").exists() == (kind == "steps")
    limit = 1.0 + ending.LEAVING_SECONDS if kind == "thread" else 1.5
    assert took < limit + 5  # a busy machine


@pytest.mark.parametrize("kind", BY_FORCE)
def test_the_second_signal_ends_it_at_once(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path, grace=600.0) as run:
        run.process.send_signal(signal.SIGINT)
        time.sleep(ending.SAME_SECONDS + 0.3)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        said = run.end(10)
    assert run.process.returncode == 128 + signal.SIGINT  # what asked for the end
    assert "ended at once by SIGTERM" in said
    assert (tmp_path / "words").exists()


@pytest.mark.parametrize("kind", ["steps", "lock"])
def test_signals_at_one_instant_are_one_request(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path, grace=20.0) as run:
        os.kill(run.process.pid, signal.SIGSTOP)  # so that they are taken at once
        for number in ending.POLITE:
            os.kill(run.process.pid, number)
        os.kill(run.process.pid, signal.SIGCONT)
        said = run.end(15)
    assert run.process.returncode - 128 in ending.POLITE
    assert said.count("politely by") == 1
    assert "at once by" not in said
    assert (tmp_path / "saved").exists() == (kind == "steps")


def test_a_child_that_does_not_end_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with started("leaving", tmp_path, grace=8.0) as run:
        run.process.send_signal(signal.SIGTERM)
        said = run.end(15)
    assert run.process.returncode == 143
    assert "politely by SIGTERM" in said
    assert "by force" not in said


def test_an_error_on_the_way_out_is_the_interruption() -> None:
    try:
        try:
            raise ending.Interrupted(signal.SIGTERM)
        finally:
            raise KeyError("a decoder died")
    except KeyError as error:
        found = ending.interrupt_behind(error)
    assert found is not None
    assert found.number == signal.SIGTERM
    assert ending.interrupt_behind(KeyError()) is None


def test_nobody_is_left_where_a_child_is_halted(tmp_path: Path) -> None:
    with started("child", tmp_path) as run:
        (child,) = processes.descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        run.end(15)
        assert processes.parent_of(child) is None


def test_a_hangup_is_nothing_under_nohup(tmp_path: Path) -> None:
    with started("steps", tmp_path, 1.0, "nohup") as run:
        run.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        run.end(10)
    assert run.process.returncode == 128 + signal.SIGTERM


LATE = """
import os, signal, sys
from recipes.ending import Watch
class Late:
    def __init__(self, send=os.kill, pid=os.getpid(), numbers=tuple(map(int, sys.argv[1:]))):
        self.send = send, pid, numbers
    def __del__(self):
        send, pid, numbers = self.send
        for number in numbers:
            send(pid, number)
late = Late()
watch = Watch().start()
watch.leave(3)
sys.exit(3)
"""


def test_a_signal_while_python_ends_changes_nothing() -> None:
    numbers = [str(int(number)) for number in ending.POLITE]
    ended = subprocess.run([sys.executable, "-c", LATE, *numbers], cwd=ROOT, check=False)
    assert ended.returncode == 3


EARLY = """
import sys, time
from recipes.ending import Watch
Watch().start()
print("ready", flush=True)
if sys.argv[1] == "python":
    time.sleep(600)
import ctypes
lock = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("number", ending.POLITE)
@pytest.mark.parametrize("held", ["python", "library"])
def test_before_there_is_a_run_it_is_one_line(number: signal.Signals, held: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EARLY, held],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert errors == ""
    assert len(output.splitlines()) == 1
    assert number.name in output


STUCK = """
import sys, threading, time
from recipes.ending import Overdue, Watch
watch, began = Watch().start(), time.monotonic()
def last_words(): print("last words", flush=True)
def held():
    import ctypes
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
def wait():
    threading.Event().wait()
try:
    with watch.run(600, "ending", last_words), watch.deadline(
        lambda: time.monotonic() - began > 0.5
    ):
        globals()[sys.argv[1]]()
except Overdue:
    print("given up", flush=True)
time.sleep(6)  # what comes after is not ended
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "status", "said"), [("wait", 0, "given up\nwent on\n"), ("held", 1, "last words\n")]
)
def test_a_deadline_ends_what_does_not_move_on(kind: str, status: int, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, said, "")


def test_what_saving_leaves_is_enough_for_the_ends_of_the_processes() -> None:
    for grace in (0.5, 2.0, 9.0, 30.0, 600.0):
        assert 0 < ending.saving_seconds(grace) < grace
    assert ending.saving_seconds(30.0) == 26.5
