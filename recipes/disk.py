"""What makes a file's place in a folder last, and what a disk says that cannot go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from recipes.config import UserError

# What a file system says that has no fsync of folders; there their names last as well as it can.
_NOT_OF_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
# What no program can help: full, at its quota, broken, read-only, gone.
_CANNOT_GO_ON = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


def told(error: OSError) -> UserError | None:
    """The message for an error that the disk is to blame for; None for any other."""
    if error.errno not in _CANNOT_GO_ON:
        return None
    where = f"{error.filename}: " if error.filename else "a file of the run: "
    return UserError(
        f"{where}{error.strerror or error}",
        "make room, or see what is wrong with the disk (dmesg); TMPDIR=… is where temporary files "
        "go",
    )


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on disk (fsync(2)); their files' contents apart.

    Raises:
        OSError: the folder cannot be opened, or the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)
