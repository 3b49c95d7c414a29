"""`GET /hicache`: shows the cache, as a page for people or as JSON.

The page is one file without outside addresses; it asks this same address for JSON. It has no data,
so that a browser, which cannot send a key with a link, gets it with the refusal and asks for the
key.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any, Final

from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import context_of
from sglang.srt.entrypoints.http.sse import json_response
from sglang.srt.messages.io_struct import GetCacheViewReq
from sglang.srt.utils.auth import AuthLevel, auth_level, refused_with

_PAGE: Final = Path(__file__).with_name("hicache_page.html").read_text(encoding="utf-8")
_JSON: Final = "application/json"


def _hash_of(tag: str) -> str:
    """The source expression that allows the one element `tag` of the page."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def _wants_page(accept: str) -> bool:
    """True unless the header `Accept` names JSON."""
    return _JSON not in accept


def page(status: int) -> Response:
    """The page; a refusal has its status."""
    return Response(_PAGE.encode(), status, _HEADERS, "text/html; charset=utf-8")


@auth_level(AuthLevel.ADMIN_OPTIONAL)
@refused_with(lambda status, accept: page(status) if _wants_page(accept) else None)
async def hicache(request: Request) -> Response:
    """The content of the cache as JSON if the header `Accept` names it, else the page.

    The query `dp_rank` chooses a DP group; absent: the first. The schedulers are asked once a
    second at most, however many ask.
    """
    if _wants_page(request.headers.get("accept", "")):
        return page(200)
    context = context_of(request)

    async def ask() -> list[dict[str, Any]]:
        answers = await context.manager.control.ask_each(GetCacheViewReq())
        return [answer.data for answer in answers]

    views = await context.cache_views.latest(ask)
    named = request.query_params.get("dp_rank", "0")
    groups = {str(number): number for number in range(len(views))}
    if named not in groups:
        raise bad_request(
            f"dp_rank={named[:20]!r}: this server has the groups 0 to {len(views) - 1}", "dp_rank"
        )
    dp_rank = groups[named]
    own = {"dp_rank": dp_rank, "dp_size": len(views)}
    mode = context.args.disaggregation_mode
    answer = json_response({**views[dp_rank], **own, "disaggregation_mode": mode})
    answer.headers["Cache-Control"] = "no-store"
    return answer


ROUTES: Final = (Route("/hicache", hicache, methods=["GET"]),)
