"""This node's ranks: started by `paddle.distributed.launch`, watched, and ended for certain."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from recipes import limits, processes, pulse, rank_signals, telemetry, worker
from recipes.config import Config, Machine, dump, uses_gpu
from recipes.ending import saving_seconds
from recipes.launcher_environment import without_foreign
from recipes.progress import RECORD, NoDisplay, StepDisplay, TerminalDisplay
from recipes.pulse import Phase
from recipes.rendezvous import Failure
from recipes.scratch import Scratch
from recipes.topology import Place

# For the launcher to end once a rank has failed; then it is ended by force.
GRACE_SECONDS = 3.0
# For loader processes, whose rank has ended, to remove what they share with it.
_CLEANING_SECONDS = 1.0
# In which a word reaches the ranks of all nodes.
NOTICE_SECONDS = 0.5
_RATE_SECONDS = 0.2
# A rank that is at something else than a step while others fail waiting is suspect after this.
SUSPECT_SECONDS = 5.0
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_LINE_END = re.compile(r"\r\n|\r|\n")
_log = logging.getLogger(__name__)
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class Meeting:
    """How the ranks of all nodes find each other.

    Attributes:
        node: this node's number.
        address: this node's, on the network to the others; None for a job of one node.
        master: address and port of the launcher's rendezvous on node 0; None for one node.
        environment: variables for the ranks, such as the network interface.
    """

    node: int = 0
    address: str | None = None
    master: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


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

    def write(self, line: str) -> None:
        """Put a line into the log; on a disk that is full, the run goes on without."""
        if self.target.closed:
            return
        try:
            self.target.write(f"{line}\n")
            self.target.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.target.close()  # flushes what has just failed
            _log.warning("%s: %s; it ends here", self.target.name, error.strerror)


class Ranks:
    """This node's ranks, from start to end; a context that leaves no process behind.

    Args:
        config: checked.
        run_folder: where the logs go.
        meeting: this node's place among the nodes.
    """

    def __init__(
        self, config: Config, run_folder: telemetry.RunFolder, meeting: Meeting | None = None
    ) -> None:
        self._config = config
        self._run_folder = run_folder
        self._meeting = meeting or Meeting()
        self._display: StepDisplay = NoDisplay()
        self._handles: dict[int, int] = {}  # rank to its process (pidfd_open(2))
        self._pids: dict[int, int] = {}
        self._deaths: dict[int, float] = {}  # rank to time.time(), in the order of the ends
        self._statuses: dict[int, int] = {}  # of those; less than 0: by a signal
        self._suspect: Failure | None = None
        self._failing_since: float | None = None
        self._oom_kills = pulse.oom_kills()
        self._started = time.monotonic()
        self._halts = pulse.Halts()
        self._steps: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._display = TerminalDisplay() if sys.stdout.isatty() else NoDisplay()
        with contextlib.ExitStack() as stack:
            self._scratch = stack.enter_context(Scratch()).path
            stack.callback(self._display.stop)
            self._logs = []
            stack.callback(self._close_logs)
            self._run_folder.logs.mkdir(parents=True, exist_ok=True)
            for each in range(self._config.topology.devices):
                self._logs.append(self._log(each))
            self._launcher = self._launch()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
            self._copy(final=True)
        finally:
            self._opened.close()

    def _close_logs(self) -> None:
        for log in self._logs:
            with contextlib.suppress(OSError):  # of a full disk, which has been told
                log.target.close()

    def follow(self, look_around: Callable[[], bool]) -> Failure | None:
        """Copy the ranks' output until they have ended.

        Args:
            look_around: called several times a second; may raise to give the ranks up, and
                returns whether another node asks which rank holds things up.

        Returns:
            Why they failed; None where they completed.
        """
        while True:
            status = self._launcher.poll()
            self._halts.look()
            self._copy()
            self._last_step()
            if status is not None:
                return self.failure(status if status > 0 else 128 - status) if status else None
            if look_around() or self._failing_since is not None:
                self._suspect = self._suspect or self._find_suspect()
            overdue = self._overdue()
            if overdue is not None:
                return overdue
            if self._failing_since and time.monotonic() - self._failing_since > GRACE_SECONDS:
                return self.failure(1)  # the launcher itself does not end
            self._watch()

    def stop(self, tell_others: Callable[[int], None]) -> None:
        """Let the ranks finish a step, save and end by themselves, for a few seconds.

        Ranks share every step, so none is further than one past what another has done. The step
        is chosen so that the word reaches all of them, on other nodes too, before they get there.

        Args:
            tell_others: called with the step.
        """
        before, began = self._last_step(), time.monotonic()
        if before is None:
            return  # nothing to save
        time.sleep(_RATE_SECONDS)
        last = self._last_step() or before
        rate = (last - before) / (time.monotonic() - began)
        notice = NOTICE_SECONDS if self._config.topology.nodes > 1 else _POLL_SECONDS
        step = last + 2 + math.ceil(rate * notice)
        tell_others(step)
        self.ask_to_stop(step)
        self.let_save(began)

    def let_save(self, began: float | None = None) -> None:
        """Let ranks that were asked to stop end by themselves, for a few seconds.

        Args:
            began: when the first of those began; None: now.
        """
        began = time.monotonic() if began is None else began
        ends = began + saving_seconds(self._config.deadlines.grace)
        while time.monotonic() < ends and self._launcher.poll() is None:
            self._copy()
            self._last_step()
            self._watch()

    def ask_to_stop(self, step: int) -> None:
        """Have this node's ranks stop once they have done `step` optimizer steps."""
        for rank in self._marks():
            pulse.ask_to_stop(self._scratch / f"pulse-{rank}", step)

    def _last_step(self) -> int | None:
        """The most steps a rank of this node has done; None where none trains yet."""
        steps = [mark.step for mark in self._marks().values() if mark.step is not None]
        if steps:
            began, done = self._steps or (min(steps), 0)
            self._steps = began, max(done, *steps)
        return max(steps, default=None)

    def steps(self) -> tuple[int, int] | None:
        """Optimizer steps: before the first that was seen, and the most that were seen; None where
        no rank has trained yet."""
        return self._steps

    def failure_while_stopping(self) -> Failure | None:
        """What kept a rank from its checkpoint after `stop`; None where nothing did."""
        reports = worker.read_reports(self._scratch, "failed").values()
        own = [report for report in reports if not report["consequence"]]
        return min(own, key=lambda report: float(report["time"]), default=None)

    @property
    def halted(self) -> float:
        """Seconds for which this node's parent was halted shortly before."""
        return self._halts.recent

    @property
    def suspect(self) -> Failure | None:
        """A rank of this node that holds up the others, if one has been found."""
        return self._suspect

    def failure(self, status: int) -> Failure:
        """What made this node's ranks fail, from their reports and the order of their ends.

        Args:
            status: the launcher's exit status.
        """
        reports = worker.read_reports(self._scratch, "failed")
        finished = worker.read_reports(self._scratch, "finished")
        own = {float(r["time"]): r for r in reports.values() if not r["consequence"]}
        silent = [rank for rank in self._deaths if rank not in reports and rank not in finished]
        if own and not (silent and self._deaths[silent[0]] < min(own)):
            return own[min(own)]
        if self._suspect is not None:
            return self._suspect
        if 128 < status <= 128 + signal.SIGRTMAX:  # its ranks ended because of it
            return self._describe(
                None,
                "LaunchError",
                f"node {self._meeting.node}: paddle.distributed.launch was ended by "
                f"{_signal_name(status - 128)}",
                "look for the kernel's out-of-memory killer (dmesg), or who sent it",
            )
        if silent:
            return self._silent_end(silent[0])
        if reports:
            return min(reports.values(), key=lambda report: float(report["time"]))
        if self._deaths:  # a rank that broke while it ended, after its task
            return self._silent_end(next(iter(self._told()), next(iter(self._deaths))))
        output = self._launcher_output()
        if limits.told_by(output):
            return self._describe(
                None,
                "LaunchError",
                f"node {self._meeting.node}: paddle.distributed.launch could not start what it "
                f"needs: a limit of the system is reached (limits here: {limits.in_force()})",
                f"fewer ranks, dataset.workers or threads, or {limits.HIGHER}",
            )
        when = "while its ranks were running" if self._pids else "before any rank started"
        return self._describe(
            None,
            "LaunchError",
            f"paddle.distributed.launch ended with status {status} {when}",
            "its output, printed above, says why",
            traceback=output[-3000:],
        )

    def _launcher_output(self) -> str:
        return (self._scratch / "launcher.log").read_text(errors="replace")

    def _told(self) -> dict[int, int]:
        """The exit status of the failed ranks that the launcher names; less than 0: by a signal."""
        told = re.findall(
            r"Container rank (\d+) status failed .* code (-?\d+)", self._launcher_output()
        )
        first = self._meeting.node * self._config.topology.devices
        return {first + int(local_rank): int(code) for local_rank, code in told}

    def _launch(self) -> subprocess.Popen[bytes]:
        telemetry.write_text(self._scratch / "config.yaml", dump(self._config))
        # The launcher would take other arguments than it is given, and ranks another job's places.
        environment = without_foreign(os.environ)
        environment |= self._meeting.environment | {
            worker.RUN_VARIABLE: str(self._run_folder.path.resolve()),
            worker.REPORTS_VARIABLE: str(self._scratch),
            worker.PARENT_VARIABLE: str(os.getpid()),
            worker.PROGRESS_VARIABLE: "1" if sys.stdout.isatty() else "0",
        }
        worker.set_threads(self._config, environment)
        wanted = self._config.topology.devices
        arguments = ["--log_dir", str(self._scratch / "ranks")]
        if uses_gpu(self._config):
            visible = Machine.this().visible or [str(number) for number in range(wanted)]
            arguments += ["--devices", ",".join(visible[:wanted])]
        else:
            # With it, the launcher would hand out GPUs that the run does not use.
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            environment["PADDLE_DISTRI_BACKEND"] = "gloo"
            arguments += ["--nproc_per_node", str(wanted)]
        if self._meeting.master is not None:
            arguments += ["--master", self._meeting.master]
            arguments += ["--nnodes", str(self._config.topology.nodes)]
            arguments += ["--rank", str(self._meeting.node)]
            arguments += ["--host", str(self._meeting.address)]
        script = Path(__file__).parent.parent / "train.py"
        with (self._scratch / "launcher.log").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "paddle.distributed.launch", *arguments, str(script)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C reaches this process alone, which then ends the others.
                start_new_session=True,
                preexec_fn=functools.partial(_prepare_launcher, os.getpid()),
            )

    def _log(self, local_rank: int) -> RankLog:
        devices = self._config.topology.devices
        node = self._meeting.node
        place = Place(node * devices + local_rank, self._config.shape.world_size, local_rank, node)
        path = self._run_folder.logs / f"rank-{place.rank}.log"
        source = self._scratch / "ranks" / f"workerlog.{local_rank}"
        return RankLog(place, source, path.open("a", encoding="utf-8"))

    def _watch(self) -> None:
        """Wait a little, and note in which order ranks end: the first is the cause."""
        for rank, report in worker.read_reports(self._scratch, "started").items():
            if rank not in self._pids:
                self._pids[rank] = report["pid"]
                try:
                    self._handles[rank] = os.pidfd_open(report["pid"])
                except ProcessLookupError:
                    self._deaths[rank] = time.time()
        alive = {h: rank for rank, h in self._handles.items() if rank not in self._deaths}
        # Wakes at once when a rank ends: those that fail because of it take longer to do so.
        for handle in processes.that_ended(alive, _POLL_SECONDS):
            rank = alive[handle]
            self._deaths[rank] = time.time()
            status = pulse.exit_status(self._pids[rank])
            if status is not None:
                self._statuses[rank] = status
        completed = worker.read_reports(self._scratch, "finished")
        if self._failing_since is None and any(r not in completed for r in self._deaths):
            self._failing_since = time.monotonic()

    def _copy(self, *, final: bool = False) -> None:
        """Write what ranks have said to their logs, and show what concerns a person."""
        for log in self._logs:
            tag = log.place.tag
            for line in log.new_lines(final=final):
                if line.startswith(RECORD):
                    if isinstance(self._display, TerminalDisplay):
                        self._display.apply(line)
                    continue
                tagged = line.startswith(tag)
                log.write(line if tagged else f"{tag} {line}")
                if tagged and (log.place.rank == 0 or " warning: " in line):
                    print(line, flush=True)

    def _end(self) -> None:
        """Leave no process behind."""
        if self._launcher.poll() is None:
            self._launcher.kill()  # its ranks end with it
            self._launcher.wait()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        # Ranks, and what they have started: a process that is halted does not end with its rank.
        of_this_run = functools.partial(
            processes.with_variable, worker.REPORTS_VARIABLE, str(self._scratch)
        )
        ends = time.monotonic() + _CLEANING_SECONDS
        while time.monotonic() < ends and of_this_run():
            time.sleep(0.05)
        processes.kill_all(of_this_run)

    def _marks(self) -> dict[int, pulse.Mark]:
        """The last mark of each rank that lives."""
        marks = {
            rank: pulse.read_mark(self._scratch / f"pulse-{rank}")
            for rank in self._handles
            if rank not in self._deaths
        }
        return {rank: mark for rank, mark in marks.items() if mark is not None}

    def _overdue(self) -> Failure | None:
        """A rank that has not moved on within its deadline."""
        deadlines = self._config.deadlines
        late = {
            rank: mark
            for rank, mark in self._marks().items()
            if pulse.is_overdue(mark, deadlines, self._halts)
        }
        if not late:
            if self._pids or time.monotonic() - self._started < deadlines.start:
                return None
            return self._describe(
                None,
                "RanksMissing",
                f"node {self._meeting.node}: no rank has started within {deadlines.start:.0f} s",
                "deadlines.start=… waits longer; the launcher's output is above",
                traceback=self._launcher_output()[-3000:],
            )
        suspect = self._suspect or self._find_suspect()
        if suspect is not None:
            return suspect
        rank, mark = max(late.items(), key=lambda item: item[1].age)
        elsewhere = self._config.topology.nodes > 1
        return self._describe(
            rank,
            "RankStuck",
            f"rank {rank} has been {mark.phase.words} for {mark.age:.0f} s"
            + (", waiting for others" if elsewhere else "; no rank of this node is ahead of it"),
            "see which rank of another node holds it up; deadlines.step=… waits longer"
            if elsewhere
            else f"see the end of {self._run_folder.logs / f'rank-{rank}.log'}; a step that needs "
            "longer takes deadlines.step=…",
            consequence=elsewhere,
        )

    def _find_suspect(self) -> Failure | None:
        """The rank that others wait for: halted, or busy with something else than they are."""
        for rank, pid in self._pids.items():
            if rank not in self._deaths and pulse.is_stopped(pid):
                return self._describe(
                    rank,
                    "RankFrozen",
                    f"rank {rank} is frozen: its process {pid} is stopped by a signal",
                    "find out what sent it SIGSTOP (a debugger, job control, a suspended "
                    "container); SIGCONT would have continued it",
                )
        together = (Phase.STARTING, Phase.STEPPING)  # where ranks wait for each other
        for rank, mark in self._marks().items():
            if mark.phase not in together and mark.age > SUSPECT_SECONDS:
                return self._describe(
                    rank,
                    "RankStuck",
                    f"rank {rank} has been {mark.phase.words} for {mark.age:.0f} s while others "
                    "waited for it",
                    f"see the end of {self._run_folder.logs / f'rank-{rank}.log'}; "
                    "a slow disk or network file system is the usual reason",
                )
        return None

    def _silent_end(self, rank: int) -> Failure:
        """A rank that was killed, or crashed outside of Python."""
        # The launcher names one of the failed ranks, and often not the one that failed first.
        code = self._statuses.get(rank) or self._told().get(rank, 0)
        how = "ended without a word"
        if code:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        log = self._run_folder.logs / f"rank-{rank}.log"
        now = pulse.oom_kills()
        if now is not None and self._oom_kills is not None and now > self._oom_kills:
            return self._describe(
                rank,
                "OutOfMemory",
                f"rank {rank} {how}: the kernel killed a process for lack of memory meanwhile",
                "a smaller batch_size (accumulate=… keeps the global batch), fewer "
                "dataset.workers, or more memory for the container",
            )
        return self._describe(
            rank,
            "RankDied",
            f"rank {rank} {how}",
            f"see the end of {log}, and whether somebody or a batch system killed it",
            # A library that aborts as its connections break: another rank was gone before.
            consequence=code == -signal.SIGABRT and worker.has_signs_of_others(_end_of(log)),
        )

    def _describe(
        self,
        rank: int | None,
        kind: str,
        message: str,
        remedy: str,
        *,
        traceback: str | None = None,
        consequence: bool = False,
    ) -> Failure:
        return {
            "node": self._meeting.node,
            "rank": rank,
            "type": kind,
            "message": message,
            "remedy": remedy,
            "traceback": traceback,
            "consequence": consequence,
            "fatal": False,
        }


def _end_of(path: Path, size: int = 20_000) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - size))
        return stream.read().decode(errors="replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the inner real-time signals have no name
        return f"signal {number}"


def _prepare_launcher(parent: int) -> None:
    """In the launcher, before it starts: be killed when this process is gone (prctl(2)), and its
    ranks with it, since the launcher's own way of ending them may take half a minute; and leave
    the signals of others to this process."""
    rank_signals.block()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
