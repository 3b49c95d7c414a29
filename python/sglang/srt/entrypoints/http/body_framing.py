"""How the bytes of a body are framed: their number, or chunks, with a bound on the overhead."""

from __future__ import annotations

import re
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
        """Count and return the front of `data` that is to be parsed next."""
        if self._left is None:
            part = data[:_CHUNKED_PIECE]
            self._raw_bytes += len(part)
        else:
            part = data[: self._left]
            self._left -= len(part)
        return part

    def note_body(self, count: int) -> None:
        self._body_bytes += count

    @property
    def is_complete(self) -> bool:
        """True if all of a body without chunks was taken."""
        return self._left == 0

    @property
    def costs_too_much(self) -> bool:
        """True if there is too much framing for the bytes of the body so far."""
        room = self._body_bytes + self._body_bytes // _BODY_PER_FRAMING_BYTE
        return self._raw_bytes > _FREE_FRAMING_BYTES + room


TOO_SMALL: Final = "the body comes in too many small chunks: send larger ones"
_MAX_LINE_BYTES: Final = 4096
_WORD: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_SIZE: Final = re.compile(
    rb'([0-9A-Fa-f]{1,16})(?:;%b(?:=(?:%b|"[ !#-\[\]-~]*"))?)*\r\n' % (_WORD, _WORD)
)
_TRAILER: Final = re.compile(rb"%b:[\t -~\x80-\xff]*\r\n" % _WORD)


class ChunkDecoder:
    """Decodes one chunked body (RFC 9112, 7.1). Extensions and trailers are dropped.

    Attributes:
        has_ended: The last chunk and the trailers have come.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._left = 0
        """Bytes to come of the present chunk, with the line end behind it."""
        self._line = b""
        """Begin of a line that is not complete."""
        self._in_trailers = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """The bytes of the body in `data`, and those behind the body's end.

        Raises:
            ValueError: This is no chunked body.
        """
        parts: list[bytes] = []
        data, self._line = self._line + data, b""
        at, end = 0, len(data)
        while at < end and not self.has_ended:
            if self._left > 2:
                parts.append(data[at : at + self._left - 2])
                at += len(parts[-1])
                self._left -= len(parts[-1])
            elif self._left:
                if data[at] != b"\n\r"[self._left - 1]:
                    raise ValueError("a chunk is longer than its size says")
                at += 1
                self._left -= 1
            else:
                line_end = data.find(b"\n", at) + 1
                if not line_end:
                    self._line = data[at:]
                    if len(self._line) > _MAX_LINE_BYTES:
                        raise ValueError(TOO_SMALL)
                    break
                self._take_line(data, at, line_end)
                at = line_end
        return b"".join(parts), data[at:] if self.has_ended else b""

    def _take_line(self, data: bytes, begin: int, end: int) -> None:
        if self._in_trailers:
            self.has_ended = data[begin:end] == b"\r\n"
            if not (self.has_ended or _TRAILER.fullmatch(data, begin, end)):
                raise ValueError("a trailer of the body is no header")
            return
        size = _SIZE.fullmatch(data, begin, end)
        if size is None:
            raise ValueError("the size of a chunk is no number")
        length = int(size[1], 16)
        if length:
            self._left = length + 2
        else:
            self._in_trailers = True
