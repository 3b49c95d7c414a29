"""Errors of HTTP servers of this package, as their clients read them."""

from __future__ import annotations

from typing import Final

import msgspec

_MAX_CHARS: Final = 300


def error_text(body: bytes) -> str:
    """The message of `{"error": {"message": ...}}` in one line, cut where it is long."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = "no reason that this server understands"
    return " ".join(str(message).split())[:_MAX_CHARS]
