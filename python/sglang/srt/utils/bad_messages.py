"""Bytes that are no message: what decoding them raises, and how many came."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes of any kind; the last for values nested too deeply."""


class BadMessages:
    """Counts what was dropped, and logs every count that is a power of two.

    So the log stays short under a flood and its last such line is off by a factor of two at most.
    One thread.
    """

    def __init__(self, logger: logging.Logger, kind: str) -> None:
        """Log to `logger`; `kind` says what is dropped, e.g. `message`."""
        self._logger = logger
        self._kind = kind
        self.count = 0

    def add(self, cause: object) -> None:
        """One more was dropped; the first line of `cause` says what was wrong with it."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            lines = str(cause).splitlines() or [type(cause).__name__]
            self._logger.warning(
                "dropped a bad %s (%d so far): %s", self._kind, self.count, lines[0][:200]
            )
