"""A prefill server's bootstrap server: gives decode servers the routes of the ranks.

    GET /health           200, "OK"
    GET /route?rank=0     a `Route` as JSON; 404 before the rank is registered, 401 without a
                          proof of the deployment's secret, if there is one; with `dp_rank=1` a
                          rank of another DP group than the first

Each connection carries one request, and has `REQUEST_TIMEOUT_S` for all of it.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import socket
import threading
from typing import Any, Final, NoReturn
from urllib.parse import parse_qsl

import msgspec
from aiohttp.http_parser import RawRequestMessage

from sglang.srt.arg_groups.disaggregation import BOOTSTRAP_PORT_FLAG
from sglang.srt.disaggregation.base.bootstrap_route import (
    MAX_DP_RANK,
    MAX_RANK,
    OF_ANSWER,
    OF_QUESTION,
    PROOF_SCHEME,
    ROUTE_PATH,
    Route,
)
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.base.deployment_secret import NONCE_BYTES, SOURCES, DeploymentSecret
from sglang.srt.utils.bad_messages import BadMessages
from sglang.srt.utils.bounded_listener import Listener, OpenConnections, most_connections
from sglang.srt.utils.http_head import HEAD_END, MAX_HEAD_BYTES, parse_head
from sglang.srt.utils.network import listening_sockets

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 10.0
"""Seconds for a client's whole request, and for reading the answer."""
MAX_CONNECTIONS: Final = 256
"""Most connections; a further one takes the place of the oldest. An answer takes no time, so that
the oldest one has a slow client."""
_BACKLOG: Final = 256
_LAST_CHUNK: Final = b"0\r\n\r\n"
_JOIN_S: Final = 5.0
_HEALTH_PATH: Final = "/health"
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_NONCE: Final = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")


class _Refusal(Exception):
    def __init__(self, status: http.HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class CommonKVBootstrapServer(BaseKVBootstrapServer):
    """Listens from its construction until `close`, in the daemon thread `bootstrap`. Any thread may
    call.

    Args:
        host: Address to listen on; if it is a name, all of its addresses.
        secret: The secret that decode servers have to prove; None: all who connect are answered.
    """

    def __init__(self, host: str, port: int, secret: DeploymentSecret | None = None) -> None:
        """Raises ValueError if the port is in use, or `host` is not an address of this machine;
        names the flag."""
        self._secret = secret
        self._routes: dict[tuple[int, int], Route] = {}
        """By DP group and rank in it."""
        self._open: set[_Connection] = set()
        self._bad = BadMessages(logger, "question to the bootstrap server")
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
        self._routes[route.dp_rank, route.rank] = route
        group = "" if route.dp_size == 1 else f" of dp_rank {route.dp_rank}"
        logger.info("rank %d%s answers decode servers at %s", route.rank, group, route.endpoint)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_JOIN_S)

    def _run(self, sockets: list[socket.socket]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(sockets))

    async def _serve(self, sockets: list[socket.socket]) -> None:
        waiting = OpenConnections(MAX_CONNECTIONS)
        listener = Listener(
            sockets,
            lambda: _Connection(self, self._open, waiting),
            count=lambda: len(self._open),
            connections=waiting,
            most=min(MAX_CONNECTIONS, most_connections() // 2),
        )
        await self._ending.wait()
        listener.close()
        for connection in self._open:
            connection.transport.abort()

    # -- answers ---------------------------------------------------------------------------------

    def answer(self, request: RawRequestMessage, client: str) -> bytes:
        """The HTTP response to a request. Raises `_Refusal`."""
        method = request.method
        path, _, query = request.path.partition("?")
        if path not in (_HEALTH_PATH, ROUTE_PATH):
            raise _Refusal(
                http.HTTPStatus.NOT_FOUND,
                f"there is no {path[:64]} here: this is the bootstrap server of a prefill server, "
                "requests go to its --port",
            )
        if method != "GET":
            raise _Refusal(http.HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not for {path}")
        if path == _HEALTH_PATH:
            return _response(http.HTTPStatus.OK, b"OK", "text/plain")
        nonce = self._proved_nonce(request, client)
        body = msgspec.json.encode(self._find(query))
        proof = ""
        if self._secret is not None:
            proof = f"{PROOF_SCHEME}: {self._secret.proof(OF_ANSWER, nonce, body).hex()}\r\n"
        return _response(http.HTTPStatus.OK, body, "application/json", proof)

    def _proved_nonce(self, request: RawRequestMessage, client: str) -> bytes:
        """The nonce of a question whose client knows the secret; nothing if there is none."""
        scheme, _, proof = request.headers.get("authorization", "").partition(" ")
        nonce, _, mac = proof.partition(" ")
        is_given = scheme == PROOF_SCHEME
        if self._secret is None:
            if is_given:
                self._deny(client, "has a secret, and this prefill server has none")
            return b""
        if not is_given:
            self._deny(client, "has no secret, and this prefill server has one")
        drawn = bytes.fromhex(nonce) if _NONCE.fullmatch(nonce) else b""
        if not self._secret.is_hex_proof(
            mac, OF_QUESTION, drawn, request.path.encode(errors="surrogateescape")
        ):
            self._deny(client, "has another secret than this prefill server")
        return drawn

    def _deny(self, client: str, why: str) -> NoReturn:
        remedy = f"give both servers the same {SOURCES}"
        self._bad.add(f"the decode server at {client} {why}: {remedy}")
        raise _Refusal(http.HTTPStatus.UNAUTHORIZED, f"the decode server {why}: {remedy}")

    def _find(self, query: str) -> Route:
        rank = _number(query, "rank", MAX_RANK)
        dp_rank = _number(query, "dp_rank", MAX_DP_RANK, absent="0")
        route = self._routes.get((dp_rank, rank))
        if route is None:
            what = f"rank {rank}" if not dp_rank else f"rank {rank} of dp_rank {dp_rank}"
            raise _Refusal(
                http.HTTPStatus.NOT_FOUND,
                f"{what} is not registered here: the server is still starting, or has fewer ranks",
            )
        return route


def _number(query: str, name: str, most: int, absent: str = "") -> int:
    """The number from 0 to `most` that a query names; `absent` if it names none."""
    given = [value for key, value in parse_qsl(query) if key == name] or [absent]
    if len(given) != 1 or not _NUMBER.fullmatch(given[0]) or int(given[0]) > most:
        raise _Refusal(http.HTTPStatus.BAD_REQUEST, f"{name}: give one, from 0 to {most}")
    return int(given[0])


class _Connection(asyncio.Protocol):
    """A client, whose only request is answered. Thread of the server."""

    transport: asyncio.Transport

    def __init__(
        self, server: CommonKVBootstrapServer, everyone: set[_Connection], waiting: OpenConnections
    ) -> None:
        self._server = server
        self._everyone = everyone
        self._waiting = waiting
        self._data = b""
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._everyone.add(self)
        self._waiting.add_idle(self)
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._everyone.discard(self)
        self._waiting.remove_idle(self)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._parse(data)
        except _Refusal as error:
            answer = _error(error.status, str(error))
        if answer is not None:
            self._end(answer)

    def eof_received(self) -> None:
        self._end(_error(http.HTTPStatus.BAD_REQUEST, "the request is not complete"))

    def _parse(self, data: bytes) -> bytes | None:
        """The answer, if the request is whole. Raises `_Refusal`."""
        self._data += data
        if len(self._data) > MAX_HEAD_BYTES:
            raise _Refusal(
                http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request has more than {MAX_HEAD_BYTES} bytes",
            )
        head, end, body = self._data.partition(HEAD_END)
        try:
            if not head[:1].isalpha():
                raise ValueError("no method begins with this byte")
            if not end:
                return None
            request = parse_head(head + end)
        except ValueError as error:
            why = f"not understood as HTTP: {error}"
            raise _Refusal(http.HTTPStatus.BAD_REQUEST, why) from None
        # No question has a body; the connection ends with the answer to one that has.
        length = int(request.headers.get("content-length", "0"))
        if not body.endswith(_LAST_CHUNK) if request.chunked else len(body) < length:
            return None
        host, *_ = self.transport.get_extra_info("peername") or ("an unknown address",)
        return self._server.answer(request, host)

    def _end(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def _error(status: http.HTTPStatus, message: str) -> bytes:
    body: dict[str, Any] = {"error": {"message": message, "code": status.value}}
    return _response(status, msgspec.json.encode(body), "application/json")


def _response(status: http.HTTPStatus, body: bytes, kind: str, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n{more}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
