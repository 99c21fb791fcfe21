"""Paths that the configuration names, looked at before anything reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from recipes.config import Config, UserError
from recipes.home import expand_user

# Not there: whoever reads the path says so, and what there should be.
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_READ = ("cifar10", "imagenet")  # datasets with files of the user's


def check(config: Config) -> None:
    """See that what the run is to read may be looked at by this user.

    Raises:
        UserError: the first that may not; with its key and the system's reason.
    """
    pretrained = config.model.pretrained
    is_path = pretrained is not None and "://" not in pretrained
    named = {
        "dataset.path": config.dataset.path if config.dataset.name in _READ else None,
        "model.pretrained": expand_user(pretrained) if pretrained and is_path else None,
        "resume": config.resume,
        "checkpoint": config.checkpoint,
    }
    for key, path in named.items():
        reason = _closed(Path(path)) if path else None
        if reason is not None:
            raise UserError(
                f"{key}={path} cannot be read by uid {os.geteuid()}: {reason}",
                "name another path, or have it and the folders above it made readable",
            )


def _closed(path: Path) -> str | None:
    """Why a path cannot be looked at, be it a file or a folder; None where it can, or is absent."""
    try:
        path.stat()
    except OSError as error:
        return None if error.errno in _ABSENT else error.strerror
    needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
    return None if os.access(path, needed) else os.strerror(errno.EACCES)
