"""Addresses of this server's weights, for servers that read them."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang.srt.arg_groups.remote_weights import SEED_PATH
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.server_context import context_of
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.managers.messages.io_struct import GetWeightSeedReq

_OLDER_PATH: Final = "/get_remote_instance_transfer_engine_info"


async def transfer_engine_info(request: Request) -> Response:
    """Session id and, for each tensor, address, number of elements, element size and checksums.

    The first request starts the computation of the checksums; until its end `weights.digest` is
    null.
    """
    text = request.query_params.get("rank", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise bad_request(f"rank={text[:20]!r}: name a rank, as in {SEED_PATH}?rank=0", "rank")
    answer = await context_of(request).manager.control.ask(GetWeightSeedReq(rank=int(text)))
    if not answer.success:
        raise ApiError(400, answer.message)
    return json_response(answer.data)


ROUTES: Final = (
    Route(SEED_PATH, transfer_engine_info, methods=["GET"]),
    Route(_OLDER_PATH, transfer_engine_info, methods=["GET"]),
)
