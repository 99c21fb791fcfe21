"""What is told of connections that have no part in the job: little, however many they are."""

from __future__ import annotations

import logging
import time

from recipes.rendezvous import timing

_log = logging.getLogger(__name__)


class Refusals:
    """Tells the first at once, and of those that follow a line now and then."""

    def __init__(self) -> None:
        self._told: float | None = None
        self._untold = 0
        self.strangers = 0  # that spoke as this program does, and had another secret
        self.last_stranger = ""

    def note(self, address: str, why: str, *, stranger: bool = False) -> None:
        """A connection has been dropped.

        Args:
            address: of its other end.
            why: in words of this program.
            stranger: it has another secret.
        """
        if stranger:
            self.strangers += 1
            self.last_stranger = address
        now = time.monotonic()
        if self._told is not None and now - self._told < timing.TELL_SECONDS:
            self._untold += 1
            return
        more = f" ({self._untold} more since the last such line)" if self._untold else ""
        self._told, self._untold = now, 0
        _log.warning("dropped a connection from %s: %s; the job goes on%s", address, why, more)

    def hint(self) -> str:
        """What to add where a node is missing: it may be one of those."""
        if not self.strangers:
            return ""
        return (
            f"; {self.strangers} connections came with another secret than node 0's, "
            f"the last from {self.last_stranger}"
        )
