"""Sessions, pauses of generation, profiles, the role. SGLang's names and bodies."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import (
    WHOLE_PROMPT,
    Ignored,
    Refused,
    read_json,
    refuse_fields,
)
from sglang.srt.entrypoints.http.errors import ApiError, bad_request, checked, error_response
from sglang.srt.entrypoints.http.pd_role import SWITCH_FLAG
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import context_of
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.managers.tokenizer.request_limits import check_session
from sglang.srt.managers.tokenizer.server_channel import QUICK_TIMEOUT
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import (
    ControlReq,
    ControlReqOutput,
    SessionReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
)
from sglang.srt.utils.auth import AuthLevel, auth_level, refused_with

MOST_STEPS: Final = 500
"""Most steps of a profile, which are kept in memory until its end."""
PROFILE_TIMEOUT: Final = 60.0
"""Seconds for a profile to begin or to end."""


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A session; it is another one under other keys."""

    session_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class OpenSessionBody(SessionBody):
    """The session to open; without an id it gets one."""

    capacity_of_str_len: Annotated[int | None, Ignored("prompts are sent whole")] = None
    timeout: Annotated[
        float | None, Ignored("marks end after --keep-session-seconds, and change no answer")
    ] = None
    streaming: Annotated[Any, Refused(WHOLE_PROMPT)] = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Choices of a pause: the requests under way wait, or end."""

    abort: bool | None = None
    mode: str | None = None
    """SGLang's form of `abort`: `abort` or `in_place`."""


class ContinueBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An empty body: there are no choices."""


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Length and content of a profile."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] | None = None
    activities: list[str] | None = None
    """Some of `CPU` and `GPU`."""
    record_shapes: bool | None = None
    output_dir: Annotated[Any, Refused("start the server with SGLANG_TORCH_PROFILER_DIR")] = None
    start_step: Annotated[Any, Refused("ask when the steps begin")] = None
    profile_by_stage: Annotated[Any, Refused("a profile has steps of both kinds")] = None
    merge_profiles: Annotated[Any, Refused("each rank's trace is a file of its own")] = None
    with_stack: Annotated[Any, Refused("watch the process with py-spy")] = None


class RoleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The role that the server gets."""

    new_role: str


async def open_session(request: Request) -> Response:
    """The id of a session; what is kept for a session that is known is kept longer."""
    body = await read_json(request, OpenSessionBody, may_be_empty=True)
    refuse_fields(body)
    name = uuid.uuid4().hex if body.session_id is None else body.session_id
    await _ask(request, _session(body, name))
    return json_response(name)


async def close_session(request: Request) -> Response:
    """End a session: nothing is kept for it any more. An unknown one is no error."""
    body = await read_json(request, SessionBody, may_be_empty=True)
    if body.session_id is None:
        raise bad_request("session_id: name the session that ends", "session_id")
    message = _session(body, body.session_id)
    message.is_closed = True
    await _ask(request, message)
    return json_response({"success": True})


def _session(body: SessionBody, name: str) -> SessionReqInput:
    check_session(name, body.extra_key, body.cache_salt)
    key = combine_extra_key(body.extra_key, body.cache_salt)
    return SessionReqInput(session_id=name, extra_key=key)


@auth_level(AuthLevel.ADMIN_FORCE)
async def pause_generation(request: Request) -> Response:
    """Launch no further step. Requests wait, or with `abort` those under way end."""
    manager = context_of(request).manager
    body = await read_json(request, PauseBody, may_be_empty=True)
    if (refusal := manager.ending or manager.refusal) is not None:
        raise ApiError(503, refusal)
    if body.mode not in (None, "abort", "in_place"):
        raise bad_request(
            f"mode={body.mode[:32]!r} is not supported: use in_place, which keeps the requests and "
            "their pages, or abort",
            "mode",
        )
    if body.abort or body.mode == "abort":
        await manager.abort_all()
    checked(await manager.pause())
    return json_response({"success": True, "message": "generation is paused"})


@auth_level(AuthLevel.ADMIN_FORCE)
async def continue_generation(request: Request) -> Response:
    """End a pause. Does nothing if the engine is not paused."""
    await read_json(request, ContinueBody, may_be_empty=True)
    checked(await context_of(request).manager.resume())
    return json_response({"success": True, "message": "generation continues"})


@auth_level(AuthLevel.ADMIN_FORCE)
async def start_profile(request: Request) -> Response:
    """Profile the next steps on every rank; the answer names the trace of the first one."""
    body = await read_json(request, ProfileBody, may_be_empty=True)
    refuse_fields(body)
    for one in body.activities or ():
        if one not in ("CPU", "GPU"):
            raise bad_request(
                f"activities: {one[:32]!r} is not supported: use CPU and GPU, or leave it out",
                "activities",
            )
    message = StartProfileReqInput(
        profile_id=datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f"),
        num_steps=MOST_STEPS // 10 if body.num_steps is None else body.num_steps,
        activities=body.activities,
        record_shapes=bool(body.record_shapes),
    )
    answer = await _ask(request, message, PROFILE_TIMEOUT)
    return json_response({"success": True, "num_steps": message.num_steps, **answer.data})


@auth_level(AuthLevel.ADMIN_FORCE)
async def stop_profile(request: Request) -> Response:
    """End the profile under way; its trace appears soon."""
    await read_json(request, ContinueBody, may_be_empty=True)
    answer = await _ask(request, StopProfileReqInput(), PROFILE_TIMEOUT)
    return json_response({"success": True, **answer.data})


def _no_admin(status: int, accept: str) -> Response:
    """The refusal of whoever has no operator's key: always 403."""
    why = "this endpoint needs the admin key: send the header 'Authorization: Bearer KEY'"
    return error_response(ApiError(403, why), "", kind="authentication_error")


@auth_level(AuthLevel.ADMIN_FORCE)
@refused_with(_no_admin)
async def switch_role(request: Request) -> Response:
    """Change a prefill server into a decode server, or back. The server has to be idle."""
    context = context_of(request)
    mode = context.args.disaggregation_mode
    if context.pd_role is None or not context.args.enable_pd_role_switch:
        raise bad_request(
            f"the role of this server does not change (--disaggregation-mode {mode}): start a "
            f"prefill or decode server with {SWITCH_FLAG}"
        )
    body = await read_json(request, RoleBody)
    if body.new_role not in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE):
        raise bad_request(f"new_role={body.new_role[:32]!r}: must be prefill or decode", "new_role")
    role = context.pd_role
    try:
        answer = await role.switch(context.manager, DisaggregationMode(body.new_role))
    finally:
        context.args, context.ready_details["routes"] = role.args, role.routes
    return json_response(answer)


async def _ask(
    request: Request, message: ControlReq, timeout: float = QUICK_TIMEOUT
) -> ControlReqOutput:
    return checked(await context_of(request).manager.control.ask(message, timeout))


ROUTES: Final = (
    Route("/open_session", open_session, methods=["POST"]),
    Route("/close_session", close_session, methods=["POST"]),
    Route("/pause_generation", pause_generation, methods=["POST"]),
    Route("/continue_generation", continue_generation, methods=["POST"]),
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
    Route("/pd_role_switch", switch_role, methods=["POST"]),
)
