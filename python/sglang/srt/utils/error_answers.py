"""Errors of HTTP servers of this package, as their clients read them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_MAX_CHARS: Final = 300


def error_object(
    message: str, kind: str, code: int | str, param: str | None = None
) -> dict[str, Any]:
    """The JSON object of an error, in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_text(body: bytes) -> str:
    """The message of an `error_object`, in one line and cut if it is long."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = "no reason that this server understands"
    return " ".join(str(message).split())[:_MAX_CHARS]
