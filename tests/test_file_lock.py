"""Locks between processes, and file systems that have none."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from recipes import file_lock, models
from recipes.config import UserError
from recipes.scratch import Scratch


def refuse_locks(patch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "refused")

    patch.setattr(fcntl, "flock", refused)


def test_one_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as first, (tmp_path / "a").open("w") as second:
        assert file_lock.taken(first.fileno(), "a")
        assert not file_lock.taken(second.fileno(), "a")
        first.close()
        assert file_lock.taken(second.fileno(), "a")


@pytest.mark.parametrize("number", file_lock.NO_LOCKS)
def test_without_locks_the_work_goes_on_with_a_warning(
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_locks(monkeypatch, number)
    with (tmp_path / "a").open("w") as file:
        assert file_lock.taken(file.fileno(), "the cache")
    assert "the cache is on a file system without locks" in caplog.text
    with models._locked(tmp_path / "b"):  # as downloads do
        pass
    with Scratch() as scratch:
        assert scratch.path.is_dir()


def test_a_disk_that_fails_is_no_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.EIO)
    with (tmp_path / "a").open("w") as file, pytest.raises(OSError):
        file_lock.taken(file.fileno(), "a")


def test_a_download_that_another_process_holds_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LOCK_TIMEOUT", 0.1)
    with (
        models._locked(tmp_path / "b"),
        pytest.raises(UserError, match="another process has downloaded"),
        models._locked(tmp_path / "b"),
    ):
        pass
