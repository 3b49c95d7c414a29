"""Access to endpoints: bearer keys for users and for operators.

    keys set          NORMAL      ADMIN_OPTIONAL   ADMIN_FORCE
    none              open        open             403
    api key           api key     api key          403
    admin key         open        admin key        admin key
    both              api key     admin key        admin key

A refused request gets 401 if its key is missing or unknown. It gets 403 if its key is of the other
kind, or if the server has no key of the kind that the endpoint needs.

The key is in `Authorization: Bearer KEY`, or in `X-Api-Key: KEY`. Probes (`/health`,
`/health_generate`, `/ready`, `/metrics` and the paths below it) and CORS preflights need no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.utils.error_answers import anthropic_error, error_object, is_anthropic

F = TypeVar("F", bound=Callable[..., Any])

_LEVEL_ATTRIBUTE: Final = "_auth_level"
_REFUSAL_ATTRIBUTE: Final = "_auth_refusal"
Refusal: TypeAlias = Callable[[int, str], Response | None]
"""Makes the body of a refusal from its status and the request's `Accept` header; None: the usual
one."""
_OPEN_PATHS: Final = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
_OPEN_BELOW: Final = "/metrics/"


class AuthLevel(str, Enum):
    """The key that an endpoint needs; the table above has the meaning."""

    NORMAL = "normal"
    ADMIN_OPTIONAL = "admin_optional"
    ADMIN_FORCE = "admin_force"


@dataclass(frozen=True, slots=True)
class AuthDecision:
    """Tells if a request may pass; if not, with the HTTP status and the reason for the client."""

    allowed: bool
    error_status_code: int = 401
    reason: str = ""


def auth_level(level: AuthLevel) -> Callable[[F], F]:
    """Mark an endpoint function with its level. Functions without a mark are NORMAL."""

    def mark(endpoint: F) -> F:
        setattr(endpoint, _LEVEL_ATTRIBUTE, level)
        return endpoint

    return mark


def refused_with(refusal: Refusal) -> Callable[[F], F]:
    """Mark an endpoint function whose refused requests get a body of their own. It must hold
    nothing that the key protects."""

    def mark(endpoint: F) -> F:
        setattr(endpoint, _REFUSAL_ATTRIBUTE, refusal)
        return endpoint

    return mark


def app_has_admin_force_endpoints(app: Starlette) -> bool:
    return any(_level_of(route) is AuthLevel.ADMIN_FORCE for route in app.routes)


def is_open(path: str) -> bool:
    """True if requests to `path` need no key."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_BELOW)


def decide_request_auth(
    *,
    method: str,
    path: str,
    authorization_header: str | None,
    api_key: str | None,
    admin_api_key: str | None,
    auth_level: AuthLevel,
) -> AuthDecision:
    """Decide on one request. Pure; compares keys in constant time.

    Args:
        method: HTTP method, upper case.
        path: Path without the query.
        api_key: The users' key; None or empty if there is none.
        admin_api_key: The operators' key; None or empty if there is none.
    """
    if method == "OPTIONS" or is_open(path):
        return AuthDecision(True)
    if auth_level is AuthLevel.ADMIN_FORCE and not admin_api_key:
        return AuthDecision(
            False,
            403,
            "this endpoint needs an operator's key and the server has none: set --admin-api-key",
        )
    required, other = api_key, admin_api_key
    if auth_level is not AuthLevel.NORMAL and admin_api_key:
        required, other = admin_api_key, api_key
    if not required or _bearer_matches(authorization_header, required):
        return AuthDecision(True)
    if other and _bearer_matches(authorization_header, other):
        kinds = ("API key", "admin key")
        has, needs = kinds if required == admin_api_key else reversed(kinds)
        return AuthDecision(False, 403, f"this endpoint needs the {needs}, and this is the {has}")
    problem = "no key" if authorization_header is None else "wrong key, or no bearer key"
    return AuthDecision(False, 401, f"{problem}: send the header 'Authorization: Bearer KEY'")


def add_api_key_middleware(
    app: Starlette, *, api_key: str | None, admin_api_key: str | None
) -> None:
    """Check the key of every HTTP request to `app` before any of the app's code runs."""
    app.add_middleware(
        _ApiKeyMiddleware, routes_of=app, api_key=api_key, admin_api_key=admin_api_key
    )


class _ApiKeyMiddleware:
    """Plain ASGI, so that streams and disconnects pass through unchanged."""

    def __init__(
        self, app: ASGIApp, routes_of: Starlette, api_key: str | None, admin_api_key: str | None
    ) -> None:
        self._app = app
        self._routes_of = routes_of
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        route = _route_for(self._routes_of, scope)
        decision = decide_request_auth(
            method=str(scope.get("method", "GET")).upper(),
            path=str(scope["path"]),
            authorization_header=_authorization(scope),
            api_key=self._api_key,
            admin_api_key=self._admin_api_key,
            auth_level=_level_of(route),
        )
        if decision.allowed:
            await self._app(scope, receive, send)
            return
        own = getattr(getattr(route, "endpoint", None), _REFUSAL_ATTRIBUTE, None)
        status, accept = decision.error_status_code, _header(scope, b"accept") or ""
        answer = (own and own(status, accept)) or _refusal(decision, str(scope["path"]))
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        await answer(scope, receive, send)


def _refusal(decision: AuthDecision, path: str) -> JSONResponse:
    status = decision.error_status_code
    body = error_object(decision.reason, "authentication_error", status)
    if is_anthropic(path):
        body = anthropic_error(status, decision.reason)
    return JSONResponse(body, status_code=status)


def _bearer_matches(header: str | None, key: str) -> bool:
    scheme, _, token = (header or "").partition(" ")
    same = hmac.compare_digest(token.strip().encode(), key.encode())
    return same and scheme.lower() == "bearer"


def _authorization(scope: Scope) -> str | None:
    """The header `Authorization`; or that of Anthropic's clients, `X-Api-Key`, as a bearer key."""
    if (own := _header(scope, b"authorization")) is not None:
        return own
    key = _header(scope, b"x-api-key")
    return None if key is None else f"Bearer {key}"


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value).decode("utf-8", errors="replace")
    return None


def _route_for(app: Starlette, scope: Scope) -> BaseRoute | None:
    """The route for `scope`. If only methods differ, a route with a level of its own counts
    first."""
    partial: BaseRoute | None = None
    for route in app.routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        if match is Match.PARTIAL and _level_of(partial) is AuthLevel.NORMAL:
            partial = route
    return partial


def _level_of(route: object) -> AuthLevel:
    level = getattr(getattr(route, "endpoint", None), _LEVEL_ATTRIBUTE, AuthLevel.NORMAL)
    return AuthLevel(level)
