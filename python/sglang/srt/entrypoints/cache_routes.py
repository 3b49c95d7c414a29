"""Administration of L3 at run time: attach, show, detach, clear."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang.srt.arg_groups.extra_config import FLAG, parse_extra_config
from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.managers.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReq,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    GetHiCacheStorageReqInput,
)
from sglang.srt.managers.tokenizer.control_client import STORAGE_TIMEOUT
from sglang.srt.utils.auth import AuthLevel, auth_level

_PATH = "/hicache/storage-backend"


class AttachBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The backend to attach, or the policies to change."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_backend(request: Request) -> Response:
    """The attached backend and the policies, without secrets."""
    answer = await _administered(request).manager.control.ask(GetHiCacheStorageReqInput())
    return json_response(_checked(answer).data)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def attach_backend(request: Request) -> Response:
    """Attach a backend, or update the policies of the attached one."""
    context = _administered(request)
    body = await read_json(request, AttachBody)
    if not body.hicache_storage_backend:
        raise bad_request(
            "hicache_storage_backend is empty: name a backend", "hicache_storage_backend"
        )
    _check_attachable(context, body)
    message = AttachHiCacheStorageReqInput(**msgspec.structs.asdict(body))
    return await _change(context, message)


def _check_attachable(context: ServerContext, body: AttachBody) -> None:
    """Refuse settings that only the command line may have: files of the server, code to run.

    Raises:
        ApiError: 403 or 400; names the field.
    """
    text = body.hicache_storage_backend_extra_config_json
    args = context.args
    updates_own = args.hicache_storage_backend == "dynamic" and text is None
    allowed = args.hicache_allow_dynamic_attach or updates_own
    if body.hicache_storage_backend == "dynamic" and not allowed:
        raise ApiError(
            403,
            "hicache_storage_backend dynamic runs code of the caller's choice: start the server "
            "with --hicache-allow-dynamic-attach to allow it",
            param="hicache_storage_backend",
        )
    if text is None:
        return
    field = "hicache_storage_backend_extra_config_json"
    if text.lstrip().startswith("@"):
        raise bad_request(
            f"{field}: files of the server are not read for a request: send the JSON itself", field
        )
    try:
        parse_extra_config(text)
    except ValueError as error:
        raise bad_request(str(error).replace(FLAG, field), field) from None
    except RecursionError:
        raise bad_request(f"{field} is nested too deeply", field) from None


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def detach_backend(request: Request) -> Response:
    """Detach the backend; its data stays. Idempotent."""
    return await _change(_administered(request), DetachHiCacheStorageReqInput())


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def clear_backend(request: Request) -> Response:
    """Remove this namespace's objects from the backend."""
    return await _change(_administered(request), ClearHiCacheReqInput())


def _administered(request: Request) -> ServerContext:
    """The server's context. The middleware has already checked the operator's key, if there is one.

    Raises:
        ApiError: 400: the server has no operator's key, so this endpoint is closed.
    """
    context = context_of(request)
    if not context.args.admin_api_key:
        raise ApiError(
            400, "cache administration needs an operator's key: start with --admin-api-key"
        )
    return context


def _checked(answer: ControlReqOutput) -> ControlReqOutput:
    if not answer.success:
        raise ApiError(400, answer.message or "the scheduler refused it")
    return answer


async def _change(context: ServerContext, message: ControlReq) -> Response:
    answer = await context.manager.control.ask(message, STORAGE_TIMEOUT)
    body: dict[str, Any] = {**_checked(answer).data, "success": True, "message": answer.message}
    return json_response(body)


ROUTES: Final = (
    Route(_PATH, get_backend, methods=["GET"]),
    Route(_PATH, attach_backend, methods=["PUT"]),
    Route(_PATH, detach_backend, methods=["DELETE"]),
    Route(f"{_PATH}/clear", clear_backend, methods=["POST"]),
)
