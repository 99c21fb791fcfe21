"""What several test files share."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from ranks import run_ranks


def pytest_configure() -> None:
    """Let Ctrl-C mean something to what tests start: a shell's background job would ignore it, and
    so would all of its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def three_ranks() -> dict[str, list[Any]]:
    """What each ``on_rank`` found on three real ranks, which are started once for all of them."""
    modules = ("test_distributed", "test_metering", "test_evaluation", "benchmark.test_split")
    return run_ranks(3, *(f"{module}:on_rank" for module in modules))
