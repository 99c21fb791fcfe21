"""What a run says and leaves behind: console lines, metrics.jsonl, result.json, VisualDL.

``metrics.jsonl`` is the one source of truth: the VisualDL file is made from it again whenever a
run is continued. Only rank 0 writes these files.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import logging
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from recipes import events, reading
from recipes.config import UserError
from recipes.cores import usable_cores
from recipes.in_place import check_in_place
from recipes.log_lines import duration
from recipes.mounts import IMAGE_FILE, on_the_host
from recipes.printable import printable, printable_lines
from recipes.ranking import is_better
from recipes.topology import Topology
from recipes.writable import cannot_write

PACKAGES = (
    "paddlepaddle",
    "paddlepaddle-gpu",
    "paddleclas",
    "visualdl",
    "hydra-core",
    "omegaconf",
    "numpy",
    "safetensors",
    "scikit-learn",
    "opencv-python-headless",
    "pillow",
    "rich",
    "nvidia-dali-cuda120",
    "nvidia-ml-py",
)
COMMIT_VARIABLE = "FLEET_RECIPES_COMMIT"  # of a checkout mounted into a container without git
HOSTS_VARIABLE = "FLEET_RECIPES_HOSTS"  # the nodes' names by number, which a rank cannot know
COMMAND_VARIABLE = "FLEET_RECIPES_COMMAND"  # the arguments of the parent, quoted for a shell
CURVES = {
    "train": ("loss", "top1", "lr", "images_per_second", "data_wait"),
    "eval": ("top1", "top5", "loss"),
}
_MOST_BYTES = 2**28  # of metrics.jsonl: 800,000 events
_MOST_OF_LINE = 2**16
_MEND = "remove the line, or restore the file"
STATUSES = ("completed", "interrupted", "failed")

_log = logging.getLogger("recipes.telemetry")


@dataclass(frozen=True)
class RunFolder:
    """The names of what a run leaves behind."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def benchmark(self) -> Path:
        return self.path / "benchmark.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def visualdl(self) -> Path:
        return self.path / "visualdl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file at once: a reader sees the old content or the new.

    Numbers that are not finite become null, since JSON has none. The folder is made if need be.

    Raises:
        UserError: the file cannot be written.
    """
    write_text(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file at once: a reader sees the old content or the new.

    Raises:
        UserError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # where the folder is out of reach, the first error says why
            partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, each readable before the call returns.

    Floats keep their full precision. JSON has no NaN and no infinity: such a value is written as
    null, and the key ``non_finite`` names it, as in ``{"loss": null, "non_finite": {"loss":
    "nan"}}``; `read` puts it back. Each event gets ``time``, seconds since 1970, when it has none.

    A last line without its end (of a process that was killed while writing) is dropped.

    Raises:
        UserError: the file cannot be written, it is no longer in its place, or a line in it is no
            JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: IO[str] | None = None

    def append(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Write one event; NumPy scalars are taken as numbers.

        Returns:
            The event as `read` will give it.
        """
        whole = {key: _plain(value) for key, value in event.items()}
        whole.setdefault("time", round(time.time(), 3))
        try:
            if self._stream is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _drop_torn_line(self.path)
                self._stream = _open(self.path)
            self._stream.write(_line(whole))
            self._stream.flush()
            check_in_place(self._stream, self.path)
        except OSError as error:
            self._abandon()
            raise cannot_write(self.path, error) from error
        return whole

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop what was logged after optimizer step `step`, for a run that continues from there.

        Of two events of one kind at one step the later stays. Events without a step stay.

        Returns:
            The events kept, in order.
        """
        self.close()
        latest: dict[tuple[Any, Any], dict[str, Any]] = {}
        for number, event in enumerate(read_metrics(self.path)):
            if "step" not in event:
                latest["", number] = event
            elif event["step"] <= step:
                latest.pop((event.get("event"), event["step"]), None)
                latest[event.get("event"), event["step"]] = event
        kept = list(latest.values())
        if self.path.exists():
            write_text(self.path, "".join(map(_line, kept)))
        return kept

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _abandon(self) -> None:
        """Close a file that could not be written, without another try to write to it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):  # closing flushes again what has just failed
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a ``metrics.jsonl``, oldest first; none where there is no file.

    Raises:
        UserError: it is no file, or a line other than a torn last one is not an event.
    """
    if not os.path.lexists(path):
        return []
    lines = reading.bytes_of(path, _MOST_BYTES).split(b"\n")
    # What follows the last line end is torn.
    return [_event_of(line, f"{path}, line {at}") for at, line in enumerate(lines[:-1], 1)]


def _event_of(line: bytes, where: str) -> dict[str, Any]:
    try:
        if len(line) > _MOST_OF_LINE:
            raise ValueError(f"longer than {_MOST_OF_LINE} bytes")
        event: dict[str, Any] = json.loads(line)
        event.update({key: float(text) for key, text in event.pop("non_finite", {}).items()})
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        shown = printable(line[:60].decode(errors="replace"))
        raise UserError(f"{where}: not a JSON object: {shown}", _MEND) from None
    try:
        events.check_event(event)
    except ValueError as error:
        raise UserError(f"{where}: not an event: {printable(error)}", _MEND) from None
    return event


class Board:
    """The VisualDL record of a run: one file, written by rank 0 alone.

    The file is made anew from `history`, so that a continued run shows each step once and in one
    curve (VisualDL shows only the newest file of a folder). Records are written directly and not
    through `visualdl.LogWriter`, whose thread prints an error and drops the data, and can block
    its caller for good once a flush has failed.

    A file that cannot be written stops the board, not the training: one warning says so, and
    `failed` is true from then on. Numbers that are not finite are left out with a warning, since
    one of them breaks the page.

    Args:
        folder: the run's ``visualdl`` folder; record files in it are replaced.
        name: how the run is called on the page.
        hyperparameters: name to a number, string, bool or None (left out).
        config: the composed configuration as YAML.
        history: events of ``metrics.jsonl``, as `MetricsLog.rewind` returns them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        hyperparameters: Mapping[str, Any],
        config: str,
        history: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        from visualdl.component import base_component

        self.folder = folder
        self.path = folder / "vdlrecords.run.log"
        self.failed = False
        self._records = base_component
        self._stream: IO[bytes] | None = None
        self._make(name, hyperparameters, config, history)

    def add(self, event: Mapping[str, Any]) -> None:
        """Draw an event's numbers: ``train/loss``, ``eval/top1`` and so on, by step."""
        self._guarded(self._scalars(event))

    def add_images(self, images: np.ndarray, *, step: int = 0) -> None:
        """Show input samples as one grid.

        Args:
            images: [n, height, width, channels], uint8, or floats, which are stretched to the
                whole range from the least to the greatest; 1 or 3 channels.
        """
        if len(images):
            grid = image_grid(images)
            self._guarded([self._records.image("input/samples", grid, step, _milliseconds({}))])

    def close(self) -> None:
        """Close the file."""
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.close()
            except OSError as error:
                self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(
        self,
        name: str,
        hyperparameters: Mapping[str, Any],
        config: str,
        history: Iterable[Mapping[str, Any]],
    ) -> None:
        # Not a record file by its name until it is complete.
        partial = self.folder / f".partial-{os.getpid()}"
        now = _milliseconds({})
        plain = {key: _hyperparameter(value) for key, value in hyperparameters.items()}
        metrics = [f"eval/{key}" for key in CURVES["eval"]]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            self._stream = partial.open("wb")
            self._write(
                [
                    self._records.meta_data(display_name=name, walltime=now),
                    self._records.hparam(name, plain, metrics, now),
                    # The page renders Markdown, where four spaces keep YAML as it is.
                    self._records.text(
                        "config", "".join(f"    {line}\n" for line in config.splitlines()), 0, now
                    ),
                ]
            )
            for event in history:
                self._write(self._scalars(event))
            partial.replace(self.path)
            for other in self.folder.glob("*vdlrecords*"):
                if other != self.path:
                    other.unlink()
        except OSError as error:
            self._fail(error)

    def _clean(self) -> None:
        """Remove what a process that ended while it made the file has left."""
        for partial in self.folder.glob(".partial-*"):
            partial.unlink()

    def _scalars(self, event: Mapping[str, Any]) -> list[Any]:
        records = []
        for key in CURVES.get(event.get("event", ""), ()):
            if event.get(key) is None:
                continue
            tag, value = f"{event['event']}/{key}", float(event[key])
            if math.isfinite(value):
                records.append(
                    self._records.scalar(tag, value, event["step"], _milliseconds(event))
                )
            else:
                _log.warning("VisualDL: %s is %s at step %s: left out", tag, value, event["step"])
        return records

    def _guarded(self, records: Sequence[Any]) -> None:
        if self._stream is not None:
            try:
                self._write(records)
            except OSError as error:
                self._fail(error)

    def _write(self, records: Iterable[Any]) -> None:
        from visualdl.writer.record_writer import RecordWriter

        assert self._stream is not None
        writer = RecordWriter(self._stream)
        for record in records:
            writer.write(record.SerializeToString())
        self._stream.flush()

    def _fail(self, error: OSError) -> None:
        self.failed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):  # closing flushes again what has just failed
                stream.close()
        with suppress(OSError):
            self._clean()
        _log.warning(
            "VisualDL stops here: %s: %s. Training goes on, metrics.jsonl has the numbers, and the "
            "board is made from it again when the run is continued.",
            self.path,
            error.strerror or error,
        )


def image_grid(images: np.ndarray) -> np.ndarray:
    """Lay images out in a grid about as wide as high, a line of 2 black pixels between them.

    Args:
        images: [n, height, width, channels] as `Board.add_images` takes them.

    Returns:
        [rows * (height + 2) - 2, columns * (width + 2) - 2, 3], uint8.
    """
    if images.dtype != np.uint8:
        finite = np.nan_to_num(images.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = finite.min(), finite.max()
        images = np.rint((finite - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
    count, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = np.zeros((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), np.uint8)
    for index, image in enumerate(images if channels == 3 else images.repeat(3, axis=-1)):
        top, left = index // columns * (height + 2), index % columns * (width + 2)
        grid[top : top + height, left : left + width] = image
    return grid


def environment(hosts: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything about this machine and its software that a number may depend on, JSON-able.

    Args:
        hosts: the nodes' host names in order; None: this node alone.
    """
    return {
        "hosts": list(hosts) if hosts is not None else [socket.gethostname()],
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
        },
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": _packages(),
        "paddle": _paddle_build(),
        "gpu": _gpu(),
        "git": _git(Path(__file__).parent),
        "image": _image(os.environ, IMAGE_FILE),
    }


@dataclass
class Result:
    """``result.json``: how a run ended.

    Attributes:
        status: completed, interrupted or failed.
        final, best: `top1`, `top5`, `loss`, `epoch`, `step` of the last and the best evaluation
            (fractions); None where there was none.
        images_per_second: training throughput over all ranks.
        wall_seconds: from the start to the end of the run.
        topology: such as "2x4".
        error: `node`, `rank`, `type`, `message`, `remedy`: of a failed run, and of an interrupted
            one that could not save what it had done.
    """

    status: str
    final: dict[str, Any] | None
    best: dict[str, Any] | None
    images_per_second: float | None
    wall_seconds: float
    topology: str
    world_size: int
    error: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")
        if self.status == "failed" and self.error is None:
            raise ValueError("a failed run has an error")
        if self.status == "completed" and self.error is not None:
            raise ValueError("a completed run has no error")

    @classmethod
    def untrained(
        cls,
        shape: Topology,
        wall_seconds: float,
        status: str = "completed",
        *,
        final: dict[str, Any] | None = None,
        best: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> Result:
        """The result of what has no training speed: another task, or a run that was cut short."""
        return cls(
            status=status,
            final=final,
            best=best,
            images_per_second=None,
            wall_seconds=wall_seconds,
            topology=str(shape),
            world_size=shape.world_size,
            error=error,
        )

    def as_dict(self) -> dict[str, Any]:
        """The keys of ``result.json``; `error` is among them only where there is one."""
        content = asdict(self)
        if self.error is None:
            del content["error"]
        return content

    def write(self, folder: RunFolder) -> None:
        """Write ``result.json``.

        Raises:
            UserError: the file cannot be written.
        """
        write_json(folder.result, self.as_dict())


def begin(folder: RunFolder, config: str) -> None:
    """Make a run folder this run's: write what it is run with, and remove an earlier result.

    Args:
        config: the composed configuration as YAML.
    """
    write_text(folder.config, config)
    hosts = os.environ.get(HOSTS_VARIABLE)
    write_json(folder.environment, environment(hosts.split(",") if hosts else None))
    folder.result.unlink(missing_ok=True)


def holds_a_run(folder: RunFolder) -> bool:
    """Whether a run is there that another one must leave alone."""
    return folder.metrics.exists() or folder.result.exists()


def scores_so_far(folder: RunFolder) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last and the best evaluation that ``metrics.jsonl`` knows, as `Result` holds them."""
    return scores_of(read_metrics(folder.metrics))


def scores_of(
    history: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last and the best evaluation among events, as `Result` holds them."""
    evaluations = [
        {key: value for key, value in event.items() if key not in ("event", "time")}
        for event in history
        if event.get("event") == "eval"
    ]
    if not evaluations:
        return None, None
    best = evaluations[0]
    for each in evaluations:
        best = each if is_better(each, best) else best
    return evaluations[-1], best


def speed_of(history: Iterable[Mapping[str, Any]]) -> float | None:
    """Images per second of the training that events tell of; None where none was recorded."""
    samples, seconds = 0, 0.0
    for event in history:
        if event.get("event") == "train":
            seconds += (event["samples"] - samples) / event["images_per_second"]
            samples = event["samples"]
    return samples / seconds if seconds else None


def read_result(folder: RunFolder) -> Result:
    """``result.json`` as `Result.write` left it.

    Raises:
        UserError: it cannot be read, or is none.
    """
    content = reading.json_of(folder.result)
    try:
        events.check_result(content)
        return Result(**content)
    except ValueError as error:
        why = printable(error, 200)
        raise UserError(f"{folder.result}: not a run's result: {why}", reading.RESTORE) from None


class TagFormatter(logging.Formatter):
    """``[node0 rank1] 14:03:59 message``, the tag on every line of the message and traceback."""

    def __init__(self, tag: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.tag = tag

    def format(self, record: logging.LogRecord) -> str:
        text = printable_lines(super().format(record))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        start = f"{self.tag} {self.formatTime(record, self.datefmt)} "
        return "\n".join(
            f"{start}{'' if number else level}{line}"
            for number, line in enumerate(text.splitlines() or [""])
        )


class _Console(logging.StreamHandler[Any]):
    """Writes to what `sys.stdout` is at that moment, so that a progress bar can stay below it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


class _LogFile(logging.FileHandler):
    """A log that ends where it cannot be written, with a word on the console; the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logging.getLogger("recipes").removeHandler(self)
        with suppress(OSError):  # closing flushes again what has just failed
            self.close()
        _log.warning("%s: %s; it ends here", self.baseFilename, error.strerror or error)


def setup_logging(tag: str, *, file: Path | None = None, level: int = logging.INFO) -> None:
    """Send the logger ``recipes`` to standard output, and to a file where one is given.

    A second call replaces the first.

    Args:
        tag: what every line begins with, such as ``[node0 rank1]`` (`Place.tag`).
        file: appended to; its folder is made.

    Raises:
        UserError: the file cannot be opened.
    """
    logger = logging.getLogger("recipes")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [_Console()]
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(file, encoding="utf-8"))
        except OSError as error:
            raise cannot_write(file, error) from error
    for handler in handlers:
        handler.setFormatter(TagFormatter(tag))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def summary_table(result: Result, folder: RunFolder) -> str:
    """The lines printed at the end of a training, in ASCII: its evaluations as a table, its speed,
    its topology, and where the results are."""
    speed = result.images_per_second
    processes = "process" if result.world_size == 1 else "processes"
    facts = [
        f"{speed:,.1f} images/s" if speed is not None else "",
        f"{duration(result.wall_seconds)} in all",
        f"topology {result.topology} ({result.world_size} {processes})",
    ]
    lines = [
        f"Training {result.status}: {', '.join(fact for fact in facts if fact)}",
        *_evaluations(result),
        f"results: {on_the_host(folder.path)}",
    ]
    if result.error is not None:
        where = f"node {result.error['node']}, rank {result.error['rank']}"
        lines.append(f"failed on {where}: {result.error['type']}: {result.error['message']}")
    return "\n".join(lines)


def _evaluations(result: Result) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = {"final": result.final, "best": result.best}
    shown = [metrics for metrics in rows.values() if metrics is not None]
    names = {"top1": "top-1"}
    if any("top5" in each for each in shown):
        names["top5"] = "top-5"
    table = Table(box=box.ASCII2)
    for heading in ("", *names.values(), "loss", "epoch", "step"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, metrics in rows.items():
        if metrics is not None:
            table.add_row(
                name,
                *(f"{metrics[key]:.2%}" if key in metrics else "" for key in names),
                "nan" if metrics["loss"] is None else f"{metrics['loss']:.4f}",
                str(metrics["epoch"] + 1),
                str(metrics["step"]),
            )
    if not table.rows:
        return []
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n").split("\n")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _finite(value: Any) -> Any:
    """Numbers as JSON has them: NaN and infinities become None."""
    value = _plain(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(event: Mapping[str, Any]) -> str:
    odd = {
        key: repr(value)
        for key, value in event.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    whole = {**event, **dict.fromkeys(odd), "non_finite": odd} if odd else event
    return json.dumps(whole, allow_nan=False) + "\n"


def _open(path: Path) -> IO[str]:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return os.fdopen(reading.no_link(path, flags), "a", encoding="utf-8")


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        with os.fdopen(reading.no_link(path, os.O_RDWR), "rb+") as stream:
            content = stream.read()
            stream.truncate(content.rfind(b"\n") + 1)


def _milliseconds(event: Mapping[str, Any]) -> int:
    return round(float(event.get("time", time.time())) * 1000)


def _hyperparameter(value: Any) -> Any:
    """What VisualDL keeps: int, float, str or None; a bool would be shown as 0 or 1."""
    value = _plain(value)
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)):
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _paddle_build() -> dict[str, Any]:
    """Paddle's own account of its build; its CPU builds say "False" for CUDA and cuDNN."""
    import paddle

    version = paddle.version
    gpu = paddle.is_compiled_with_cuda()
    return {
        "version": version.full_version,
        "commit": version.commit,
        "cuda": str(version.cuda()) if gpu else None,
        "cudnn": str(version.cudnn()) if gpu else None,
        "nccl": str(version.nccl()) if gpu else None,
    }


def _gpu() -> dict[str, Any] | None:
    """Driver and devices as NVIDIA's management library tells; None without it or a driver."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "devices": [
                {
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                }
                for handle in handles
            ],
        }
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older versions give bytes


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that holds `folder`, and whether tracked files differ."""
    if given := os.environ.get(COMMIT_VARIABLE):
        checkout, _, modified = given.partition("-")
        return {"commit": checkout, "dirty": bool(modified)}
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
                # A repository on a slow disk must not be refreshed, nor locked.
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return None
    return {"commit": commit, "dirty": bool(status)}


def _image(variables: Mapping[str, str], file: Path) -> Any:
    """The container image: as FLEET_RECIPES_IMAGE says, else as the image's own file does."""
    if variables.get("FLEET_RECIPES_IMAGE"):
        return variables["FLEET_RECIPES_IMAGE"]
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
