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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_LEVEL_ATTRIBUTE: Final = "_auth_level"
_REFUSAL_ATTRIBUTE: Final = "_auth_refusal"
Refusal: TypeAlias = Callable[[int, str], Any]
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


class Guarded(Protocol):
    """An application that checks keys."""

    api_key: str | None
    admin_api_key: str | None

    @property
    def routes(self) -> Sequence[Any]:
        """Each has its function as `endpoint`."""


def add_api_key_middleware(app: Guarded, *, api_key: str | None, admin_api_key: str | None) -> None:
    """Let `app` check the key of every HTTP request before any endpoint runs."""
    app.api_key, app.admin_api_key = api_key, admin_api_key


def app_has_admin_force_endpoints(app: Guarded) -> bool:
    return any(level_of(route.endpoint) is AuthLevel.ADMIN_FORCE for route in app.routes)


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


def _bearer_matches(header: str | None, key: str) -> bool:
    scheme, _, token = (header or "").partition(" ")
    same = hmac.compare_digest(token.strip().encode(errors="surrogateescape"), key.encode())
    return same and scheme.lower() == "bearer"


def level_of(endpoint: object) -> AuthLevel:
    return AuthLevel(getattr(endpoint, _LEVEL_ATTRIBUTE, AuthLevel.NORMAL))


def refusal_of(endpoint: object) -> Refusal | None:
    """The refusal that `endpoint` was marked with."""
    return getattr(endpoint, _REFUSAL_ATTRIBUTE, None)
