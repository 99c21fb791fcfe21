"""What the environment may say of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import thread_variables
from recipes.config import Config, UserError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", thread_variables.NAMES)
@pytest.mark.parametrize("text", ["100000", "0", "-3", "abc", "1.5", "4,100000", "4,,2", "9" * 99])
def test_what_no_library_can_start_is_refused(name: str, text: str) -> None:
    with pytest.raises(UserError, match=f"{name}={text[:50]}.* in the environment") as caught:
        thread_variables.check(Config(), {name: text})
    assert f"unset {name}" in caught.value.remedy
    thread_variables.check(Config(threads=2), {name: text})  # which replaces it


@pytest.mark.parametrize("text", ["", " ", "1", " 8 ", "4,2", "1024"])
def test_what_can_be_started_is_taken(text: str) -> None:
    thread_variables.check(Config(), dict.fromkeys(thread_variables.NAMES, text))
    thread_variables.check(Config(), {})


def test_a_run_is_refused_before_a_library_aborts(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "epochs=1"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "100000"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: OMP_NUM_THREADS=100000 in the environment must be")
    assert list(tmp_path.iterdir()) == []
