"""Other processes that hold a run folder, for tests: a lock is not seen by who holds it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
_WITHOUT_LOCKS = """
import errno, fcntl
def refuse(*_): raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = fcntl.fcntl = refuse
"""
_HOLD = """
import sys
from pathlib import Path
from recipes import claim
with claim.{}(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(
    folder: Path, *, how: str = "held", locks: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder by a context of `recipes.claim`, until the end.

    Raises:
        AssertionError: it could not, with its last words.
    """
    code = ("" if locks else _WITHOUT_LOCKS) + _HOLD.format(how)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "held\n":
            raise AssertionError(process.communicate()[1])
        yield process
    finally:
        process.communicate()
