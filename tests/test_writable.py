"""The remedy of a folder that cannot be written fits its mount, its owner and who this is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from recipes import mounts, writable
from recipes.config import UserError

DENIED = PermissionError(errno.EACCES, "Permission denied")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FULL = OSError(errno.ENOSPC, "No space left on device")


class Place:
    """A machine or container: who this is, whose the folder is, how it is mounted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self._patch = monkeypatch.setattr
        self._setenv = monkeypatch.setenv
        self.folder = tmp_path / "outputs"
        self.folder.mkdir()
        self._table = tmp_path / "mountinfo"
        self._patch(mounts, "MOUNTS_FILE", self._table)
        self._patch(writable, "_users_are_mapped", lambda: False)

    def set(self, *, me: int, owner: int = 0, image: bool = True, mount: str = "") -> None:
        self._patch(os, "geteuid", lambda: me)
        self._patch(writable, "_owner", lambda _: owner)
        self._patch(mounts, "IMAGE_FILE", self._table if image else Path("/nowhere"))
        own = "1 0 0:1 / / ro - overlay overlay ro\n"
        self._table.write_text(own + (f"2 1 8:1 /x {mount} ro - ext4 /dev/a ro\n" if mount else ""))

    def explain(self, error: OSError) -> UserError:
        return writable.cannot_write(self.folder / "run" / "config.yaml", error)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    return Place(monkeypatch, tmp_path)


def test_a_folder_that_docker_made_as_root(place: Place) -> None:
    place.set(me=1234, owner=0)
    told = place.explain(DENIED)
    assert f"for uid 1234: {place.folder} belongs to uid 0" in told.message
    assert 'sudo chown "$(id -u):$(id -g)" outputs' in told.remedy
    assert "mkdir -p outputs before the first run" in told.remedy
    assert "--user" not in told.remedy, "it was given already"
    place.set(me=1000, owner=0)
    assert '--user "$(id -u):$(id -g)"' in place.explain(DENIED).remedy


def test_another_user_s_folder_in_a_container(place: Place) -> None:
    place.set(me=1000, owner=1001)
    told = place.explain(DENIED)
    assert "belongs to uid 1001" in told.message
    assert told.remedy.startswith('docker run --user "$(id -u):$(id -g)"')
    assert "chown" not in told.remedy


def test_compose_is_told_its_own_setting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.set(me=1000, owner=1001)
    setting = 'RUN_AS="$(id -u):$(id -g)" docker compose …'
    monkeypatch.setenv(writable.USER_SETTING_VARIABLE, setting)
    assert place.explain(DENIED).remedy.startswith(f"{setting}, as the user")
    place.set(me=1000, owner=0)
    assert 'sudo chown "$(id -u):$(id -g)" outputs, and RUN_AS=' in place.explain(DENIED).remedy


@pytest.mark.parametrize("owner", [0, 1001])
@pytest.mark.parametrize("setting", ["", "RUN_AS=… docker compose …"])
def test_a_user_who_was_given_is_not_asked_for_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, setting: str, owner: int
) -> None:
    place.set(me=1234, owner=owner)
    monkeypatch.setenv(writable.USER_SETTING_VARIABLE, setting)
    remedy = place.explain(DENIED).remedy
    assert "--user" not in remedy
    assert "RUN_AS" not in remedy
    assert 'sudo chown "$(id -u):$(id -g)" outputs' in remedy


def test_without_root_docker_s_root_is_the_caller(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.set(me=1000, owner=0)
    monkeypatch.setattr(writable, "_users_are_mapped", lambda: True)
    assert "--user 0:0" in place.explain(DENIED).remedy


def test_one_s_own_folder(place: Place) -> None:
    for image in (True, False):
        place.set(me=1000, owner=1000, image=image)
        told = place.explain(DENIED)
        assert "belongs to" not in told.message
        assert "chmod u+rwx outputs" in told.remedy


def test_outside_of_a_container_docker_is_not_mentioned(place: Place) -> None:
    place.set(me=1000, owner=0, image=False)
    for error in (DENIED, READ_ONLY, FULL):
        told = place.explain(error)
        assert "ocker" not in told.remedy
        assert "hydra.run.dir=FOLDER" in told.remedy


def test_a_read_only_mount_says_so(place: Place) -> None:
    place.set(me=1000, owner=1000, mount=str(place.folder))
    told = place.explain(READ_ONLY)
    assert "Read-only file system" in told.message
    assert "uid" not in told.message
    assert f"{place.folder} is mounted read-only: take :ro off its --volume" in told.remedy


def test_a_read_only_container_is_told_to_mount_a_folder(place: Place) -> None:
    place.set(me=1000, owner=1000)
    told = place.explain(READ_ONLY)
    assert "this container's own files are read-only" in told.remedy
    assert 'docker run --volume "$PWD/outputs:' in told.remedy


def test_a_full_disk(place: Place) -> None:
    place.set(me=1000, owner=0)
    told = place.explain(FULL)
    assert "No space left on device" in told.message
    assert told.remedy.startswith("make room")
