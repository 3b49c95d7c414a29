"""The application of a server: routes, keys, errors, pages of other origins, traces."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sglang.srt.entrypoints.http.errors import ApiError, as_api_error, error_response
from sglang.srt.entrypoints.http.foreign_endpoints import remedy_for
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.utils.auth import AuthLevel, decide_request_auth, level_of, refusal_of
from sglang.srt.utils.spelling import did_you_mean

if TYPE_CHECKING:
    from sglang.srt.entrypoints.http.server_context import ServerContext

logger = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_FOR_PAGES: Final = {"access-control-allow-origin": "*", "vary": "Origin"}
"""Let pages of any origin read an answer (CORS), as in SGLang. A page without the key gains no
access, because a page has to send the bearer token itself. Credentials that browsers add by
themselves, such as cookies, are not allowed with such requests: the server does not read them, but
a proxy in front of it may."""
_PREFLIGHT_SECONDS: Final = 600
_ALL_PATHS: Final = "; GET /openapi.json lists the paths"


class Route:
    """An endpoint's methods at a path. A name in braces at the path's end is the rest of it."""

    def __init__(self, path: str, endpoint: Endpoint, *, methods: Iterable[str]) -> None:
        self.path = path
        self.endpoint = endpoint
        self.methods = frozenset(methods) | ({"HEAD"} if "GET" in methods else set())

    @property
    def parameter(self) -> str | None:
        """The name in braces."""
        _, brace, name = self.path.partition("{")
        return name.removesuffix("}") if brace else None


class Application:
    """Answers requests to `routes`."""

    api_key: str | None = None
    """The users' key; None: there is none."""
    admin_api_key: str | None = None
    """The operators' key."""

    def __init__(self, routes: Iterable[Route], context: ServerContext | None = None) -> None:
        """`context` is for endpoints."""
        self.context = context
        self.routes = tuple(routes)
        self.openapi: dict[str, Any] | None = None
        """The description of the API once it was asked for."""
        self._tracer = None if context is None else context.manager.tracer
        self._exact: dict[str, dict[str, Route]] = {}
        """Routes by path and method; those with a parameter by what is before it."""
        self._below: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            begin = route.path.partition("{")[0]
            at = self._exact if route.parameter is None else self._below
            at.setdefault(begin, {}).update(dict.fromkeys(route.methods, route))

    def routes_at(self, path: str) -> Mapping[str, Route]:
        """The routes at `path` by method; none: there is no such path."""
        found = self._exact.get(path)
        if found is None:
            found = next((at for begin, at in self._below.items() if path.startswith(begin)), {})
        return found

    async def __call__(self, request: Request) -> None:
        """Answer `request`."""
        request.app = self
        # Answers to a client that does not read would pile up in memory.
        await request.drain()
        if self._tracer is None or request.method != "POST" or request.path not in self._exact:
            await self._serve(request)
            return
        with self._tracer.http_request(request.path, request.headers) as note_status:
            try:
                await self._serve(request)
            finally:
                note_status(request.status)

    async def _serve(self, request: Request) -> None:
        is_of_page = "origin" in request.headers
        response: Response
        try:
            if is_of_page and request.method == "OPTIONS" and (wanted := _preflight_of(request)):
                response = _preflight(request, wanted)
            else:
                response = await self._respond(request)
            if is_of_page:
                response.headers |= _FOR_PAGES
            await response.send(request)
        except Exception as error:
            if request.status:
                raise  # The connection ends, within the answer.
            response = self._failure(request, error)
            if is_of_page:
                response.headers |= _FOR_PAGES
            await response.send(request)

    async def _respond(self, request: Request) -> Response:
        """Raises what endpoints raise."""
        routes = self.routes_at(request.path)
        route = routes.get(request.method)
        if (refused := self._refused(request, route or _strictest(routes))) is not None:
            return refused
        if route is not None:
            return await route.endpoint(request)
        shown = f"{request.method} {request.path}"
        if not routes and (remedy := remedy_for(request.path)) is not None:
            raise ApiError(501, f"{shown}: SGLang has it, this engine does not: {remedy}")
        if not routes:
            near = did_you_mean(request.path, (one.path for one in self.routes))
            raise ApiError(404, f"{shown}: Not Found{near or _ALL_PATHS}")
        allowed = ", ".join(sorted(routes))
        error = ApiError(405, f"{shown}: Method Not Allowed; this path takes {allowed}")
        return error_response(error, request.path, {"Allow": allowed})

    def _refused(self, request: Request, route: Route | None) -> Response | None:
        """The answer to a request without the key that it needs; None: it may pass."""
        endpoint = None if route is None else route.endpoint
        headers = request.headers
        key = headers.get("authorization")
        if key is None and (own := headers.get("x-api-key")) is not None:
            key = f"Bearer {own}"  # Of Anthropic's clients.
        decision = decide_request_auth(
            method=request.method,
            path=request.path,
            authorization_header=key,
            auth_level=level_of(endpoint),
            api_key=self.api_key,
            admin_api_key=self.admin_api_key,
        )
        if decision.allowed:
            return None
        status = decision.error_status_code
        own_refusal = refusal_of(endpoint)
        answer: Response | None = None
        if own_refusal is not None:
            answer = own_refusal(status, headers.get("accept", ""))
        if answer is None:
            error = ApiError(status, decision.reason)
            answer = error_response(error, request.path, kind="authentication_error")
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _failure(self, request: Request, error: Exception) -> Response:
        known = as_api_error(error)
        if known is None:
            logger.error("%s %s failed", request.method, ascii(request.path), exc_info=error)
            request.keep_alive = False
            known = ApiError(500, "internal error; the server's log has the cause")
        return error_response(known, request.path)


def _strictest(routes: Mapping[str, Route]) -> Route | None:
    """A route of `routes`; one with a level of its own comes first."""
    ordered = sorted(routes.values(), key=lambda one: level_of(one.endpoint) is AuthLevel.NORMAL)
    return next(iter(ordered), None)


def _preflight_of(request: Request) -> str | None:
    """The method that a page asks permission for; None: the request is no preflight."""
    return request.headers.get("access-control-request-method")


def _preflight(request: Request, method: str) -> Response:
    """Permission for a page to use `method`, with the headers that it asks for. Raises ApiError."""
    if method not in _METHODS:
        raise ApiError(400, f"{method[:32]!a}: pages may use {', '.join(_METHODS)}")
    if "access-control-request-private-network" in request.headers:
        raise ApiError(400, "pages of public networks may not use a server in a private one")
    headers = {
        "access-control-allow-methods": ", ".join(_METHODS),
        "access-control-max-age": str(_PREFLIGHT_SECONDS),
    }
    if (wanted := request.headers.get("access-control-request-headers")) is not None:
        headers["access-control-allow-headers"] = wanted
    return Response(headers=headers)
