"""The line of a job of one node."""

from __future__ import annotations

from typing import Any

from recipes.rendezvous.failures import Failure, JobFailed


class Alone:
    """The line of a job of one node: to nobody.

    Args:
        restarts: how many failures it may have and be started again.
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self.stop_step: int | None = None

    def stop_all(self, step: int) -> None:
        """There are no others."""

    def exchange(self, name: str, value: Any, deadline: float) -> list[Any]:
        """The own value."""
        del name, deadline
        return [value]

    def report(self, failure: Failure) -> JobFailed:
        """What to raise."""
        again = self._restarts > 0 and not failure["fatal"]
        self._restarts -= again
        return JobFailed(failure, again=again)

    def tell(self, failure: Failure) -> None:
        """There is nobody to tell."""

    def check(self) -> bool:
        """Nobody asks."""
        return False
