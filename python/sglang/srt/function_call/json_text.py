"""JSON as models write it: the end of an object that is still being written, and mended strings."""

from __future__ import annotations

import json
from bisect import bisect_left
from enum import Enum
from typing import Any, Final

_OUTSIDE_STRINGS: Final = frozenset(' \t\r\n{}[]:,"+-.0123456789eEtrufalsn')
_AFTER_BACKSLASH: Final = frozenset('"\\/bfnrt')
_HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
_LENGTH_OF_UNICODE: Final = len("\\u0000")


class ScanState(Enum):
    """State of the text read so far."""

    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


class JsonObjectScanner:
    """Reads a text that starts with `{`. Checks brackets and characters, not the whole grammar.

    Models write line breaks and tabs into strings, and backslashes before letters, as in regular
    expressions. JSON has neither; `mended` writes both as JSON does.

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
        self._escape: int | None = None
        """Place of a backslash whose escape is not complete."""
        self._mends: list[tuple[int, str]] = []
        """Places, ascending, and what to write for the character there."""

    @property
    def settled(self) -> int:
        """Characters whose reading no further text changes."""
        return self.position if self._escape is None else self._escape

    def feed(self, text: str, end: int | None = None) -> ScanState:
        """Read on to `end`, or to the end of `text`, which may have grown since the last call."""
        stop = len(text) if end is None else end
        while self.state is ScanState.OPEN and self.position < stop:
            self._read(text[self.position])
        return self.state

    def mended(self, text: str, begin: int, end: int) -> str:
        """`text[begin:end]`, with its strings as JSON writes them. `end` is at most `settled`."""
        pieces = []
        for place, written in self._mends[bisect_left(self._mends, (begin,)) :]:
            if place >= end:
                break
            pieces += [text[begin:place], written]
            begin = place + 1
        return "".join([*pieces, text[begin:end]])

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_in_string(char)
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

    def _read_in_string(self, char: str) -> None:
        if self._escape is not None:
            length = self.position - self._escape
            is_unicode = length > 1
            if char in (_HEX_DIGITS if is_unicode else _AFTER_BACKSLASH):
                if not is_unicode or length == _LENGTH_OF_UNICODE - 1:
                    self._escape = None
                return
            if char == "u" and not is_unicode:
                return
            self._mends.append((self._escape, "\\\\"))
            self._escape = None
        if char == "\\":
            self._escape = self.position
        elif char == '"':
            self._in_string = False
        elif char < " ":
            self._mends.append((self.position, json.dumps(char)[1:-1]))


def valid_json(text: str) -> tuple[str, Any]:
    """The JSON text `text`, with its strings mended where they need it, and its value. Constants
    that only some readers know are refused. Raises ValueError if it is not JSON."""
    try:
        return text, _loads(text)
    except ValueError:
        mended = _mended(text)
    return mended, _loads(mended)


def _mended(text: str) -> str:
    # In a list, because the scanner ends with the bracket that it began with.
    scanner, listed = JsonObjectScanner(), f"[{text}]"
    if scanner.feed(listed) is not ScanState.CLOSED or scanner.position != len(listed):
        return text
    return scanner.mended(listed, 1, len(listed) - 1)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
