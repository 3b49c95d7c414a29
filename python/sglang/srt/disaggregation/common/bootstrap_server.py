"""A prefill server's bootstrap server: gives decode servers the routes of the ranks.

    GET /health           200, "OK"
    GET /route?rank=0     a `Route` as JSON; 404 before the rank is registered
    PUT /route            a `Registration` as JSON, from the server's own processes

Each connection carries one request, and has `PATIENCE_S` for all of it.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import re
import secrets
import socket
import threading
from typing import Any, Final
from urllib.parse import parse_qsl

import httptools
import msgspec

from sglang.srt.arg_groups.disaggregation import BOOTSTRAP_PORT_FLAG
from sglang.srt.constants import KIB
from sglang.srt.disaggregation.common.bootstrap_route import (
    MAX_RANK,
    REGISTRATION_DECODER,
    ROUTE_PATH,
    Route,
)
from sglang.srt.utils.network import listening_sockets

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""Seconds for a client's whole request, and for reading the answer."""
MAX_REQUEST_BYTES: Final = 16 * KIB
"""Most bytes of a request's head and body together; a registration has less than 4 KiB."""
MAX_CONNECTIONS: Final = 256
"""Most connections; further ones are closed at once, and decode servers ask again."""
_BACKLOG: Final = 256
_JOIN_S: Final = 5.0
_HEALTH_PATH: Final = "/health"
_RANK: Final = re.compile(r"[0-9]{1,5}")


class _Refusal(Exception):
    def __init__(self, status: http.HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class BootstrapServer:
    """Listens from its construction until `close`, in the daemon thread `bootstrap`. Any thread may
    call.

    Attributes:
        token: Secret of registrations, which the server's own processes get as an argument.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen on all addresses of `host`.

        Raises:
            ValueError: The port is in use, or `host` is not an address of this machine; names the
                flag.
        """
        self.token = secrets.token_hex(16)
        self._routes: dict[int, Route] = {}
        self._num_connections = 0
        try:
            sockets = listening_sockets(host, port, _BACKLOG)
        except ValueError as error:
            raise ValueError(f"{BOOTSTRAP_PORT_FLAG} {port}: {error}") from None
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(sockets,), name="bootstrap", daemon=True
        )
        self._thread.start()

    def register(self, route: Route) -> None:
        """Register the route of a rank; replaces the one registered before."""
        self._routes[route.rank] = route
        logger.info("rank %d answers decode servers at %s", route.rank, route.endpoint)

    def close(self) -> None:
        """Stop listening and drop all connections. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_JOIN_S)

    def _run(self, sockets: list[socket.socket]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(sockets))

    async def _serve(self, sockets: list[socket.socket]) -> None:
        servers = [await asyncio.start_server(self._on_connection, sock=sock) for sock in sockets]
        await self._ending.wait()
        for server in servers:
            server.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._num_connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_connections += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            pass
        finally:
            self._num_connections -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """The HTTP answer to the connection's only request."""
        request = _Request()
        parser = httptools.HttpRequestParser(request)
        try:
            while not request.is_complete:
                part = await reader.read(MAX_REQUEST_BYTES)
                request.num_bytes += len(part)
                if not part:
                    raise _Refusal(http.HTTPStatus.BAD_REQUEST, "the request is not complete")
                if request.num_bytes > MAX_REQUEST_BYTES:
                    raise _Refusal(
                        http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"the request has more than {MAX_REQUEST_BYTES} bytes",
                    )
                parser.feed_data(part)
            method = parser.get_method().decode("ascii")
            return self._do(method, request)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return _error(http.HTTPStatus.BAD_REQUEST, f"not understood as HTTP: {error}")
        except _Refusal as error:
            return _error(error.status, str(error))

    def _do(self, method: str, request: _Request) -> bytes:
        path, _, query = request.url.decode("latin-1").partition("?")
        if path == _HEALTH_PATH and method == "GET":
            return _response(http.HTTPStatus.OK, b"OK", "text/plain")
        if path == ROUTE_PATH and method == "GET":
            route = self._find(query)
            return _response(http.HTTPStatus.OK, msgspec.json.encode(route), "application/json")
        if path == ROUTE_PATH and method == "PUT":
            self._take(bytes(request.body))
            return _response(http.HTTPStatus.OK, b"{}", "application/json")
        if path in (_HEALTH_PATH, ROUTE_PATH):
            raise _Refusal(http.HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not for {path}")
        raise _Refusal(
            http.HTTPStatus.NOT_FOUND,
            f"there is no {path[:64]} here: this is the bootstrap server of a prefill server, "
            "requests go to its --port",
        )

    def _find(self, query: str) -> Route:
        given = [value for name, value in parse_qsl(query) if name == "rank"]
        if len(given) != 1 or not _RANK.fullmatch(given[0]):
            raise _Refusal(http.HTTPStatus.BAD_REQUEST, f"rank: give one, from 0 to {MAX_RANK}")
        route = self._routes.get(int(given[0]))
        if route is None:
            raise _Refusal(
                http.HTTPStatus.NOT_FOUND,
                f"rank {given[0]} is not registered here: the server is still starting, or has "
                "fewer ranks",
            )
        return route

    def _take(self, body: bytes) -> None:
        try:
            sent = REGISTRATION_DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Refusal(http.HTTPStatus.BAD_REQUEST, f"not a registration: {error}") from None
        if not hmac.compare_digest(sent.token.encode(), self.token.encode()):
            raise _Refusal(
                http.HTTPStatus.FORBIDDEN, "token: only processes of this server register here"
            )
        route = {name: getattr(sent, name) for name in Route.__struct_fields__}
        self.register(Route(**route))


class _Request:
    """A request; its methods are the callbacks that the parser calls by name."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.url = b""
        self.body = bytearray()
        self.is_complete = False

    def on_url(self, part: bytes) -> None:
        self.url += part

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.is_complete = True


def _error(status: http.HTTPStatus, message: str) -> bytes:
    body: dict[str, Any] = {"error": {"message": message, "code": status.value}}
    return _response(status, msgspec.json.encode(body), "application/json")


def _response(status: http.HTTPStatus, body: bytes, kind: str) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
