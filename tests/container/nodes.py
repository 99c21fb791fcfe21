"""Several containers as the nodes of one job, on a private network."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from containers import Containers, docker

# What a node says at its end: it may take several lines, and a remedy follows it.
ERROR = re.compile(
    r"^\[node\d+(?: rank\d+)?\] error: .*?(?=^\[node|^  remedy: |\Z)", re.MULTILINE | re.DOTALL
)

# Small and slow enough to be disturbed: digits, one rank a node, one thread a rank.
QUICK = (
    "recipe=digits_resnet18",
    "log.every=1",
    "threads=1",
    "global_batch_size=16",
    "restarts=0",
    "deadlines.start=40",
    "deadlines.silence=8",
)


@dataclass
class Ended:
    """How a node's container ended.

    Attributes:
        seconds: from the fault to its end.
    """

    status: int
    output: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The error messages, in order."""
        return [message.strip() for message in ERROR.findall(self.output)]


@dataclass
class Cluster:
    """Containers on one network; `node(0)`, `node(1)` … start them."""

    containers: Containers
    network: str
    secret: str = "the secret of a test's nodes"
    names: dict[str, str] = field(default_factory=dict)

    def start(
        self, label: str, *overrides: str, options: tuple[str, ...] = (), command: str = ""
    ) -> None:
        """Start a container with `label` as its host name.

        Args:
            command: shell words before ``python train.py``, run as root.
        """
        network: tuple[str, ...] = ("--network", self.network, "--hostname", label)
        network += ("--network-alias", label, "--env", f"FLEET_RECIPES_SECRET={self.secret}")
        arguments = ("train.py", *QUICK, *overrides)
        if command:
            options = (*options, "--user", "0")
            words = " ".join(f"'{each}'" for each in arguments)
            arguments = ("bash", "-c", f"{command} exec python {words}")
        self.names[label] = self.containers.start(
            *arguments, options=("--shm-size", "256m", *network, *options)
        )

    def node(
        self, number: int, *overrides: str, topology: str = "2x1", label: str = "", **more: object
    ) -> None:
        """Start node `number` of a topology whose node 0 is called ``node0``."""
        nodes, devices = topology.split("x")
        self.start(
            label or f"node{number}",
            f"topology.nodes={nodes}",
            f"topology.devices={devices}",
            "topology.master=node0",
            f"topology.node_rank={number}",
            *overrides,
            **more,  # type: ignore[arg-type]
        )

    def output(self, label: str) -> str:
        """What a node has said so far, both streams."""
        said = docker("logs", self.names[label])
        return said.stdout + said.stderr

    def wait_for(self, label: str, pattern: str, seconds: float = 180) -> None:
        """Return once a node has said something; fail if it ends or takes too long."""
        ends = time.monotonic() + seconds
        while not re.search(pattern, self.output(label)):
            assert time.monotonic() < ends, f"no {pattern!r} from {label}:\n{self.output(label)}"
            running = docker("inspect", "-f", "{{.State.Running}}", self.names[label])
            if running.stdout.strip() != "true":
                assert re.search(pattern, self.output(label)), self.output(label)
                return
            time.sleep(0.2)

    def execute(self, label: str, *command: str) -> str:
        """Run a command inside a node's container, as root."""
        done = docker("exec", "--user", "0", self.names[label], *command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def signal_rank(self, label: str, name: str) -> None:
        """Send a signal to a node's first rank."""
        script = f"import os, signal; os.kill({self.rank_pid(label)}, signal.{name})"
        self.execute(label, "python", "-c", script)

    def rank_pid(self, label: str) -> str:
        """The process of a node's first rank, as its container counts processes."""
        script = (
            "import pathlib\n"
            "for p in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    try: words = (p / 'cmdline').read_bytes().split(b'\\0')\n"
            "    except OSError: continue\n"
            "    if words[1:2] == [b'-u'] and words[2].endswith(b'train.py'): print(p.name)\n"
        )
        return self.execute(label, "python", "-c", script).split()[0]

    def ends(
        self,
        *labels: str,
        seconds: float,
        since: float | None = None,
        poll: Callable[[], None] | None = None,
    ) -> dict[str, Ended]:
        """Wait for nodes to end; fail with all output if one does not in time."""
        started = since or time.monotonic()
        waiting, ended = list(labels), {}
        while waiting:
            for label in list(waiting):
                state = docker(
                    "inspect", "-f", "{{.State.Running}} {{.State.ExitCode}}", self.names[label]
                ).stdout.split()
                if state[0] == "false":
                    waiting.remove(label)
                    took = time.monotonic() - started
                    ended[label] = Ended(int(state[1]), self.output(label), took)
            late = {label: self.output(label)[-3000:] for label in waiting}
            assert time.monotonic() - started < seconds, f"not ended after {seconds} s: {late}"
            if poll is not None:
                poll()
            time.sleep(0.2)
        return ended

    def copy(self, label: str, path: str, target: Path) -> None:
        """Copy a file or folder out of a node's container, which may have ended."""
        done = docker("cp", f"{self.names[label]}:{path}", str(target))
        assert done.returncode == 0, done.stderr


def make_network() -> str:
    """A private network of its own name."""
    name = f"fleet-recipes-test-{uuid.uuid4().hex[:12]}"
    made = docker("network", "create", name)
    assert made.returncode == 0, made.stderr
    return name


def remove_network(name: str) -> None:
    """Remove it, once its containers are gone."""
    docker("network", "rm", name)
