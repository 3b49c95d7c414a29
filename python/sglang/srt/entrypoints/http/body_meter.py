"""How much of a request's body has come, and what its chunks cost. Pure."""

from __future__ import annotations

from typing import Final

_CHUNKED_PIECE: Final = 16384
"""Bytes of a chunked body between two looks at what its chunks cost."""
_FREE_FRAMING_BYTES: Final = 65536
_BODY_PER_FRAMING_BYTE: Final = 64


class BodyMeter:
    """Counts the bytes of one body, with and without its framing.

    Framing is what chunks add: lengths, extensions, trailers. Some 10,000 chunks of any size are
    free, and chunks of 512 bytes or more are without number.
    """

    def __init__(self, length: int | None) -> None:
        """Begin a body of `length` bytes; None: it comes in chunks."""
        self._left = length
        self._raw_bytes = 0
        """Bytes of a chunked body with its framing."""
        self._body_bytes = 0

    def take(self, data: memoryview) -> memoryview:
        """The begin of `data` that is to be parsed next, which counts as taken."""
        if self._left is None:
            part = data[:_CHUNKED_PIECE]
            self._raw_bytes += len(part)
        else:
            part = data[: self._left]
            self._left -= len(part)
        return part

    def note_body(self, count: int) -> None:
        """The parser found `count` bytes of the body itself."""
        self._body_bytes += count

    @property
    def costs_too_much(self) -> bool:
        """Whether the framing so far is too much for so little body."""
        room = self._body_bytes + self._body_bytes // _BODY_PER_FRAMING_BYTE
        return self._raw_bytes > _FREE_FRAMING_BYTES + room
