"""What makes a file's place in a folder last."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# What a file system says that has no fsync of folders; there their names last as well as it can.
_NOT_OF_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)


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
