"""What makes a file's place in a folder last."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on disk (fsync(2)); their files' contents apart.

    Raises:
        OSError: the folder cannot be opened, or the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
