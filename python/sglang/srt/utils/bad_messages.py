"""Malformed messages: the exceptions of decoding them, and a counter of dropped ones."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for malformed bytes; the last one for values nested too deeply."""


class BadMessages:
    """Counts dropped messages, and logs every count that is a power of two.

    The log stays short under a flood, and its last count is at least half of the true one. For one
    thread.
    """

    def __init__(self, logger: logging.Logger, kind: str) -> None:
        """Log to `logger`; `kind` names the dropped thing, e.g. `message`."""
        self._logger = logger
        self._kind = kind
        self.count = 0

    def add(self, cause: object) -> None:
        """Count one dropped message; the first line of `cause` is the reason."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            lines = str(cause).splitlines() or [type(cause).__name__]
            self._logger.warning(
                "dropped a bad %s (%d so far): %s", self._kind, self.count, lines[0][:200]
            )
