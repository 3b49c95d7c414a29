"""Heads of HTTP/1.1 requests, read by aiohttp's parser, which is llhttp."""

from __future__ import annotations

import re
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage

MAX_HEAD_BYTES: Final = 16384
"""Longest head of a request, its empty line included."""
HEAD_END: Final = b"\r\n\r\n"
_MAX_HEADERS: Final = 256
_MAX_LENGTH_DIGITS: Final = 20
"""Of 64 bits. llhttp takes zeros before them without end, and Python's numbers do not."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


def parse_head(head: bytes) -> RawRequestMessage:
    """The request whose head, with the empty line behind it, is `head`. An `Upgrade` is ignored:
    there is no protocol to upgrade to. Call it in a running event loop: the parser makes a reader
    for the body, which stays empty.

    Raises:
        ValueError: This is no head of HTTP/1.0 or HTTP/1.1. The message quotes nothing of it.
    """
    if head.startswith(b"CONNECT "):
        raise ValueError("this server is no proxy")
    parser = HttpRequestParser(
        None,
        None,
        MAX_HEAD_BYTES,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        max_headers=_MAX_HEADERS,
        auto_decompress=False,
    )
    try:
        messages, _, _ = parser.feed_data(_UPGRADE.sub(rb"\r\nno-upgrade:", head))
    except InvalidURLError:
        # The parser's reason may be the target alone.
        raise ValueError("the target is no URL") from None
    except HttpProcessingError as error:
        # The parser quotes the refused text behind its reason; it may be a key.
        raise ValueError(re.split(r"[:\n]", error.message, maxsplit=1)[0]) from None
    if not messages:
        raise ValueError("the head is not complete")
    message = messages[0][0]
    if message.version not in ((1, 0), (1, 1)):
        major, minor = message.version
        raise ValueError(f"HTTP/{major}.{minor} is not spoken here")
    if len(message.headers.get("content-length", "")) > _MAX_LENGTH_DIGITS:
        raise ValueError(f"Content-Length has more than {_MAX_LENGTH_DIGITS} digits")
    if message.headers.get("transfer-encoding", "chunked").lower() != "chunked":
        # llhttp decodes no other coding, and takes an empty one beside a length.
        raise ValueError("Transfer-Encoding may be chunked alone")
    return message
