"""`last` and `best`: links where the file system has them, small files elsewhere."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes import checkpoint, pointers
from recipes.config import ModelConfig, UserError
from recipes.models import fetch_pretrained
from recipes.snapshot import Snapshot


def snapshot(step: int) -> Snapshot:
    return Snapshot({"w": np.full(3, step, np.float32)}, {}, {"step": step})


def forbid_links(patch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, "symlink", refuse)
    patch.setattr(os, "link", refuse)


@pytest.fixture(params=["EPERM", "ENOSYS", "EOPNOTSUPP", "vfat", "exfat"])
def without_links(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder on a file system without symbolic links: pretended, and real ones."""
    if request.param.startswith("E"):
        forbid_links(monkeypatch, getattr(errno, request.param))
        yield tmp_path
        return
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    mount = ["mount", "-o", "loop", str(image), str(folder)]
    for command in ([f"mkfs.{request.param}", str(image)], mount):
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no {request.param} can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_every_reader_takes_pointers_that_are_files(without_links: Path) -> None:
    folder = without_links / "run" / "checkpoints"
    for step in (1, 2, 3, 4, 4):
        path = checkpoint.save(folder, snapshot(step), best=step == 2, keep=1)
        for name in pointers.NAMES[: 1 + (step > 1)]:
            assert (folder / name).is_file()
            assert not (folder / name).is_symlink()
    assert sorted(each.name for each in folder.iterdir()) == [
        *("best", "last", "step-00000002", "step-00000004"),
    ]
    assert checkpoint.load(folder / "last").state["step"] == 4
    assert checkpoint.load(folder / "best").state["step"] == 2
    checkpoint.verify(folder / "best")
    assert checkpoint.resolve(str(folder / "last"), without_links) == path
    assert checkpoint.existing(str(folder / "best")) == folder / "best"
    found = checkpoint.find(str(folder / "best"), without_links, print)
    assert found is not None
    assert found[1].state["step"] == 2
    weights = fetch_pretrained(ModelConfig(pretrained=str(folder / "best")))
    assert weights == folder / "step-00000002" / "model.safetensors"
    checkpoint.mark_best(folder, 4)
    assert checkpoint.load(folder / "best").state["step"] == 4


def test_links_and_files_take_turns(tmp_path: Path) -> None:
    """A run that is copied from one kind of file system to the other goes on there."""
    for step in range(1, 5):
        with pytest.MonkeyPatch.context() as patch:
            if step % 2:
                forbid_links(patch, errno.EPERM)
            checkpoint.save(tmp_path, snapshot(step), best=True, keep=1)
        assert (tmp_path / "last").is_symlink() == (step % 2 == 0)
        assert checkpoint.load(tmp_path / "last").state["step"] == step
        assert checkpoint.load(tmp_path / "best").state["step"] == step


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPROTO, errno.ENOSYS, errno.EIO])
def test_whatever_a_file_system_says_to_a_link_a_file_does(tmp_path: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forbid_links(patch, number)
        checkpoint.save(tmp_path, snapshot(1), best=True, keep=1)
    assert checkpoint.load(tmp_path / "last").state["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", "step-00000001"]


def test_a_pointer_that_cannot_be_moved_leaves_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, snapshot(1), best=True, keep=2)
    checkpoint.save(tmp_path, snapshot(2), best=False, keep=2)

    def replace(*_: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(UserError, match="best cannot be made to lead to step-00000002: No space"):
        checkpoint.mark_best(tmp_path, 2)
    assert checkpoint.load(tmp_path / "best").state["step"] == 1
    assert not list(tmp_path.glob(".*"))


def test_copies_in_place_of_the_pointers_stay(tmp_path: Path) -> None:
    """`cp -rL` makes folders of links."""
    checkpoint.save(tmp_path / "a", snapshot(1), best=True, keep=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=False)
    assert not (tmp_path / "b" / "last").is_symlink()
    assert checkpoint.load(tmp_path / "b" / "last").state["step"] == 1
    checkpoint.save(tmp_path / "b", snapshot(2), best=False, keep=1)
    assert checkpoint.load(tmp_path / "b" / "last").state["step"] == 2
    assert checkpoint.load(tmp_path / "b" / "best").state["step"] == 1
    assert checkpoint.load(tmp_path / "b" / "last.copy-1").state["step"] == 1


@pytest.mark.parametrize(
    "content",
    [
        *("", "\n", "step-1", "../other/step-00000001", "/etc", "step-00000001/..", "."),
        *("step-00000001\0", "step-00000001\nstep-00000002", "step-" + "1" * 5000, "étape"),
        "step-0000000\u0661",  # a digit, but not of ASCII
    ],
)
def test_a_file_that_names_no_checkpoint_beside_it_is_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, snapshot(1), best=False, keep=1)
    checkpoint.save(tmp_path / "other", snapshot(1), best=False, keep=1)
    (folder / "best").write_text(content)
    for read in (checkpoint.load, checkpoint.verify, pointers.follow):
        with pytest.raises(UserError, match=r"best: does not name a checkpoint beside it"):
            read(folder / "best")
    checkpoint.save(folder, snapshot(2), best=False, keep=1)  # and is in nobody's way


@pytest.mark.parametrize("kind", ["link", "file"])
def test_pointers_to_nothing_and_to_themselves_are_named(tmp_path: Path, kind: str) -> None:
    for name, target in (("last", "step-00000009"), ("best", "best")):
        if kind == "link":
            (tmp_path / name).symlink_to(target)
        elif name == "last":
            (tmp_path / name).write_text(target)
    with pytest.raises(UserError, match="last: a link to nothing"):
        checkpoint.existing(str(tmp_path / "last"))
    if kind == "link":
        with pytest.raises(UserError, match="best: a link to itself"):
            checkpoint.existing(str(tmp_path / "best"))
    checkpoint.save(tmp_path, snapshot(1), best=True, keep=1)
    assert checkpoint.load(tmp_path / "best").state["step"] == 1
