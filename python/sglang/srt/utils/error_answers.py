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


_ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The JSON object of an error, in Anthropic's form."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_anthropic(path: str) -> bool:
    """True if errors at `path` have Anthropic's form."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_text(body: bytes) -> str:
    """The message of an `error_object`, in one line and cut if it is long."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        message = "no reason that this server understands"
    return " ".join(str(message).split())[:_MAX_CHARS]
