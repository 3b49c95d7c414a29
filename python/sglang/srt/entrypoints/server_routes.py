"""Health, the model, its settings and weights' addresses, load, metrics, administration of L3."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.arg_groups.extra_config import FLAG, parse_extra_config
from sglang.srt.arg_groups.remote_weights import SEED_PATH
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX, VERSION
from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import read_json
from sglang.srt.entrypoints.http.errors import ApiError, as_api_error, bad_request, checked
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.managers.tokenizer.dp_groups import sums_of
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    RequestFailed,
)
from sglang.srt.managers.tokenizer.server_channel import internal_states
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReq,
    DetachHiCacheStorageReqInput,
    GetHiCacheStorageReqInput,
    GetMetricsReq,
    GetWeightSeedReq,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.srt.utils.metrics import join_metrics

HEALTH_TIMEOUT: Final = 20.0
"""Time limit for a probe to generate its token, in seconds."""
METRICS_TIMEOUT: Final = 3.0
"""Seconds that a scrape waits for the scheduler, which may be in a long forward."""


async def health(request: Request) -> Response:
    """Answer 200 while all processes live and no shutdown has begun. The header `X-SGLang-PD-Role`
    names the role of a prefill or decode server."""
    context = context_of(request)
    _refuse_if_ending(context)
    mode = context.args.disaggregation_mode
    role = {} if mode == DisaggregationMode.NULL else {"X-SGLang-PD-Role": mode}
    return Response(headers=role)


def _refuse_if_ending(context: ServerContext) -> None:
    """Note a probe; refuse it once a shutdown has begun."""
    context.probed_at = time.monotonic()
    refusal = context.manager.ending or context.manager.refusal
    if refusal is not None:
        raise ApiError(503, refusal)


async def ready(request: Request) -> Response:
    """200 while a request would be served now: no shutdown has begun, and generation is not
    paused."""
    context = context_of(request)
    _refuse_if_ending(context)
    _refuse_if_paused(context)
    return Response()


def _refuse_if_paused(context: ServerContext) -> None:
    if context.manager.is_paused:
        raise ApiError(503, "generation is paused: POST /continue_generation ends the pause")


async def health_generate(request: Request) -> Response:
    """200 when every DP group could generate a token, now or within the last second, no shutdown
    has begun, and generation is not paused."""
    context = context_of(request)
    _refuse_if_ending(context)
    _refuse_if_paused(context)
    error = await context.probe.latest(lambda: _generate_tokens(context))
    if error is not None:
        raise error
    return Response()


async def _generate_tokens(context: ServerContext) -> ApiError | None:
    """Let every DP group generate a token; return the first error."""
    size = context.args.attn_dp_size
    probes = [_generate_token(context.manager, dp_rank) for dp_rank in range(size)]
    errors = await asyncio.gather(*probes)
    for dp_rank, error in enumerate(errors):
        if error is not None:
            which = "" if size == 1 else f"dp_rank {dp_rank}: "
            return ApiError(error.status, f"{which}{error.message}")
    return None


async def _generate_token(manager: TokenizerManager, dp_rank: int) -> ApiError | None:
    probe = GenerateRequest(
        rid=f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}",
        input_ids=token_array([0]),
        sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
        dp_rank=dp_rank,
    )
    try:
        await asyncio.wait_for(manager.generate_whole(probe), HEALTH_TIMEOUT)
    except TimeoutError:
        return ApiError(503, f"no token within {HEALTH_TIMEOUT:g} s")
    except (EngineUnavailable, RequestFailed) as error:
        return as_api_error(error)
    return None


async def model_info(request: Request) -> Response:
    """The model that is served."""
    return json_response(context_of(request).model_info)


async def server_info(request: Request) -> Response:
    """Arguments without secrets, the engine's ready message, and its present state."""
    context = context_of(request)
    states = await internal_states(context.manager.control)
    body = {
        **context.args.to_public_dict(),
        **context.ready_details,
        "status": "ready",
        "version": VERSION,
        "default_sampling_params": context.sampling_defaults.all_values,
        "transfer_engine": states[0].get("transfer_engine"),
        "kv_events": _kv_events(context.args),
        "internal_states": states,
        "sums": sums_of(states),
    }
    return json_response(body)


def _kv_events(args: ServerArgs) -> dict[str, Any] | None:
    """Addresses of KV events, for routers; None: none are published."""
    config = args.kv_events()
    assert args.page_size is not None, "resolved arguments have a page size"
    return None if config is None else config.describe(args.page_size, args.attn_dp_size)


async def get_load(request: Request) -> Response:
    """Requests and tokens in the engine, as load balancers read it."""
    states = await internal_states(context_of(request).manager.control)
    loads = [
        {
            "dp_rank": dp_rank,
            "num_reqs": state.get("num_running_reqs", 0) + state.get("num_waiting_reqs", 0),
            "num_waiting_reqs": state.get("num_waiting_reqs", 0),
            "num_tokens": state.get("used_tokens", 0),
        }
        for dp_rank, state in enumerate(states)
    ]
    return json_response(loads)


async def loads(request: Request) -> Response:
    """Requests and tokens in the engine, and its limits; the newer form of `get_load`."""
    states = await internal_states(context_of(request).manager.control)
    now, sums = datetime.now(UTC), sums_of(states)
    aggregate = {
        "total_running_reqs": sums["num_running_reqs"],
        "total_waiting_reqs": sums["num_waiting_reqs"],
        "total_reqs": sums["num_running_reqs"] + sums["num_waiting_reqs"],
        "total_tokens": sums["used_tokens"],
    }
    body = {
        "timestamp": now.isoformat(),
        "version": VERSION,
        "dp_rank_count": len(states),
        "loads": [_load_of(dp_rank, state, now) for dp_rank, state in enumerate(states)],
        "aggregate": aggregate,
    }
    return json_response(body)


def _load_of(dp_rank: int, state: dict[str, Any], now: datetime) -> dict[str, Any]:
    used, pool = state.get("used_tokens", 0), state.get("max_total_num_tokens", 0)
    return {
        "dp_rank": dp_rank,
        "timestamp": now.timestamp(),
        "num_running_reqs": state.get("num_running_reqs", 0),
        "num_waiting_reqs": state.get("num_waiting_reqs", 0),
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": pool,
        "max_running_requests": state.get("max_running_requests", 0),
        "token_usage": used / pool if pool else 0.0,
    }


async def metrics(request: Request) -> Response:
    """Metrics of the server and, if the scheduler answers in time, of the scheduler."""
    manager = context_of(request).manager
    if manager.metrics is None:
        raise ApiError(404, "metrics are off: start with --enable-metrics")
    asking = (
        _metrics_of(manager, dp_rank) for dp_rank in range(context_of(request).args.attn_dp_size)
    )
    text = manager.metrics.render() + join_metrics(await asyncio.gather(*asking))
    return Response(text.encode(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _metrics_of(manager: TokenizerManager, dp_rank: int) -> str:
    """The metrics of a DP group's scheduler, or a comment that says why they are missing."""
    try:
        answer = await manager.control.ask_one(GetMetricsReq(), dp_rank, METRICS_TIMEOUT)
    except EngineUnavailable as error:
        return f"# the scheduler's metrics are missing: {error}\n"
    return str(answer.data.get("text", ""))


async def transfer_engine_info(request: Request) -> Response:
    """Session id and, for each tensor, address, number of elements, element size and checksums.

    The first request starts the computation of the checksums; until its end `weights.digest` is
    null.
    """
    text = request.query_params.get("rank", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise bad_request(f"rank={text[:20]!r}: name a rank, as in {SEED_PATH}?rank=0", "rank")
    control = context_of(request).manager.control
    answer = await control.ask_one(GetWeightSeedReq(rank=int(text)), dp_rank=0)
    if not answer.success:
        raise ApiError(400, answer.message)
    return json_response(answer.data)


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
    return json_response(checked(answer).data)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def attach_backend(request: Request) -> Response:
    """Attach L3, or change the policies of the attached one."""
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
    """Refuse settings that only the command line may have: files of the server, code to run."""
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
    """The server's context, if the server has an operator's key. The middleware has checked that
    the request has it."""
    context = context_of(request)
    if not context.args.admin_api_key:
        raise ApiError(
            400, "cache administration needs an operator's key: start with --admin-api-key"
        )
    return context


async def _change(context: ServerContext, message: ControlReq) -> Response:
    answer = await context.manager.change_storage(message)
    body: dict[str, Any] = {**checked(answer).data, "success": True, "message": answer.message}
    return json_response(body)


ROUTES: Final = (
    Route("/health", health, methods=["GET"]),
    Route("/health_generate", health_generate, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/model_info", model_info, methods=["GET"]),
    Route("/get_model_info", model_info, methods=["GET"]),
    Route("/server_info", server_info, methods=["GET"]),
    Route("/get_server_info", server_info, methods=["GET"]),
    Route("/get_load", get_load, methods=["GET"]),
    Route("/v1/loads", loads, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/metrics/", metrics, methods=["GET"]),
    Route(SEED_PATH, transfer_engine_info, methods=["GET"]),
    Route("/get_remote_instance_transfer_engine_info", transfer_engine_info, methods=["GET"]),
    Route(_PATH, get_backend, methods=["GET"]),
    Route(_PATH, attach_backend, methods=["PUT"]),
    Route(_PATH, detach_backend, methods=["DELETE"]),
    Route(f"{_PATH}/clear", clear_backend, methods=["POST"]),
)
