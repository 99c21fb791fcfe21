"""What one node knows of itself."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from recipes import network, telemetry
from recipes.config import Config, DatasetConfig, Machine, UserError, uses_gpu
from recipes.launcher_environment import without_foreign

# A node's facts as they travel between the nodes: JSON-able, see `gather`.
Facts = dict[str, Any]

FORM = 2  # of the facts: nodes that run other versions of this code may send another one
# Keys that nodes may set differently: who and where a node is, and where its data lies.
OWN_KEYS = ("topology.master", "topology.node_rank", "network.interface", "dataset.path")
COUNT_SECONDS = 10.0  # for counting the dataset's files
# Finding out how large the model is takes two seconds or more. It is done where checkpoints of a
# model of so many parameters (ViT-L has 304e6) would not fit on the disk.
LARGE_MODEL = 350_000_000
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_ROOT = Path(__file__).resolve().parents[2]
_CGROUP = Path("/sys/fs/cgroup")
_SMI_SECONDS = 10.0


def gather(
    config: Config, run_folder: telemetry.RunFolder, node: int, address: str, port: int
) -> Facts:
    """This node's facts, within about `deadlines.start`, as Paddle's import may take its time.

    Args:
        config: checked.
        run_folder: where node 0 will save checkpoints.
        node: this node's number.
        address: this node's, on the way to node 0.
        port: the one it is `listening` on.

    Returns:
        JSON-able. ``build`` is what `telemetry.environment` tells, with ``archs``, the GPU
        architectures that this Paddle has kernels for, and on node 0 ``parameters`` of the model
        where the disk is not plentiful; ``build_problem`` says why it is None. Sizes are in bytes.

    Raises:
        UserError: ``network.interface`` does not exist here.
    """
    gpu = uses_gpu(config)
    devices = visible_devices(query_devices(), Machine.this().visible) if gpu else []
    disk_free = shutil.disk_usage(_existing(run_folder.path)).free
    sized = (
        node == 0
        and config.task.name != "evaluate"
        and disk_free < checkpoint_bytes(LARGE_MODEL, config.save.keep)
    )
    build = _BuildProcess(
        config if sized else None, config.deadlines.start
    )  # beside it, everything else
    try:
        settings = network.environment(config, address, os.environ)
        chosen = {name: os.environ.get(name) or settings.get(name) for name in INTERFACE_VARIABLES}
        own = flat_config(config)
        facts = {
            "form": FORM,
            "node": node,
            "host": socket.gethostname(),
            "address": address,
            "port": port,
            "interface": network.interface_of(address),
            "interfaces": {name: value for name, value in chosen.items() if value},
            "python": platform.python_version(),
            "source": source_digest(_ROOT),
            "config": own,
            "config_digest": _digest(json.dumps(own, sort_keys=True).encode()),
            "device": "gpu" if gpu else "cpu",
            "device_count": _count(Machine.this().visible, devices) if gpu else None,
            "devices": devices,
            "driver": devices[0]["driver"] if devices else None,
            "memory_free": memory_free(_CGROUP),
            "shared_memory": shared_memory(config),
            "dataset": dataset_facts(config.dataset),
            "disk_free": disk_free if node == 0 else None,
        }
        return facts | build.result()
    finally:
        build.end()


def checkpoint_bytes(parameters: int, keep: int) -> int:
    """The most room that a run's checkpoints need.

    Each holds the parameters and at most two moments of each, in float32; besides the `keep` newest
    there are the best one and the one that is being written.
    """
    return parameters * 3 * 4 * (keep + 2)


def flat_config(config: Config) -> dict[str, Any]:
    """The configuration as dotted keys, without those that nodes may set differently."""
    return {key: value for key, value in _flatten(asdict(config)) if key not in OWN_KEYS}


def source_digest(root: Path) -> str:
    """Names and contents of the program's files in one short number."""
    digest = hashlib.sha256()
    for path in sorted([root / "train.py", *(root / "recipes").rglob("*.py")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def query_devices() -> list[dict[str, Any]]:
    """This node's GPUs and the processes on them, as nvidia-smi tells; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []

    def query(what: str) -> list[list[str]]:
        done = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
        return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]

    try:
        rows = query("--query-gpu=index,uuid,name,compute_cap,driver_version")
        processes = query("--query-compute-apps=gpu_uuid,pid")
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer: Paddle will say so
    return [
        {
            "index": int(index),
            "uuid": uuid,
            "name": name,
            "capability": [int(part) for part in capability.split(".")],
            "driver": driver,
            "processes": [int(row[1]) for row in processes if row[0] == uuid],
        }
        for index, uuid, name, capability, driver in rows
    ]


def visible_devices(
    devices: Sequence[dict[str, Any]], visible: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The devices that CUDA_VISIBLE_DEVICES names, in its order; None names all.

    A name is an index or the beginning of a UUID. Those that fit no device (such as a part of one,
    MIG-…) are left out.
    """
    if visible is None:
        return list(devices)
    return [
        device
        for name in visible
        for device in devices
        if name == str(device["index"]) or (not name.isdigit() and device["uuid"].startswith(name))
    ]


def memory_free(cgroup: Path) -> int:
    """Bytes of memory that processes can still take, also under a container's limit.

    Args:
        cgroup: where the control groups are mounted (version 2, or 1 with a folder ``memory``).
    """
    free = int(psutil.virtual_memory().available)
    for folder, limit_file, used_file, cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (
            cgroup / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            # File pages that nobody uses make room when it is needed.
            free = min(free, int(limit) - used + int(stat.get(cache, 0)))
    return max(free, 0)


def shared_memory(config: Config) -> dict[str, Any]:
    """Free bytes of /dev/shm, and the loader's complaint where they are too few for it."""
    from recipes.data.worker_processes import (
        SHARED_MEMORY,
        check_shared_memory,
        worker_processes,
    )

    assert config.batch_size is not None
    facts: dict[str, Any] = {"problem": None, "remedy": None}
    try:
        facts["free"] = shutil.disk_usage(SHARED_MEMORY).free
        check_shared_memory(config)
    except OSError as error:
        facts["free"] = None
        if worker_processes(config):
            facts["problem"] = f"{SHARED_MEMORY} cannot be used: {error.strerror}"
            facts["remedy"] = "mount a tmpfs there, or set dataset.workers=0"
    except UserError as error:
        facts["problem"], facts["remedy"] = error.message, error.remedy
    return facts


def dataset_facts(config: DatasetConfig) -> dict[str, Any]:
    """Whether the data is here, and how many files each split has.

    Returns:
        ``path``; ``problem``, why the data is not present, or None; ``files``, split to number
        (of images in a prepared dataset), which is None where counting took longer than
        `COUNT_SECONDS`; ``checksum`` of a prepared dataset, else None.
    """
    facts: dict[str, Any] = {"path": config.path, "problem": None, "files": {}, "checksum": None}
    if config.name == "cifar10":
        facts |= _cifar10_facts(config)
    elif config.name == "imagenet":
        facts |= _imagenet_facts(config)
    return facts


def _cifar10_facts(config: DatasetConfig) -> dict[str, Any]:
    from recipes.data import cifar10

    found = cifar10.locate(Path(config.path)) if config.path else None
    if found is None:  # perhaps to be downloaded
        return {} if config.download else {"problem": f"CIFAR-10 is not at {config.path}"}
    if found.is_file():
        return {"files": {"archive": 1}}
    present = set(os.listdir(found))  # noqa: PTH208 (names alone)
    return {
        "files": {
            "train": len(present.intersection(cifar10.TRAIN_FILES)),
            "eval": len(present.intersection(cifar10.EVAL_FILES)),
        }
    }


def _imagenet_facts(config: DatasetConfig) -> dict[str, Any]:
    from recipes.data import description, imagenet, list_files, shards

    try:
        root = imagenet.dataset_root(config)
        if shards.is_prepared(root):
            manifest = description.read_manifest(root)
            images = {name: split.images for name, split in manifest.splits.items()}
            return {"files": images, "checksum": manifest.checksum}
    except UserError as error:
        return {"problem": error.message}
    if any((root / name).is_file() for name in list_files.LISTS.values()):
        lists = {split: root / name for split, name in list_files.LISTS.items()}
        absent = [str(path) for path in lists.values() if not path.is_file()]
        if absent:
            return {"problem": f"{absent[0]} is missing"}
        return {"files": {split: _count_lines(path) for split, path in lists.items()}}
    folders = {split: root / name for split, name in imagenet.FOLDERS.items()}
    absent = [str(path) for path in folders.values() if not path.is_dir()]
    if absent:
        return {"problem": f"{absent[0]} is missing"}
    ends = time.monotonic() + COUNT_SECONDS
    return {"files": {split: count_images(path, ends) for split, path in folders.items()}}


def count_images(folder: Path, ends: float) -> int | None:
    """Image files in a folder and those below it; None where `ends` (monotonic) comes first."""
    from recipes.data.decoding import EXTENSIONS

    count = 0
    waiting = [str(folder)]
    while waiting:
        if time.monotonic() > ends:
            return None
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    # The name first: asking for the kind of every file would take a call each.
                    if os.path.splitext(entry.name)[1].lower() in EXTENSIONS:  # noqa: PTH122
                        count += 1
                    elif entry.is_dir():
                        waiting.append(entry.path)
        except OSError:  # links that lead to each other: a training names them
            return None
    return count


def _count_lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(bool(line.strip()) for line in stream)


class _BuildProcess:
    """Asks Paddle for its build, in a process of its own.

    Args:
        config: whose model's parameters are to be counted as well; None: none.
        seconds: after which no answer is waited for.
    """

    def __init__(self, config: Config | None, seconds: float) -> None:
        asked = None
        if config is not None:
            classes = config.model.num_classes or config.dataset.num_classes or 1000
            model = asdict(config.model) | {"pretrained": None, "pretrained_sha256": None}
            asked = {
                "model": model,
                "num_classes": classes,
                "image_size": config.dataset.image_size,
            }
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recipes.preflight", json.dumps(asked)],
            cwd=_ROOT,
            env={**without_foreign(os.environ), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is the parent's to handle
        )

    def result(self) -> dict[str, Any]:
        """``build`` and ``build_problem``, one of them None; waits."""
        problem = None
        try:
            output, errors = self._process.communicate(
                timeout=max(0.0, self._ends - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            self._process.kill()
            output, errors = self._process.communicate()
            problem = f"Paddle did not tell its build within {self._seconds:g} s (deadlines.start)"
        build: dict[str, Any] = {}
        for line in output.splitlines(keepends=True):
            if line.endswith("\n"):
                build |= json.loads(line)
        if not build and problem is None:
            last = errors.strip().splitlines()[-1:] or [f"status {self._process.returncode}"]
            problem = f"Paddle cannot be imported: {last[0]}"
        return (
            {"build": build, "build_problem": None}
            if build
            else {
                "build": None,
                "build_problem": problem,
            }
        )

    def end(self) -> None:
        """Leave no process behind."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.is_dir())


def _count(visible: Sequence[str] | None, devices: Sequence[Any]) -> int | None:
    """How many devices a run can use; None where that is not known."""
    if visible is not None:
        return len(visible)
    return len(devices) or None
