"""Whether a file that a run writes to is still the one that its folder has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from recipes.config import UserError


def check_in_place(stream: IO[Any], path: Path) -> None:
    """See that what is written to `stream` can be found at `path`.

    Raises:
        UserError: the file or its folder was removed or moved, or another one has its name.
    """
    try:
        found = os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        found = False
    if not found:
        gone = path if path.parent.is_dir() else path.parent
        raise UserError(
            f"{gone} was removed, moved or replaced while the run was writing to it",
            "start the run again, and leave its folder alone until it has ended; "
            "resume=CHECKPOINT goes on with a checkpoint that was kept",
        )
