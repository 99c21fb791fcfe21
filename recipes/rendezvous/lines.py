"""Lines out of a stream, none longer than a bound."""

from __future__ import annotations


class TooLong(ValueError):
    """A line has no end within its bound."""


class Lines:
    """Takes in bytes as they come, and gives the lines that are complete.

    Args:
        most: bytes of a line; it may be raised between two lines.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = bytearray()
        self._searched = 0  # bytes that are known to hold no end of a line

    def add(self, data: bytes) -> None:
        """Take in what has come."""
        self._held += data

    def next(self) -> bytes | None:
        """The next line, without its end; None where it is not yet complete.

        Raises:
            TooLong: it is longer than `most`, or will be.
        """
        end = self._held.find(b"\n", self._searched)
        if (len(self._held) if end < 0 else end) > self.most:
            raise TooLong
        if end < 0:
            self._searched = len(self._held)
            return None
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        self._searched = 0
        return line
