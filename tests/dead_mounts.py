"""A mount that does not answer, like one whose server is gone: FUSE with nobody behind it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_DETACH = 2  # MNT_DETACH of umount2(2)


@contextlib.contextmanager
def dead_mount(folder: Path) -> Iterator[Path]:
    """Meanwhile, every look into `folder`, which is made, waits for ever; skips without the right
    to mount."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"dead", bytes(folder), b"fuse", 0, options) != 0:
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield folder
        finally:
            libc.umount2(bytes(folder), _DETACH)
    finally:
        os.close(server)  # whoever waits is told that it is not connected
