"""The parent of a run: starts the ranks, keeps their logs, and says how it ended.

It never imports Paddle for more than one process: `paddle.distributed.launch` starts the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from recipes import data, models, telemetry, worker
from recipes.config import Config, Machine, UserError, dump, uses_gpu
from recipes.progress import RECORD, NoDisplay, StepDisplay, TerminalDisplay
from recipes.topology import Place

# Seconds between a request to end and the end by force. `docker stop` allows ten in all.
GRACE_SECONDS = 6.0
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_LINE_END = re.compile(r"\r\n|\r|\n")

_log = logging.getLogger(__name__)


class Interrupted(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(config: Config, folder: Path) -> int:
    """Run the configured task on all its ranks.

    Args:
        config: checked.
        folder: the run folder.

    Returns:
        The exit status: 0 when the task completed, 128 + the signal's number when a signal ended
        it, else that of the rank that failed.

    Raises:
        UserError: the run cannot start.
    """
    if config.topology.nodes > 1:
        raise UserError(
            f"topology {config.shape} needs {config.topology.nodes} machines, and this command "
            "starts one",
            "on each machine: python -m paddle.distributed.launch --master FIRST_MACHINE_IP:PORT "
            f"--nnodes {config.topology.nodes} --rank 0, 1, … "
            f"--nproc_per_node {config.topology.devices} train.py topology={config.shape} …",
        )
    telemetry.setup_logging("[node0]")
    run_folder = claim(config, folder)
    started = time.monotonic()
    with signals_as_interrupts():
        try:
            prepare(config)
            if config.shape.world_size == 1:
                status = run_here(config, folder)
            else:
                status = Job(config, run_folder).run()
        except Interrupted as interrupt:
            status = 128 + interrupt.number
            seconds = time.monotonic() - started
            print(f"interrupted by {interrupt}; results: {folder}", flush=True)
            ended_early(config, "interrupted", seconds).write(run_folder)
    if status == 0 and config.task.name == "train":
        show_summary(run_folder)
    return status


def claim(config: Config, folder: Path) -> telemetry.RunFolder:
    """Make the run folder, and write ``config.yaml`` into it.

    Raises:
        UserError: the folder holds a run already and ``resume=auto`` does not continue it.
    """
    run_folder = telemetry.RunFolder(folder)
    worker.refuse_used(config, run_folder)
    run_folder.result.unlink(missing_ok=True)
    telemetry.write_text(run_folder.config, dump(config))
    run_folder.logs.mkdir(exist_ok=True)
    return run_folder


def prepare(config: Config) -> None:
    """Download what the ranks will read, once, before there are any."""
    data.prepare(config.dataset, _log.info)
    models.fetch_pretrained(config.model)


def run_here(config: Config, folder: Path) -> int:
    """Run the only rank in this process, where a debugger can follow it."""
    place = Place(rank=0, world_size=1, local_rank=0, node=0)
    run_folder = telemetry.RunFolder(folder)
    log_file = run_folder.logs / "rank-0.log"
    display: StepDisplay = TerminalDisplay() if sys.stdout.isatty() else NoDisplay()
    started = time.monotonic()
    try:
        worker.execute(config, folder, place, display)
    except Exception as error:
        failure = worker.describe(error, place)
        with contextlib.suppress(OSError), log_file.open("a") as log:
            log.writelines(
                f"{place.tag} {line}\n" for line in (failure["traceback"] or "").splitlines()
            )
        report_failure(failure)
        worker.failed_result(config, failure, time.monotonic() - started).write(run_folder)
        return 1
    finally:
        display.stop()
    return 0


@dataclass
class RankLog:
    """One rank's output: read from the launcher's file, written with the rank's tag."""

    place: Place
    source: Path
    target: IO[str]
    rest: bytes = b""
    offset: int = 0

    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        """Complete lines that the rank has written since the last call; with `final`, the rest.

        A carriage return ends a line too. The file may end inside a character or between the two
        ends of a line, so it is cut as bytes and decoded by the line.
        """
        try:
            with self.source.open("rb") as stream:
                stream.seek(self.offset)
                read = stream.read()
        except FileNotFoundError:
            return
        self.offset += len(read)
        text = self.rest + read
        # A carriage return at the very end may be the first half of a line end.
        end = len(text) if final else max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1
        complete, self.rest = text[:end], text[end:]
        lines = _LINE_END.split(complete.decode(errors="replace"))
        yield from lines if lines[-1] else lines[:-1]


@dataclass
class Job:
    """The ranks of this node, started by `paddle.distributed.launch`."""

    config: Config
    run_folder: telemetry.RunFolder
    display: StepDisplay = field(default_factory=NoDisplay)
    scratch: Path = field(init=False)
    handles: dict[int, int] = field(default_factory=dict)  # rank to its process (pidfd_open(2))
    deaths: list[int] = field(default_factory=list)  # ranks in the order in which they ended
    statuses: dict[int, int] = field(default_factory=dict)  # of those; less than 0: by a signal

    def run(self) -> int:
        """Start the ranks, follow them to their end, and write the result if they did not.

        Raises:
            Interrupted: by a signal; the ranks are gone by then.
        """
        started = time.monotonic()
        self.display = TerminalDisplay() if sys.stdout.isatty() else NoDisplay()
        self.scratch = Path(tempfile.mkdtemp(prefix="fleet-recipes-"))
        try:
            with contextlib.ExitStack() as stack:
                logs = [self._rank_log(rank, stack) for rank in range(self.config.topology.devices)]
                launcher = self._start()
                try:
                    status = self._follow(launcher, logs)
                finally:
                    self._end(launcher)
                    self._copy(logs, final=True)
                    self.display.stop()
            if status != 0:
                failure = self._failure(status)
                report_failure(failure)
                seconds = time.monotonic() - started
                worker.failed_result(self.config, failure, seconds).write(self.run_folder)
            return status
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        environment[worker.RUN_VARIABLE] = str(self.run_folder.path.resolve())
        environment[worker.REPORTS_VARIABLE] = str(self.scratch)
        environment[worker.PROGRESS_VARIABLE] = "1" if sys.stdout.isatty() else "0"
        worker.set_threads(self.config, environment)
        devices = ["--nproc_per_node", str(self.config.topology.devices)]
        if uses_gpu(self.config):
            wanted = self.config.topology.devices
            visible = Machine.this().visible or [str(number) for number in range(wanted)]
            devices = ["--devices", ",".join(visible[:wanted])]
        else:
            # With it, the launcher would hand out GPUs that the run does not use.
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            environment["PADDLE_DISTRI_BACKEND"] = "gloo"
        script = Path(__file__).parent.parent / "train.py"
        with (self.scratch / "launcher.log").open("wb") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "paddle.distributed.launch"),
                    *devices,
                    *("--log_dir", str(self.scratch / "ranks")),
                    str(script),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C reaches this process alone, which then ends the others.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _follow(self, launcher: subprocess.Popen[bytes], logs: list[RankLog]) -> int:
        """Copy the ranks' output until the launcher ends; return its exit status."""
        while True:
            status = launcher.poll()
            self._copy(logs)
            if status is not None:
                return status if status >= 0 else 128 - status
            self._watch()

    def _watch(self) -> None:
        """Wait a little, and note in which order ranks end: the first is the cause."""
        started = worker.read_reports(self.scratch, "started")
        for rank, report in started.items():
            if rank not in self.handles:
                try:
                    self.handles[rank] = os.pidfd_open(report["pid"])
                except ProcessLookupError:
                    self.deaths.append(rank)
        alive = {h: rank for rank, h in self.handles.items() if rank not in self.deaths}
        # Wakes at once when a rank ends: those that fail because of it take longer to do so.
        ended, _, _ = select.select(list(alive), [], [], _POLL_SECONDS)
        for rank in (alive[handle] for handle in ended):
            self.deaths.append(rank)
            status = _status_of_ended(started[rank]["pid"])
            if status is not None:
                self.statuses[rank] = status

    def _rank_log(self, local_rank: int, stack: contextlib.ExitStack) -> RankLog:
        place = Place(local_rank, self.config.shape.world_size, local_rank, node=0)
        path = self.run_folder.logs / f"rank-{place.rank}.log"
        target = stack.enter_context(path.open("a", encoding="utf-8"))
        return RankLog(place, self.scratch / "ranks" / f"workerlog.{local_rank}", target)

    def _copy(self, logs: list[RankLog], *, final: bool = False) -> None:
        """Write what ranks have said to their logs, and show what concerns a person."""
        for log in logs:
            tag = log.place.tag
            for line in log.new_lines(final=final):
                if line.startswith(RECORD):
                    if isinstance(self.display, TerminalDisplay):
                        self.display.apply(line)
                    continue
                tagged = line.startswith(tag)
                log.target.write(f"{line}\n" if tagged else f"{tag} {line}\n")
                if tagged and (log.place.rank == 0 or " warning: " in line):
                    print(line, flush=True)
            log.target.flush()

    def _end(self, launcher: subprocess.Popen[bytes]) -> None:
        """Leave no process behind: ask the launcher to end its ranks, then use force."""
        if launcher.poll() is None:
            launcher.terminate()
            try:
                launcher.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        for handle in self.handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)

    def _failure(self, status: int) -> dict[str, Any]:
        """What made the job fail, from the ranks' reports and the order of their ends."""
        reports = worker.read_reports(self.scratch, "failed")
        by_time = sorted(reports.values(), key=lambda report: float(report["time"]))
        own = [report for report in by_time if not _is_consequence(report)]
        finished = worker.read_reports(self.scratch, "finished")
        silent = [rank for rank in self.deaths if rank not in reports and rank not in finished]
        if own:
            return own[0]
        if 128 < status <= 128 + signal.SIGRTMAX:  # its ranks ended because of it
            return {
                "node": 0,
                "rank": 0,
                "type": "LaunchError",
                "message": f"the launcher was ended by {_signal_name(status - 128)}",
                "remedy": "look for the kernel's out-of-memory killer (dmesg), or who sent it",
                "traceback": None,
            }
        if silent:
            return self._silent_end(silent[0])
        if by_time:
            return by_time[0]
        if self.deaths:  # a rank that broke while it ended, after its task
            return self._silent_end(next(iter(self._told()), self.deaths[0]))
        when = "while its ranks were running" if self.handles else "before any rank started"
        return {
            "node": 0,
            "rank": 0,
            "type": "LaunchError",
            "message": f"the launcher ended with status {status} {when}",
            "remedy": "its output, printed above, says why",
            "traceback": (self.scratch / "launcher.log").read_text(errors="replace")[-3000:],
        }

    def _told(self) -> dict[int, int]:
        """The exit status of the failed ranks that the launcher names; less than 0: by a signal."""
        output = (self.scratch / "launcher.log").read_text(errors="replace")
        told = re.findall(r"Container rank (\d+) status failed .* code (-?\d+)", output)
        return {int(rank): int(code) for rank, code in told}

    def _silent_end(self, rank: int) -> dict[str, Any]:
        """A rank that was killed, or crashed outside of Python."""
        # The launcher names one of the failed ranks, and often not the one that failed first.
        code = self.statuses.get(rank) or self._told().get(rank, 0)
        how = "ended without a word"
        if code:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        return {
            "node": 0,
            "rank": rank,
            "type": "RankDied",
            "message": f"rank {rank} {how}",
            "remedy": "look for the kernel's out-of-memory killer (dmesg) and at the end of "
            f"{self.run_folder.logs / f'rank-{rank}.log'}",
            "traceback": None,
        }


def _status_of_ended(pid: int) -> int | None:
    """The exit status of a process that has ended and whose parent has not yet asked for it
    (proc_pid_stat(5), exit_code); less than 0: by a signal. None where that is over."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[48])) if state == "Z" else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the inner real-time signals have no name
        return f"signal {number}"


def _is_consequence(report: dict[str, Any]) -> bool:
    """Whether a rank failed only because another one was gone from a collective."""
    return report["type"] in ("RuntimeError", "OSError") and any(
        sign in report["message"] for sign in ("/gloo/", "Connection closed", "NCCL", "tcp_utils")
    )


def report_failure(failure: dict[str, Any]) -> None:
    """One message: what happened, where, and what to do; the one rank's traceback if it helps."""
    if failure["traceback"]:
        print(failure["traceback"].rstrip(), file=sys.stderr)
    where = f"[node{failure['node']} rank{failure['rank']}]"
    name = "" if failure["traceback"] is None else f"{failure['type']}: "
    print(f"{where} error: {name}{failure['message']}", file=sys.stderr)
    if failure["remedy"]:
        print(f"  remedy: {failure['remedy']}", file=sys.stderr, flush=True)


def show_summary(run_folder: telemetry.RunFolder) -> None:
    """The table at the end of a training, from ``result.json``."""
    import rich

    rich.print(telemetry.summary_table(telemetry.read_result(run_folder), run_folder))


def ended_early(config: Config, status: str, seconds: float) -> telemetry.Result:
    """The result of a run that a signal ended."""
    return telemetry.Result(
        status=status,
        final=None,
        best=None,
        images_per_second=None,
        wall_seconds=seconds,
        topology=str(config.shape),
        world_size=config.shape.world_size,
    )


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Interrupted` while the run lasts; further ones are ignored."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _die_with_parent() -> None:
    """In the launcher, before it starts: end in good order when this process is gone (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
