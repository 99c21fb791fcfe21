"""A home and a folder for temporary files that libraries can write to, where the user's cannot be.

Paddle and VisualDL make folders below the home when they are imported, and fail where that is read
only, full, another user's or not there at all, as in `docker run --read-only`. Paths that a user
gives with ``~`` still mean the user's own home: `expand_user`.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from recipes.config import UserError

# What is made in the home by an import.
MADE_BY_LIBRARIES = (".cache/paddle/dataset", ".visualdl/conf")
OWN_HOME_VARIABLE = "FLEET_RECIPES_HOME"  # the user's, where HOME names another
# In memory, and writable also where the whole file system is not.
SHARED_MEMORY = Path("/dev/shm")


def provide_folders() -> None:
    """Let HOME and TMPDIR name folders that can be written, for this process and its children.

    They are left as they are where they can be. Call it before Paddle or VisualDL is imported.

    Raises:
        UserError: there is no such folder.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        if not _can_make(SHARED_MEMORY):
            raise UserError(
                f"there is no folder for temporary files: {error.strerror or error}",
                "make /tmp writable, name another in TMPDIR, or give docker run --tmpfs /tmp",
            ) from None
        os.environ["TMPDIR"] = str(SHARED_MEMORY)
        tempfile.tempdir = None  # to be looked for again
    home = Path("~").expanduser() if _has_home() else None
    if home is None or not all(_can_make(home / name) for name in MADE_BY_LIBRARIES):
        if home is not None:
            os.environ.setdefault(OWN_HOME_VARIABLE, str(home))
        os.environ["HOME"] = str(_substitute())


def expand_user(path: str) -> Path:
    """A path that a user gave, ``~`` being the user's own home."""
    own = os.environ.get(OWN_HOME_VARIABLE)
    if own and (path == "~" or path.startswith("~/")):
        return Path(own) / path[2:]
    # Where ~NAME is nobody's home, and where there is none at all, it stays as it is.
    return Path(os.path.expanduser(path))  # noqa: PTH111 (the other raises there)


def _has_home() -> bool:
    """Whether there is one to be found: a uid may be in no list of users."""
    return Path(os.path.expanduser("~")).is_absolute()  # noqa: PTH111 (raises where there is none)


def _can_make(folder: Path) -> bool:
    """Whether a folder is there, or can be made, and takes a file; by trying, as only that tells
    of a full disk, a quota or a mapped user."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError:
        return False
    return True


def _substitute() -> Path:
    """One for all runs of this user; another where somebody else has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"fleet-recipes-home-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            folder = Path(tempfile.mkdtemp(prefix="fleet-recipes-home-"))
    return folder
