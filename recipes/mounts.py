"""Where a folder lies: on which mount, whether it outlives its container, its name on the host."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.config import Config
from recipes.mountinfo import Mount, mounts

MOUNTS_FILE = Path("/proc/self/mountinfo")
IMAGE_FILE = Path("/etc/fleet-recipes/image.json")  # is there in the image alone
WORKSPACE = Path("/workspace")
# The host's name of outputs/, which only who starts the container can know (docker/train.sh).
HOST_OUTPUTS_VARIABLE = "FLEET_RECIPES_HOST_OUTPUTS"
IN_MEMORY = ("tmpfs", "ramfs")
POD_FOLDER = "kubernetes.io~empty-dir"  # a volume of Kubernetes' that goes with its pod


def in_image() -> bool:
    """Whether this process runs in a container of the project's image."""
    return IMAGE_FILE.exists()


def mount_of(path: Path, mounts_file: Path | None = None) -> Mount | None:
    """The mount that holds a path, which need not exist; None where the system does not tell."""
    whole = path.resolve()
    known = mounts(mounts_file or MOUNTS_FILE)
    holding = [mount for mount in known if whole.is_relative_to(mount.point)]
    # Of two on one point the later hides the earlier.
    return max(
        enumerate(holding), key=lambda each: (len(each[1].point.parts), each[0]), default=(0, None)
    )[1]


def is_lost_with_the_container(path: Path, mounts_file: Path | None = None) -> bool:
    """Whether a path goes with its container: it is on no mount, or on one that goes too."""
    mount = mount_of(path, mounts_file)
    return mount is not None and (
        mount.point == Path("/") or mount.kind in IN_MEMORY or POD_FOLDER in mount.root
    )


def what_is_lost(config: Config, run_folder: Path) -> str | None:
    """One line for a person, where this container takes the results with it; with what to do."""
    kept = {
        "train": run_folder,
        "evaluate": run_folder,
        "benchmark": run_folder,
        "prepare": Path(config.prepare.output) if config.prepare.output else None,
    }.get(config.task.name)
    if kept is None or not in_image() or not is_lost_with_the_container(kept):
        return None
    return f"the results go with this container; to keep them: {volume_option(kept)}"


def volume_option(path: Path) -> str:
    """The option of ``docker run`` by which a path is kept on the host."""
    whole = path.resolve()
    folder = whole.parent
    if whole.is_relative_to(WORKSPACE) and whole != WORKSPACE:
        folder = WORKSPACE / whole.relative_to(WORKSPACE).parts[0]
    return f'mkdir -p {folder.name}; docker run --volume "$PWD/{folder.name}:{folder}" …'


def on_the_host(path: Path) -> Path:
    """A path as the host of this container knows it, where that was told; else as it is."""
    told = os.environ.get(HOST_OUTPUTS_VARIABLE)
    outputs = Path.cwd() / "outputs"
    whole = path.resolve()
    if not told or not in_image() or not whole.is_relative_to(outputs):
        return path
    return Path(told) / whole.relative_to(outputs)
