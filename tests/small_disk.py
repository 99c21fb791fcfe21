"""A file system of a test's own that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount one at `folder`, which is made; skips without the right to mount.

    Args:
        options: of mount(8), such as ``size=8m``.
    """
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs takes root")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
