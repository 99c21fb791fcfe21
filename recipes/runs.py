"""``task=runs``: the runs in a folder, what they came to and take up, and their removal.

What is removed is a run's own: the files and folders that a run makes, in a folder that has its
configuration. What else is there stays, and so does whatever a link leads to.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import claim, reading
from recipes.config import Config, UserError
from recipes.ending import COMPLETED, FAILED
from recipes.preflight.report import FILE as PREFLIGHT_FILE
from recipes.printable import listed, printable
from recipes.telemetry import STATUSES, RunFolder, scores_so_far

RUNNING, KILLED = "running", "killed"
STATES = (*STATUSES, KILLED)  # of runs that have ended; a killed one has left no result
DEPTH = 3  # below the folder: sweeps hold their runs, and people sort theirs
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        name: of the folder, below the one that is listed.
        state: `RUNNING` or one of `STATES`.
        top1: the best one, where it was evaluated.
        size: bytes on the disk.
        written: when it was last written to, in seconds since the epoch.
    """

    name: str
    path: Path
    recipe: str
    state: str
    top1: float | None
    size: int
    written: float


def show(config: Config) -> int:
    """List the runs of ``runs.folder``, and remove those that ``runs.remove`` names.

    Returns:
        The exit status.

    Raises:
        UserError: the folder cannot be read, or no run is called as ``runs.remove`` says.
    """
    folder = Path(config.runs.folder)
    found = sorted(find(folder), key=lambda run: (run.written, run.name))
    if config.runs.remove is not None:
        return _remove_and_tell(chosen(found, config.runs.remove, folder))
    print(*table(found, time.time()), sep="\n", end="\n" if found else "")
    print(f"{_count(found)} in {folder}, {size_of(sum(run.size for run in found))}")
    if found:
        print("to remove some: task=runs runs.remove=STATE, or a folder's name or pattern")
    return COMPLETED


def find(folder: Path) -> Iterator[Run]:
    """The runs in a folder and below it. No link is followed below.

    Raises:
        UserError: it is no folder, or cannot be read.
    """
    if _is_run(folder):
        raise UserError(f"runs.folder={folder} is a run itself", f"runs.folder={folder.parent}")
    try:
        names = [each.name for each in folder.iterdir()]
    except OSError as error:
        raise UserError(
            f"runs.folder={folder}: {error.strerror}", "runs.folder=… names a folder with runs"
        ) from None
    for name in names:
        yield from _below(folder, name, DEPTH)


def chosen(runs: Sequence[Run], wanted: str, folder: Path) -> list[Run]:
    """The runs of a state, or of a name or pattern.

    Raises:
        UserError: there is none.
    """
    if wanted in STATES:
        return [run for run in runs if run.state == wanted]
    # By name alone: a path would have more than one spelling, and could lead elsewhere.
    found = [run for run in runs if fnmatch.fnmatchcase(run.name, wanted)]
    if not found:
        raise UserError(
            f"runs.remove={printable(wanted)}: {folder} has no run of this name",
            f"task=runs lists their names; the states are {', '.join(STATES)}",
        )
    return found


def remove(run: Run) -> str | None:
    """Remove what a run has left in its folder, and the folder if nothing else is in it.

    Returns:
        What stays, if anything does.

    Raises:
        UserError: it goes on, or something cannot be removed.
    """
    if not _is_run(run.path):
        raise UserError(f"{run.path} holds no run any more")
    own = RunFolder(run.path)
    with claim.held(run.path):
        try:
            # The configuration last: what is cut off here is still a run, and removed by another.
            for path in (*_of_a_run(own), own.config):
                _remove(path)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be removed: {error.strerror}") from None
        left = sorted({each.name for each in run.path.iterdir()} - {claim.FILE, claim.BEAT})
        if left:
            return f"{run.path} stays: it has {', '.join(map(printable, left[:3]))}"
    # Ending the claim has removed its file, which was alone there; a new run may be there by now.
    with contextlib.suppress(OSError):
        run.path.rmdir()
    return None


def table(runs: Sequence[Run], now: float) -> list[str]:
    """The runs as lines of aligned columns, a heading first; none where there are none."""
    if not runs:
        return []
    rows = [("run", "recipe", "state", "top-1", "size", "written")]
    for run in runs:
        top1 = "" if run.top1 is None else f"{run.top1:.2%}"
        age = f"{age_of(now - run.written)} ago"
        rows.append((printable(run.name, 200), run.recipe, run.state, top1, size_of(run.size), age))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def size_of(number: int) -> str:
    """Bytes for a person: ``4.6 GB``."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if value >= 10 or unit == 0 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def age_of(seconds: float) -> str:
    """Seconds for a person: ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _below(folder: Path, name: str, depth: int) -> Iterator[Run]:
    path = folder / name
    try:
        if path.is_symlink() or not path.is_dir():
            return
        if _is_run(path):
            yield _read(path, name)
        below = {each.name for each in path.iterdir()} - _made_by_a_run()
    except FileNotFoundError:  # meanwhile
        return
    except OSError as error:
        print(f"{path} cannot be read: {error.strerror}", file=sys.stderr)
        return
    for each in below if depth > 1 else []:
        yield from (
            Run(**{**vars(run), "name": f"{name}/{run.name}"})
            for run in _below(path, each, depth - 1)
        )


def _is_run(path: Path) -> bool:
    """Whether a folder has the configuration of a run."""
    return "recipe_name" in _settings(RunFolder(path))


def _settings(run: RunFolder) -> Mapping[str, Any]:
    try:
        found = reading.yaml_of(run.config)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path, name: str) -> Run:
    own = RunFolder(path)
    settings = _settings(own)
    task = settings.get("task")
    what = task.get("name") if isinstance(task, dict) else "train"
    recipe = printable(settings.get("recipe_name"), 30)
    state, top1 = _ending(own)
    return Run(
        name,
        path,
        recipe if what == "train" else f"{recipe} ({printable(what, 12)})",
        RUNNING if claim.holder_of(path) is not None else state,
        top1,
        _size(path),
        _written(own),
    )


def _ending(run: RunFolder) -> tuple[str, float | None]:
    """The state of a run that does not go on, and its best top-1."""
    state, best = KILLED, None
    with contextlib.suppress(UserError):
        result = reading.json_of(run.result)
        if isinstance(result, dict) and result.get("status") in STATUSES:
            state, best = str(result["status"]), result.get("best")
    if best is None and run.metrics.is_file():
        # It may be of another version, or be written to just now.
        with contextlib.suppress(UserError, OSError, KeyError, TypeError, ValueError):
            best = scores_so_far(run)[1]
    top1 = best.get("top1") if isinstance(best, dict) else None
    return state, float(top1) if isinstance(top1, int | float) else None


def _size(path: Path) -> int:
    """Bytes that a folder takes on the disk; what cannot be looked at takes none."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
    return total


def _written(run: RunFolder) -> float:
    times = []
    for path in (run.config, run.metrics, run.result):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


def _of_a_run(run: RunFolder) -> list[Path]:
    """What a run makes in its folder, but for its configuration and its claim."""
    return [
        *(run.checkpoints, run.visualdl, run.logs, run.metrics, run.environment, run.benchmark),
        *(run.result, run.path / PREFLIGHT_FILE),
    ]


def _made_by_a_run() -> set[str]:
    return {path.name for path in _of_a_run(RunFolder(Path()))}


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder; nothing that a link leads to."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_and_tell(runs: Sequence[Run]) -> int:
    freed, problems = 0, []
    for run in runs:
        try:
            left = remove(run)
        except UserError as error:
            problems.append(error.message)
            continue
        freed += run.size
        print(f"removed {run.path}" if left is None else f"removed the run; {left}", flush=True)
    print(f"{_count(runs)} to remove, {len(runs) - len(problems)} removed, {size_of(freed)} freed")
    if problems:
        print(f"error: not removed:{listed(problems)}", flush=True)
    return FAILED if problems else COMPLETED


def _count(runs: Sequence[Run]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"
