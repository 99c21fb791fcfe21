"""What several test files share."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks


@pytest.fixture(scope="session")
def three_ranks() -> dict[str, list[Any]]:
    """What each ``on_rank`` found on three real ranks, which are started once for all of them."""
    modules = ("test_distributed", "test_metering", "test_evaluation", "benchmark.test_split")
    return run_ranks(3, *(f"{module}:on_rank" for module in modules))
