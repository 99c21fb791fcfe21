"""Libraries find a home and a folder for temporary files that they can write to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipes import home
from recipes.config import UserError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of this test's own; HOME, TMPDIR and the rest are put back."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(home.OWN_HOME_VARIABLE, "")
    monkeypatch.delenv(home.OWN_HOME_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_a_home_that_can_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    home.provide_folders()
    assert os.environ["HOME"] == str(tmp_path / "mine")
    assert home.OWN_HOME_VARIABLE not in os.environ


# /proc takes no folder from anybody, root included; a file is none, and /dev/full/… neither.
@pytest.mark.parametrize("unusable", ["/proc/nowhere", "/proc", "/dev/null", "/dev/full/x"])
def test_another_home_takes_the_place_of_one_that_cannot(
    unusable: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", unusable)
    for _ in range(2):  # the ranks come after the parent, the next run after this one
        home.provide_folders()
        assert Path("~").expanduser().parent == temporary
        assert [path.name for path in temporary.iterdir()] == [f"fleet-recipes-home-{os.geteuid()}"]
        assert Path("~").expanduser().stat().st_mode & 0o777 == 0o700
        assert home.expand_user("~/weights") == Path(unusable) / "weights"
        assert home.expand_user("weights") == Path("weights")


@pytest.mark.parametrize("name", home.MADE_BY_LIBRARIES)
def test_a_folder_below_the_home_that_is_in_the_way(
    name: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / Path(name).parts[0]).write_text("a file, as good as another's folder")
    home.provide_folders()
    assert Path("~").expanduser().parent == temporary


def test_a_uid_without_a_home(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda _: "~")
    home.provide_folders()
    assert Path(os.environ["HOME"]).parent == temporary


def test_a_name_that_somebody_else_took(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / f"fleet-recipes-home-{os.geteuid()}").symlink_to("/")
    monkeypatch.setenv("HOME", "/proc")
    home.provide_folders()
    assert Path(os.environ["HOME"]).parent == temporary
    assert not Path(os.environ["HOME"]).is_symlink()


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    monkeypatch.setattr(home, "SHARED_MEMORY", Path("/proc"))
    with pytest.raises(UserError, match="no folder for temporary files") as raised:
        home.provide_folders()
    assert "--tmpfs /tmp" in raised.value.remedy


def test_what_libraries_make_in_the_home_is_what_is_looked_at(tmp_path: Path) -> None:
    """An import that begins to write elsewhere in the home is found here."""
    (tmp_path / "home").mkdir()
    words = (
        "import paddle, visualdl.component.base_component, visualdl.writer.record_writer\n"
        "import paddleclas.ppcls.arch.backbone, matplotlib.pyplot, hydra, sklearn.datasets\n"
    )
    subprocess.run(
        [sys.executable, "-c", words],
        env=os.environ | {"HOME": str(tmp_path / "home")},
        check=True,
        capture_output=True,
        timeout=200,
    )
    made = {str(path.relative_to(tmp_path / "home")) for path in (tmp_path / "home").rglob("*")}
    known = {
        str(part)
        for name in (*home.MADE_BY_LIBRARIES, ".visualdl/x2paddle", ".visualdl/fastdeployserver")
        for part in (Path(name), *Path(name).parents)
    }
    # matplotlib copes by itself where it cannot write there.
    own = {name for name in made if "matplotlib" in name or name in (".config", ".cache")}
    assert made - own <= known | {".visualdl/conf/config.json"}
