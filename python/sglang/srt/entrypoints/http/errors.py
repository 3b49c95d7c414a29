"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from sglang.srt.constrained.constraint import ConstraintKind
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    InvalidRequest,
    RequestFailed,
)
from sglang.srt.messages.io_struct import ControlReqOutput
from sglang.srt.utils.error_answers import anthropic_error, error_object, is_anthropic
from sglang.srt.utils.spelling import did_you_mean

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS: Final = 5
"""Seconds after which a client may repeat a request that was refused with 503."""


class ApiError(Exception):
    """A refusal with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """`param` is the field's name; `code` is a word for programs."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


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


def _methods_at(request: Request) -> list[str]:
    """The methods of all routes that match the path of `request`, sorted."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods.update(getattr(route, "methods", None) or ())
    return sorted(methods)


def error_body(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return error_object(error.message, kind, error.code or error.status, error.param)


def error_response(
    error: ApiError, path: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The answer to a request to `path`, in the form of the API that it belongs to."""
    if error.status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_SECONDS)}
    own = is_anthropic(path)
    body = anthropic_error(error.status, error.message) if own else error_body(error)
    return JSONResponse(body, status_code=error.status, headers=headers)


def install_error_handlers(app: Starlette) -> None:
    """Convert all errors that leave an endpoint to the common format."""

    async def known(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        assert api_error is not None, "registered for the types that as_api_error knows"
        return error_response(api_error, request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 405:
            allowed = ", ".join(_methods_at(request))
            message += f"; this path takes {allowed}"
            headers = {**(headers or {}), "Allow": allowed}
        elif error.status_code == 404:
            paths = (getattr(route, "path", "") for route in request.app.routes)
            message += did_you_mean(request.url.path, filter(None, paths))
        return error_response(ApiError(error.status_code, message), request.url.path, headers)

    async def unknown(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # uvicorn closes the connection after an exception. Without the header a client would lose
        # the next request that it sends on the connection.
        return error_response(
            ApiError(500, "internal error; the server's log has the cause"),
            request.url.path,
            {"connection": "close"},
        )

    for kind in (ApiError, InvalidRequest, RequestFailed, EngineUnavailable):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unknown)
