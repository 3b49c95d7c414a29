"""Cross-origin requests (CORS): the headers that let a page of another origin read an answer.

Any origin is allowed, as in SGLang. A page without the key gains no access, because a page has to
send the bearer token itself. Credentials that browsers add by themselves, such as cookies, are not
allowed with such requests: the server does not read them, but a proxy in front of it may.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")


def add_cross_origin_middleware(app: Starlette) -> None:
    """Let pages of any origin read the answers of `app`.

    Call it after all middleware that may refuse a request was added: preflights have no key, and a
    page must be able to read the reason of a refusal.
    """
    app.add_middleware(_CrossOriginMiddleware)


class _CrossOriginMiddleware:
    """Starlette's middleware for requests with an `Origin`; all others bypass it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._for_pages = CORSMiddleware(
            app, allow_origins=("*",), allow_methods=_METHODS, allow_headers=("*",)
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request. Not a coroutine, since each event of a stream would pass through
        it."""
        if scope["type"] == "http":
            for name, _ in scope["headers"]:
                if name == b"origin":
                    return self._for_pages(scope, receive, send)
        return self._app(scope, receive, send)
