"""One rank's life: join the job, run the task, and leave word of how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from recipes import (
    affinity,
    claim,
    disk,
    earlier_run,
    home,
    limits,
    log_lines,
    processes,
    rank_signals,
    telemetry,
    thread_variables,
)
from recipes.command_line import settings_only
from recipes.config import Config, UserError, compose_unchecked, dump, from_hydra, load
from recipes.cores import usable_cores
from recipes.launcher_environment import keep_own
from recipes.printable import printable_lines
from recipes.progress import NoDisplay, ReportingDisplay, StepDisplay
from recipes.pulse import NoPulse, Phase, Pulse, SharedPulse
from recipes.topology import Place, threads_per_rank

# What the parent tells its ranks.
RUN_VARIABLE = "FLEET_RECIPES_RUN"  # the run folder
REPORTS_VARIABLE = "FLEET_RECIPES_REPORTS"  # config.yaml, and where ranks leave word
PROGRESS_VARIABLE = "FLEET_RECIPES_PROGRESS"  # "1": report steps for a progress bar
PARENT_VARIABLE = "FLEET_RECIPES_PARENT"  # its process id

WITHOUT_RANKS = ("preflight", "prepare", "runs")  # the tasks that a parent does alone

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def given_run(conf: Path, overrides: list[str]) -> tuple[Config, Path]:
    """The configuration and run folder of a rank: its parent's, or composed from the command line
    where `paddle.distributed.launch` was started by hand."""
    folder = os.environ.get(RUN_VARIABLE)
    if folder is None:
        # No rank writes before all have joined the job, so each finds the folder as it was.
        settings = settings_only(overrides)
        composed, path = compose_unchecked(conf, settings)
        config = from_hydra(earlier_run.with_its_settings(composed, settings, path, conf))
        if config.task.name in WITHOUT_RANKS:
            raise UserError(
                f"task={config.task.name} has no ranks for a launcher to start",
                f"python train.py task={config.task.name} …",
            )
        refuse_used(config, telemetry.RunFolder(path))
        if config.resume == "auto":
            config.resume = earlier_run.goes_on_from(config.resume, telemetry.RunFolder(path))
        return config, path
    # Not the run folder's copy: nodes may share that folder and differ in where their data is.
    given = Path(os.environ.get(REPORTS_VARIABLE, "")) / "config.yaml"
    if REPORTS_VARIABLE not in os.environ or not given.is_file():
        raise UserError(
            f"{RUN_VARIABLE}={folder} and {REPORTS_VARIABLE} are of a run that has ended",
            f"unset {RUN_VARIABLE} {REPORTS_VARIABLE}: a parent sets them for its own ranks",
        )
    return load(given), Path(folder)


def refuse_used(config: Config, run: telemetry.RunFolder) -> None:
    """Leave a run alone that this one does not continue.

    Raises:
        UserError: the folder holds a run already, or one that goes on, and ``resume=auto`` is not
            set.
    """
    if config.resume == "auto" or not telemetry.holds_a_run(run):
        return
    holder = claim.holder_of(run.path)
    if holder is not None:
        raise claim.claimed(run.path, holder)
    raise UserError(
        f"{run.path} holds a run already",
        "resume=auto continues it; another hydra.run.dir=… leaves it alone",
    )


def run_rank(config: Config, folder: Path, place: Place) -> int:
    """Run the task as one rank that a launcher started.

    Args:
        config: checked.
        folder: the run folder; rank 0's choice counts.

    Returns:
        The process's exit status: 0, or 1 after an error, which has been logged and, where a
        parent listens, reported.

    Raises:
        UserError: under the bare launcher, the run folder is another run's.
    """
    die_with_parent()
    if RUN_VARIABLE in os.environ:
        rank_signals.heed_launcher()
    keep_own(os.environ)
    with _as_rank_of(folder, place):
        return _run_rank(config, folder, place)


def _as_rank_of(folder: Path, place: Place) -> contextlib.AbstractContextManager[None]:
    """Count among those who write to the run folder; under the bare launcher, rank 0 claims it.

    Raises:
        UserError: it is another run's.
    """
    if RUN_VARIABLE in os.environ:
        return claim.shared_by_rank(folder)
    return claim.held(folder) if place.rank == 0 else contextlib.nullcontext()


def _run_rank(config: Config, folder: Path, place: Place) -> int:
    reports = os.environ.get(REPORTS_VARIABLE)
    if reports:
        write_report(Path(reports), place.rank, {"pid": os.getpid()}, "started")
    telemetry.setup_logging(place.tag)
    display: StepDisplay = NoDisplay()
    if place.rank == 0 and os.environ.get(PROGRESS_VARIABLE) == "1":
        display = ReportingDisplay()
    pulse: Pulse = SharedPulse(Path(reports) / f"pulse-{place.rank}") if reports else NoPulse()
    started = time.monotonic()
    try:
        home.provide_folders()
        execute(config, folder, place, display, pulse)
    except Exception as error:
        failure = describe(error, place)
        # Without the rank's tag: for the log, while the parent tells a person.
        print(*as_logged(failure), sep="\n", file=sys.stderr, flush=True)
        if reports:
            write_report(Path(reports), place.rank, failure, "failed")
        else:
            _log.error("%s\n  remedy: %s", failure["message"], failure["remedy"])
            if place.rank == 0 and not telemetry.RunFolder(folder).result.exists():
                telemetry.Result.untrained(
                    config.shape, time.monotonic() - started, "failed", error=error_of(failure)
                ).write(telemetry.RunFolder(folder))
        return 1
    if reports:
        write_report(Path(reports), place.rank, {}, "finished")
    elif place.rank == 0:
        show_end(config, telemetry.RunFolder(folder))
    return 0


def show_end(config: Config, run: telemetry.RunFolder) -> None:
    """Show a person what came of a training or a measurement, from the run folder."""
    if config.task.name == "train":
        print(telemetry.summary_table(telemetry.read_result(run), run), flush=True)
    elif config.task.name == "benchmark":
        from recipes.benchmark import record

        print(record.summary(record.read(run.benchmark)), flush=True)


def execute(
    config: Config,
    folder: Path,
    place: Place,
    display: StepDisplay,
    pulse: Pulse | None = None,
) -> None:
    """Join the job and run the configured task; rank 0 writes the run folder.

    Raises:
        UserError: something the user can mend.
    """
    pulse = pulse or NoPulse()
    pulse.mark(Phase.STARTING)
    set_threads(config, os.environ)
    affinity.bind(config, place)
    import_paddle()
    from recipes import distributed

    distributed.start(config, place)
    pulse.mark(Phase.PREPARING)
    run = telemetry.RunFolder(folder)
    if RUN_VARIABLE not in os.environ:
        # Each rank has composed a name with its own clock; rank 0's counts.
        run = telemetry.RunFolder(Path(distributed.broadcast_json(str(folder))))
        # Under a parent with several ranks, the parent writes the logs.
        telemetry.setup_logging(place.tag, file=run.logs / f"rank-{place.rank}.log")
    trains = config.task.name in ("train", "benchmark")
    if place.rank == 0 and not trains:  # a training first sees what it continues
        telemetry.begin(run, dump(config))
    if config.task.name == "evaluate":
        result = evaluate_task(config, run, place, pulse)
    elif config.task.name == "smoke":
        from recipes import smoke

        result = smoke.smoke(config, place, pulse)
    elif config.task.name == "benchmark":
        from recipes.benchmark import task

        result = task.benchmark(config, run, place, display, pulse)
    else:
        from recipes import trainer

        result = trainer.train(config, run, place, display, pulse)
    if place.rank == 0:
        result.write(run)


def evaluate_task(
    config: Config, run: telemetry.RunFolder, place: Place, pulse: Pulse
) -> telemetry.Result:
    """``task=evaluate``: the scores of a checkpoint, as an event and a result."""
    from recipes.evaluation import evaluate_checkpoint

    started = time.monotonic()
    for change in earlier_run.changed(config, run) if place.rank == 0 else ():
        _log.info("otherwise than the checkpoint's run: %s", change)
    scores, position = evaluate_checkpoint(config, run.path, place, pulse)
    metrics = {"epoch": position["epoch"], "step": position["step"], **scores.as_dict()}
    if place.rank == 0:
        with telemetry.MetricsLog(run.metrics) as log:
            log.append({"event": "eval", **metrics})
        _log.info(log_lines.eval_line(metrics))
    seconds = time.monotonic() - started
    return telemetry.Result.untrained(config.shape, seconds, final=metrics, best=metrics)


def import_paddle() -> None:
    """Import Paddle without its remarks on threads and compilers, which are settled here.

    Paddle takes SIGTERM for a crash and ends the process with a C++ traceback; what this process
    does about that signal stays as it was.
    """
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="No ccache found")
        import paddle  # noqa: F401
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def set_threads(config: Config, environment: MutableMapping[str, str]) -> None:
    """Share the node's cores out to its ranks, before Paddle and OpenMP read these variables."""
    threads = config.threads or threads_per_rank(usable_cores(), config.topology.devices)
    for name in thread_variables.NAMES:
        if config.threads or not environment.get(name):
            environment[name] = str(threads)


def die_with_parent() -> None:
    """Have the system end this process when the one that started it is gone (prctl(2)).

    Under a parent of ours, what started it is the launcher, whose parent that one is: where it is
    not, the launcher was gone already, and this process belongs to nobody.
    """
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE)
    orphan = parent is not None and processes.parent_of(launcher) != int(parent)
    if orphan or os.getppid() != launcher:  # it died before the call above
        sys.exit(1)


def describe(error: BaseException, place: Place) -> dict[str, Any]:
    """An error as ``result.json`` holds it, with the time and the traceback besides."""
    error = told_shortage(error) or error
    user_error = isinstance(error, UserError)
    return {
        "time": time.time(),
        "node": place.node,
        "rank": place.rank,
        "type": type(error).__name__,
        "message": error.message if isinstance(error, UserError) else str(error),
        "remedy": error.remedy
        if isinstance(error, UserError)
        else "the traceback says where; it is in the rank's log too",
        "traceback": None if user_error else "".join(traceback.format_exception(error)),
        "consequence": is_consequence(error),
        "fatal": isinstance(error, UserError) and not error.may_pass,
    }


def told_shortage(error: BaseException) -> UserError | None:
    """The message for an error that this machine's limits or disks are to blame for; None for any
    other."""
    of_disk = disk.told(error) if isinstance(error, OSError) else None
    return of_disk or limits.told(error)


def is_consequence(error: BaseException) -> bool:
    """Whether a rank failed only because another one was gone from, or late for, a collective."""
    text = str(error)
    broken = has_signs_of_others(text) or "tcp_utils" in text  # Paddle's store
    return isinstance(error, RuntimeError | OSError) and broken


def has_signs_of_others(text: str) -> bool:
    """Whether what a rank said at its end is about connections to other ranks."""
    return any(sign in text for sign in ("gloo", "Connection closed", "NCCL"))


def as_logged(failure: dict[str, Any]) -> list[str]:
    """A failure as a rank's log holds it, by line."""
    text = failure["traceback"] or f"error: {failure['message']}\n  remedy: {failure['remedy']}"
    return printable_lines(str(text)).rstrip().splitlines()


def error_of(failure: dict[str, Any]) -> dict[str, Any]:
    """A failure as ``result.json`` holds it."""
    told = {key: failure[key] for key in ("node", "rank", "type")}
    return told | {key: printable_lines(failure[key]) for key in ("message", "remedy")}


def write_report(folder: Path, rank: int, content: dict[str, Any], kind: str) -> None:
    """Leave word for the parent: ``started`` with the pid, ``failed`` with the error,
    ``finished`` once the task is done."""
    partial = folder / f".{kind}-{rank}"
    partial.write_text(json.dumps(content))
    partial.replace(folder / f"{kind}-{rank}.json")


def read_reports(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """The reports of one kind, by rank."""
    return {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
        for path in folder.glob(f"{kind}-*.json")
    }
