"""Why a file cannot be written, and what helps: by its mount, its owner, and who this is."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from recipes import mounts
from recipes.config import UserError

IMAGE_UID = 1000  # of the image's user, which stands for nobody on the host
# How whoever started this container gives its user; `docker run` takes --user.
USER_SETTING_VARIABLE = "FLEET_RECIPES_USER_SETTING"
CALLER = '"$(id -u):$(id -g)"'
ELSEWHERE = "choose another folder with hydra.run.dir=FOLDER"


def cannot_write(path: Path, error: OSError) -> UserError:
    """What to raise where a file or folder could not be written."""
    folder = _existing(path)
    why = error.strerror or str(error)
    owner = _owner(folder)
    refused = error.errno in (errno.EACCES, errno.EPERM)
    if refused and owner not in (None, os.geteuid()):
        why += f" for uid {os.geteuid()}: {folder} belongs to uid {owner}"
    return UserError(f"{path} cannot be written: {why}", _remedy(folder, error, owner))


def _existing(path: Path) -> Path:
    """The nearest folder of a path that exists."""
    for each in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):  # a name too long, a folder that may not be searched
            if each.is_dir():
                return each
    return Path("/")


def _owner(folder: Path) -> int | None:
    try:
        return folder.stat().st_uid
    except OSError:
        return None


def _remedy(folder: Path, error: OSError, owner: int | None) -> str:
    if error.errno == errno.EROFS:
        return _writable_mount(folder)
    if error.errno in (errno.EACCES, errno.EPERM) and owner is not None:
        return _right_owner(folder, owner)
    if error.errno == errno.ENAMETOOLONG:
        return ELSEWHERE
    return f"make room or make the folder writable, or {ELSEWHERE}"


def _writable_mount(folder: Path) -> str:
    mount = mounts.mount_of(folder)
    if mount is None or not mounts.in_image():
        return f"{mount.point if mount else folder} is mounted read-only: {ELSEWHERE}"
    if mount.point == Path("/"):
        return f"this container's own files are read-only: {mounts.volume_option(folder / 'run')}"
    return f"{mount.point} is mounted read-only: take :ro off its --volume, or {ELSEWHERE}"


def _right_owner(folder: Path, owner: int) -> str:
    name = folder.name or folder
    if owner == os.geteuid():
        return f"chmod u+rwx {name}, or {ELSEWHERE}"
    if not mounts.in_image():
        return f"have it made yours (sudo chown {CALLER} {folder}), or {ELSEWHERE}"
    if _users_are_mapped():
        return "give docker run --user 0:0: without root, Docker's root is you"
    # Who is not the image's own user has been given already: to give it again would not help.
    user = _user_setting() if os.geteuid() == IMAGE_UID else None
    if owner == 0:
        also = f", and {user}" if user else ""
        return (
            f"on the host: sudo chown {CALLER} {name}{also}. Docker makes a folder that is not "
            f"there as root: mkdir -p {name} before the first run avoids that"
        )
    if user:
        return f"{user}, as the user that {folder} belongs to on the host (uid {owner})"
    return f"on the host: sudo chown {CALLER} {name}, or {ELSEWHERE}"


def _user_setting() -> str:
    """How a person says here whom a container runs as."""
    return os.environ.get(USER_SETTING_VARIABLE) or f"docker run --user {CALLER}"


def _users_are_mapped() -> bool:
    """Whether this container's users are others on the host, as under rootless Docker."""
    try:
        first = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return False
    return first[:2] != ["0", "0"]
