"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sglang.srt.constrained.constraint import ConstraintKind
from sglang.srt.entrypoints.http.request import Response
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    InvalidRequest,
    RequestFailed,
)
from sglang.srt.messages.io_struct import ControlReqOutput
from sglang.srt.utils.error_answers import anthropic_error, error_object, is_anthropic

RETRY_AFTER_SECONDS: Final = 5
"""Seconds after which a client may repeat a request that was refused with 503."""


class ApiError(Exception):
    """A refusal with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """`param` is the field's name; `code` is a word for programs. Surrogates, which a client's
        JSON may have and no answer can, become escapes."""
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.param = _encodable(param) if param else param
        self.code = code


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def as_api_error(error: Exception) -> ApiError | None:
    """The error that clients get for `error`; None: `error` is internal to the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code=error.code)
    if isinstance(error, RequestFailed):
        return ApiError(error.status_code, str(error), param=_constraint_field(str(error)))
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error))
    return None


def checked(answer: ControlReqOutput) -> ControlReqOutput:
    """`answer`. Raises ApiError: the scheduler refused what it was asked for."""
    if not answer.success:
        raise ApiError(400, answer.message or "the scheduler refused it")
    return answer


@contextlib.contextmanager
def client_names(*changes: tuple[str, str]) -> Iterator[None]:
    """Context for an API that is served by way of chat completions: refusals of a request (status
    400) name fields as that API does. `changes` are patterns of chat's names and what replaces
    them (`re.sub`), in the message and in the field's name."""
    try:
        yield
    except Exception as error:
        known = as_api_error(error)
        if known is None or known.status != 400:
            raise
        message, param = known.message, known.param or ""
        for pattern, name in changes:
            message, param = re.sub(pattern, name, message), re.sub(pattern, name, param)
        raise ApiError(400, message, param=param or None, code=known.code) from error


def _constraint_field(message: str) -> str | None:
    """Name of the field with which an error of the grammar backend or of `stop_regex` begins."""
    name = message.partition(":")[0]
    return name if name in (*ConstraintKind.__members__.values(), "stop_regex") else None


def error_body(error: ApiError, kind: str | None = None) -> dict[str, Any]:
    """The object of `error`, of a `kind` that its status does not tell."""
    kind = kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return error_object(error.message, kind, error.code or error.status, error.param)


def error_response(
    error: ApiError, path: str, headers: dict[str, str] | None = None, kind: str | None = None
) -> Response:
    """The answer to a request to `path`, in the form of the API that it belongs to. `kind`: see
    `error_body`."""
    if error.status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_SECONDS)}
    own = is_anthropic(path)
    body = anthropic_error(error.status, error.message) if own else error_body(error, kind)
    return Response(msgspec.json.encode(body), error.status, headers, "application/json")
