"""Meter of a request's body: received bytes, and the overhead of its chunks. Pure."""

from __future__ import annotations

from typing import Final

_CHUNKED_PIECE: Final = 16384
"""Bytes of a chunked body between two checks of the overhead."""
_FREE_FRAMING_BYTES: Final = 65536
_BODY_PER_FRAMING_BYTE: Final = 64


class BodyMeter:
    """Counts the bytes of one body, with and without its framing.

    Framing is the overhead of chunks: lengths, extensions, trailers. Some 10,000 chunks of any size
    are allowed, and any number of chunks of at least 512 bytes.
    """

    def __init__(self, length: int | None) -> None:
        """Start with a body of `length` bytes; None: it comes in chunks."""
        self._left = length
        self._raw_bytes = 0
        """Bytes of a chunked body with its framing."""
        self._body_bytes = 0

    def take(self, data: memoryview) -> memoryview:
        """The front of `data` to parse next, which is counted."""
        if self._left is None:
            part = data[:_CHUNKED_PIECE]
            self._raw_bytes += len(part)
        else:
            part = data[: self._left]
            self._left -= len(part)
        return part

    def note_body(self, count: int) -> None:
        """Count `count` bytes of the body itself, found by the parser."""
        self._body_bytes += count

    @property
    def costs_too_much(self) -> bool:
        """Whether there is too much framing for the bytes of the body so far."""
        room = self._body_bytes + self._body_bytes // _BODY_PER_FRAMING_BYTE
        return self._raw_bytes > _FREE_FRAMING_BYTES + room
