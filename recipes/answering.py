"""Whether the file systems of the paths that a user names answer at all.

A look at a file of a mount whose server is away never returns, and no signal or deadline of
Python's reaches the thread that looks. So each path is looked at once, first, by a thread that is
left behind where it does not come back.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

from recipes.config import DeadlinesConfig, UserError
from recipes.printable import printable

PATHS = (
    *("dataset.path", "model.pretrained", "resume", "checkpoint"),
    *("prepare.output", "benchmark.output", "runs.folder"),
)
RUN_FOLDER = "hydra.run.dir="  # which Hydra makes before it gives any setting


def require(composed: DictConfig) -> None:
    """See that the paths of a configuration, which need not have been checked, answer.

    Raises:
        UserError: the first that does not within ``deadlines.read``; with its key.
    """
    seconds = OmegaConf.select(composed, "deadlines.read", throw_on_resolution_failure=False)
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        seconds = DeadlinesConfig.read  # whoever checks the settings refuses it
    for key in PATHS:
        path = OmegaConf.select(composed, key, throw_on_resolution_failure=False)
        if isinstance(path, str) and path and "://" not in path:
            _require(key, path, seconds)


def require_run_folder(arguments: Iterable[str]) -> None:
    """See that the run folder of a command line answers, if it names one.

    Raises:
        UserError: it does not.
    """
    for argument in arguments:
        if argument.startswith(RUN_FOLDER) and argument != RUN_FOLDER:
            _require("hydra.run.dir", argument.removeprefix(RUN_FOLDER), DeadlinesConfig.read)


def _require(key: str, path: str, seconds: float) -> None:
    look = threading.Thread(target=_look, args=(path,), name="look", daemon=True)
    look.start()
    look.join(seconds)
    if look.is_alive():
        raise UserError(
            f"{key}={printable(path, 200)} does not answer: a look at it has not come back within "
            f"{seconds:g} s (deadlines.read)",
            "see that the server of the mount is there (`stat` on the path returns then), or name "
            "another path",
        )


def _look(path: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # absent, or no path: for whoever reads it
        os.stat(os.path.expanduser(path))  # noqa: PTH111, PTH116  (Path raises at some words)
