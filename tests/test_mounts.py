"""Which mount holds a path, and whether a container takes it with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import mounts
from recipes.config import Config, compose, register_schema

ROOT = Path(__file__).resolve().parents[1]
# As a container sees them: its own files, memory, a bind, one with a blank in its name, a pod's.
CONTAINER = """\
700 600 0:50 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a
701 700 0:51 / /proc rw,nosuid - proc proc rw
702 700 0:52 / /workspace/memory rw - tmpfs tmpfs rw,size=65536k
703 700 8:1 /home/me/outputs /workspace/outputs rw,relatime - ext4 /dev/sda1 rw
704 700 8:1 /home/me/data /workspace/data ro,relatime - ext4 /dev/sda1 rw
705 700 8:1 /srv/my\\040runs /workspace/my\\040runs rw - ext4 /dev/sda1 rw
706 700 8:1 /pods/1/volumes/kubernetes.io~empty-dir/o /workspace/pod rw - xfs /dev/b rw
707 703 0:60 / /workspace/outputs/deep rw - tmpfs tmpfs rw
708 703 8:1 /later /workspace/outputs/deep rw - ext4 /dev/sda1 rw
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(CONTAINER)
    return file


@pytest.mark.parametrize(
    ("path", "point", "lost", "read_only"),
    [
        ("/workspace/elsewhere/run", "/", True, False),
        ("/workspace/memory/run", "/workspace/memory", True, False),
        ("/workspace/outputs/run", "/workspace/outputs", False, False),
        ("/workspace/outputs-2/run", "/", True, False),
        ("/workspace/data/set", "/workspace/data", False, True),
        ("/workspace/my runs/a", "/workspace/my runs", False, False),
        ("/workspace/pod/run", "/workspace/pod", True, False),
        ("/workspace/outputs/deep/run", "/workspace/outputs/deep", False, False),
        ("/workspace/outputs/../elsewhere", "/", True, False),
    ],
)
def test_the_mount_that_holds_a_path(
    path: str, point: str, lost: bool, read_only: bool, table: Path
) -> None:
    mount = mounts.mount_of(Path(path), table)
    assert mount is not None
    assert (mount.point, mount.read_only) == (Path(point), read_only)
    assert mounts.is_lost_with_the_container(Path(path), table) == lost


def test_this_system_has_a_mount_for_every_path(tmp_path: Path) -> None:
    mount = mounts.mount_of(tmp_path)
    assert mount is not None
    assert mount.point.is_mount()


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert mounts.mount_of(tmp_path, tmp_path / "none") is None
    assert not mounts.is_lost_with_the_container(tmp_path, tmp_path / "none")


@pytest.fixture
def image(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of the image."""
    monkeypatch.setattr(mounts, "MOUNTS_FILE", table)
    monkeypatch.setattr(mounts, "IMAGE_FILE", table)


def composed(*overrides: str) -> Config:
    register_schema()
    config, _ = compose(ROOT / "conf", ["recipe=digits_resnet18", *overrides])
    return config


PREPARE = ("task=prepare", "dataset=imagenet", "dataset.path=data")


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    ("overrides", "folder", "option"),
    [
        ((), "/workspace/outputs/run", None),
        ((), "/workspace/results/run", '"$PWD/results:/workspace/results"'),
        ((), "/elsewhere/run", '"$PWD/elsewhere:/elsewhere"'),
        (("task=benchmark",), "/workspace/o/run", '"$PWD/o:/workspace/o"'),
        (("task=evaluate", "checkpoint=x"), "/workspace/o/run", '"$PWD/o:/workspace/o"'),
        (("task=preflight",), "/workspace/o/run", None),
        (("recipe=smoke",), "/workspace/o/run", None),
        ((*PREPARE, "prepare.output=/workspace/data/p"), "/workspace/o/run", None),
        ((*PREPARE, "prepare.output=/workspace/d/p"), "/workspace/o/run", '"$PWD/d:/workspace/d"'),
        ((*PREPARE, "prepare.verify=true"), "/workspace/o/run", None),
    ],
)
def test_what_goes_with_the_container_is_said_in_one_line(
    overrides: tuple[str, ...], folder: str, option: str | None
) -> None:
    said = mounts.what_is_lost(composed(*overrides), Path(folder))
    if option is None:
        assert said is None
    else:
        assert said is not None
        assert f"docker run --volume {option}" in said
        assert "\n" not in said


def test_elsewhere_than_in_the_image_nothing_is_said(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS_FILE", table)
    assert mounts.what_is_lost(composed(), Path("/workspace/elsewhere/run")) is None


@pytest.mark.usefixtures("image")
def test_the_host_s_name_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = Path.cwd() / "outputs" / "run", Path("/elsewhere/run")
    assert mounts.on_the_host(run) == run
    monkeypatch.setenv(mounts.HOST_OUTPUTS_VARIABLE, "/home/me/outputs")
    assert mounts.on_the_host(run) == Path("/home/me/outputs/run")
    assert mounts.on_the_host(other) == other
