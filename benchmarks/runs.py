"""Trainings started as a user starts them, several at a time, and what they leave behind.

A setting is a list of overrides, and may be of another commit. Several nodes are real containers on
one network where a Docker engine answers and has an image of this code, and otherwise as many
parents on this machine's loopback, which meet as machines do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import yaml

from benchmarks.comparison import Record, Share
from recipes import checkpoint
from recipes.config import UserError, load
from recipes.rendezvous import secret
from recipes.telemetry import read_metrics

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "fleet-recipes:cpu"
POLL_SECONDS = 0.2
STOP_SECONDS = 10.0
COMPOSE_SECONDS = 60.0
TAIL = 2000  # characters of a failed run's output that are shown


@dataclass(frozen=True)
class Setting:
    """What one side runs.

    Attributes:
        name: how tables and folders call it.
        overrides: of ``train.py``.
        commit: another version of the code; None: this checkout as it stands.
    """

    name: str
    overrides: tuple[str, ...]
    commit: str | None = None


@dataclass
class Job:
    """A run that is going on: one process per node.

    Attributes:
        folder: holds ``run``, and a ``console-K.log`` per node.
        where: how its nodes are made, in words.
        collect: gets the run folders of the nodes into `folder` once all have ended.
    """

    setting: Setting
    folder: Path
    where: str
    processes: list[subprocess.Popen[bytes]]
    collect: Callable[[], None] = lambda: None
    started: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> bool:
        """Whether all of its processes have."""
        return all(process.poll() is not None for process in self.processes)

    def check(self) -> None:
        """Raise if a process failed.

        Raises:
            UserError: with the end of what it said.
        """
        for number, process in enumerate(self.processes):
            if process.returncode != 0:
                path = self.folder / f"console-{number}.log"
                said = path.read_text(errors="replace")[-TAIL:].strip()
                raise UserError(
                    f"{self.setting.name} ended with status {process.returncode}:\n{said}",
                    f"the whole of it is in {path}",
                )

    def stop(self) -> None:
        """End its processes, as Ctrl-C would, and by force where that takes too long."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.terminate()
        ends = time.monotonic() + STOP_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, ends - time.monotonic()))
            process.kill()
            process.wait()


class Runner:
    """Runs settings, up to `at_once` side by side; nothing of them outlives it.

    Args:
        output: where each setting gets a folder of its name.
        at_once: how many runs go on at a time.
        image: an image of this code for runs on several nodes; None: `IMAGE` where it was made of
            this commit, else loopback.
        say: gets a line when a run begins and ends.
    """

    def __init__(
        self,
        output: Path,
        at_once: int,
        image: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._output = output
        self._at_once = at_once
        self._image = image
        self._say = say
        self._jobs: list[Job] = []
        self._worktrees: dict[str, Path] = {}
        self._lists_samples: set[str] = set()  # the commits that know log.samples
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        before = signal.signal(signal.SIGTERM, _exit)
        self._cleanup.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.stop()
        self._cleanup.close()

    def run(self, settings: Sequence[Setting]) -> dict[str, Job]:
        """Run all of them to the end.

        Returns:
            By name.

        Raises:
            UserError: an override is wrong, or a run failed.
        """
        # A mistake is told before anything has run.
        waiting = [(each, int(self.compose(each)["topology"]["nodes"])) for each in settings]
        done: dict[str, Job] = {}
        while waiting or self._jobs:
            while waiting and len(self._jobs) < self._at_once:
                self._jobs.append(self._start(*waiting.pop(0)))
            for job in [job for job in self._jobs if job.ended]:
                self._jobs.remove(job)
                job.check()
                job.collect()
                seconds = time.monotonic() - job.started
                self._say(f"{job.setting.name}: done in {seconds:.0f} s")
                done[job.setting.name] = job
            time.sleep(POLL_SECONDS)
        return done

    def compose(self, setting: Setting) -> dict[str, Any]:
        """The configuration of a setting, as its own code composes it.

        Raises:
            UserError: with what Hydra or the schema says.
        """
        code = self.code(setting)
        composed = subprocess.run(
            [sys.executable, "train.py", *self._overrides(setting), "--cfg", "job"],
            cwd=code,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=COMPOSE_SECONDS,
            check=False,
        )
        if composed.returncode != 0:
            raise UserError(f"{setting.name}: {composed.stderr.strip().removeprefix('error: ')}")
        return dict(yaml.safe_load(composed.stdout))

    def code(self, setting: Setting) -> Path:
        """The checkout that a setting runs in.

        Raises:
            UserError: git does not know the commit.
        """
        if setting.commit is None:
            return ROOT
        if setting.commit not in self._worktrees:
            path = self._output / f"code-{len(self._worktrees)}"
            made = git("worktree", "add", "--detach", str(path.resolve()), setting.commit)
            if made.returncode != 0:
                raise UserError(
                    f"commit {setting.commit}: {made.stderr.strip()}", "`git log` lists commits"
                )
            self._cleanup.callback(git, "worktree", "remove", "--force", str(path.resolve()))
            self._worktrees[setting.commit] = path.resolve()
            if "samples" in self.compose(Setting(setting.commit, (), setting.commit))["log"]:
                self._lists_samples.add(setting.commit)
        return self._worktrees[setting.commit]

    def _overrides(self, setting: Setting) -> list[str]:
        """Its overrides, without the list of samples where an older commit cannot make it."""
        lists = setting.commit is None or setting.commit in self._lists_samples
        return [each for each in setting.overrides if lists or not each.startswith("log.samples=")]

    def _start(self, setting: Setting, nodes: int) -> Job:
        folder = self._output / setting.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        reason = self._no_containers(setting) if nodes > 1 else ""
        if nodes == 1 or reason:
            job = self._start_here(setting, folder, nodes)
            if reason:
                job.where = f"{nodes} parents on loopback, since {reason}"
        else:
            job = self._start_containers(setting, folder, nodes)
        self._say(f"{setting.name}: started, {job.where}")
        return job

    def _start_here(self, setting: Setting, folder: Path, nodes: int) -> Job:
        run = folder.resolve() / "run"
        meeting = [f"topology.master=127.0.0.1:{free_port()}"] if nodes > 1 else []
        processes = []
        known = environment() | {secret.VARIABLE: secret.fresh()}
        for node in range(nodes):
            place = [*meeting, f"topology.node_rank={node}"] if nodes > 1 else []
            command = [sys.executable, "train.py", *self._overrides(setting), *place]
            with (folder / f"console-{node}.log").open("wb") as console:
                processes.append(
                    subprocess.Popen(
                        [*command, f"hydra.run.dir={run}"],
                        cwd=self.code(setting),
                        env=known,
                        stdin=subprocess.DEVNULL,
                        stdout=console,
                        stderr=subprocess.STDOUT,
                    )
                )
        return Job(setting, folder, "this machine", processes)

    def _no_containers(self, setting: Setting) -> str:
        """Why the nodes cannot be containers; empty where they can."""
        if setting.commit is not None:
            return "the image is not of that commit"
        if shutil.which("docker") is None or docker("info").returncode != 0:
            return "no Docker engine answers"
        image = self._image or IMAGE
        label = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
        found = docker("image", "inspect", "--format", label, image)
        if found.returncode != 0:
            return f"there is no image {image}"
        if self._image is None:
            changed = git("status", "--porcelain", "--", "train.py", "recipes", "conf").stdout
            if found.stdout.strip() != git("rev-parse", "HEAD").stdout.strip() or changed:
                return f"{image} is of other code than this checkout"
        return ""

    def _start_containers(self, setting: Setting, folder: Path, nodes: int) -> Job:
        mark = f"fleet-recipes-parity-{uuid.uuid4().hex[:12]}"
        names = [f"{mark}-{node}" for node in range(nodes)]
        made = docker("network", "create", mark)
        if made.returncode != 0:
            raise UserError(f"docker network create: {made.stderr.strip()}")
        self._cleanup.callback(docker, "network", "rm", mark)
        for name in names:
            self._cleanup.callback(docker, "rm", "--force", name)
        processes = []
        known = os.environ | {secret.VARIABLE: secret.fresh()}
        for node, name in enumerate(names):
            network = ["--network", mark, "--network-alias", f"node{node}"]
            options = [*network, "--hostname", f"node{node}", "--shm-size", "256m", "--name", name]
            options += ["--env", secret.VARIABLE]  # its value is not seen in ps
            place = ["topology.master=node0", f"topology.node_rank={node}"]
            command = ["train.py", *self._overrides(setting), *place, "hydra.run.dir=outputs/run"]
            with (folder / f"console-{node}.log").open("wb") as console:
                processes.append(
                    subprocess.Popen(
                        ["docker", "run", *options, self._image or IMAGE, *command],
                        env=known,
                        stdin=subprocess.DEVNULL,
                        stdout=console,
                        stderr=subprocess.STDOUT,
                    )
                )

        def collect() -> None:
            for node, name in enumerate(names):
                target = folder / ("run" if node == 0 else f"run-node{node}")
                copied = docker("cp", f"{name}:/workspace/outputs/run", str(target))
                if copied.returncode != 0:
                    raise UserError(f"docker cp from {name}: {copied.stderr.strip()}")

        return Job(
            setting, folder, f"{nodes} containers of {self._image or IMAGE}", processes, collect
        )


# --- what a run left behind ---------------------------------------------------------------------


def read_record(job: Job, name: str) -> Record:
    """What a completed run has left behind, for `comparison.compare`."""
    run = job.folder / "run"
    events = [event for event in read_metrics(run / "metrics.jsonl") if event["event"] == "train"]
    last = checkpoint.load(run / "checkpoints" / "last")
    return Record(
        name=name,
        settings=flatten(yaml.safe_load((run / "config.yaml").read_text())),
        losses={int(event["step"]): float(event["loss"]) for event in events},
        rates={int(event["step"]): float(event["lr"]) for event in events},
        shares=read_shares(sorted(job.folder.glob("run*/logs/samples-rank-*.jsonl"))),
        statistics={
            key: array
            for key, array in last.model.items()
            if key.endswith(("._mean", "._variance"))
        },
        statistics_step=int(last.state["step"]),
    )


def read_shares(files: Sequence[Path]) -> dict[int, list[Share]]:
    """The samples by optimizer step, from the ranks' ``samples-rank-K.jsonl``."""
    shares: dict[int, list[Share]] = {}
    for file in files:
        rank = int(file.stem.rpartition("-")[2])
        for line in file.read_text().splitlines():
            event = json.loads(line)
            for indices, pixels in zip(event["indices"], event["crc32"], strict=True):
                share = Share(rank, tuple(indices), tuple(pixels))
                shares.setdefault(int(event["step"]), []).append(share)
    return shares


def with_model(record: Record, job: Job) -> Record:
    """The record with its statistics in the model's order and its dropout layers' names.

    It builds the model, for which it imports Paddle.
    """
    from recipes import data, models, worker

    worker.import_paddle()
    config = load(job.folder / "run" / "config.yaml")
    config.sync_bn = False  # which changes no name
    model = models.prepare(config, data.build(config.dataset, "train", config.seed))
    order = [name for name in model.state_dict() if name in record.statistics]
    return Record(
        **{
            **vars(record),
            "statistics": {name: record.statistics[name] for name in order},
            "dropouts": tuple(random_layers(model)),
        }
    )


def random_layers(model: Any) -> list[str]:
    """The names of a model's layers that draw random numbers in training.

    Dropout and stochastic depth, by the words of their classes: PaddleClas has several of the
    latter. A layer whose rate is 0 does not count. Calls of ``F.dropout`` are not seen.
    """
    rates = ("p", "drop_prob", "dropout_prob", "prob")
    return [
        name
        for name, layer in model.named_sublayers()
        if "drop" in type(layer).__name__.lower()
        and any(getattr(layer, rate, None) for rate in rates)
    ]


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# --- processes ----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """This process's, without what would make a run part of another one."""
    parents = ("FLEET_RECIPES_RUN", "FLEET_RECIPES_REPORTS", "FLEET_RECIPES_PROGRESS", "PADDLE_")
    return {key: value for key, value in os.environ.items() if not key.startswith(parents)}


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the docker client to its end."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in this checkout to its end."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn a mistake of the user's into one message and exit status 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
