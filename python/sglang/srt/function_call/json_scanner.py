"""Finds the end of a JSON object in growing text, and text that cannot be JSON."""

from __future__ import annotations

from enum import Enum
from typing import Final

_OUTSIDE_STRINGS: Final = frozenset(' \t\r\n{}[]:,"+-.0123456789eEtrufalsn')


class ScanState(Enum):
    """State of the text read so far."""

    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


class JsonObjectScanner:
    """Reads a text that starts with `{`. Checks brackets and characters, not the whole grammar.

    Attributes:
        position: Characters read. If CLOSED, the object is `text[:position]`; if BROKEN,
            `text[position]` is not allowed.
        argument_end: End of the nested object that starts at `argument_start`; None while open.
    """

    def __init__(self) -> None:
        self.state = ScanState.OPEN
        self.position = 0
        self.argument_start: int | None = None
        self.argument_end: int | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def watch_argument(self, start: int, text: str) -> None:
        """Read up to `start`, and from there look for the end of the object at `text[start]`."""
        self.feed(text, start)
        self.argument_start = start

    def feed(self, text: str, end: int | None = None) -> ScanState:
        """Read on to `end`, or to the end of `text`, which may have grown since the last call."""
        stop = len(text) if end is None else end
        while self.state is ScanState.OPEN and self.position < stop:
            self._read(text[self.position])
        return self.state

    def _read(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char not in _OUTSIDE_STRINGS:
            self.state = ScanState.BROKEN
            return
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.position += 1
        if self._in_string or char not in "}]":
            return
        if self._depth == 1 and self.argument_start is not None and self.argument_end is None:
            self.argument_end = self.position
        if self._depth == 0:
            self.state = ScanState.CLOSED
