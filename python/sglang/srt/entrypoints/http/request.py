"""A request and the answer to it, as endpoints see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote

logger = logging.getLogger(__name__)

_ONE_WRITE_BYTES: Final = 65536
"""Most bytes of body data that are joined with the head: joining more costs more than a second
write."""
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_LINE_END: Final = "\r\n"


class Connection(Protocol):
    """The connection of a request."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    drained: asyncio.Future[None] | None
    """Done when the client has read enough for the next part; None: write now."""

    @property
    def date(self) -> str:
        """Header line of the present second."""

    def resume_reading(self) -> None: ...

    def on_answered(self) -> None:
        """The answer to the request is complete."""


class Held(Protocol):
    """Output of a request that waits to be written."""

    @property
    def num_bytes(self) -> int:
        """About its memory."""


class Request:
    """One request, and the answer to it. Event loop thread only.

    The answer's head goes out with the first part of its body, so that both are one write and wake
    the client once. An answer that begins before the whole body has come ends the connection.

    Attributes:
        path, query: Of the target; the path is decoded.
        headers: Any case finds them. Bytes that are no UTF-8 are surrogates.
        app: The application that answers; it sets this.
        keep_alive: The connection outlives the answer.
        more_body: Parts of the body are still to come.
        parts: Those that came and were not received.
        gone: Done once the client has hung up, or sent what is no HTTP.
        held: Output that is not written yet; endpoints set it.
        status: Status of the answer; 0 before it begins.
        is_answered: The answer is complete.
    """

    __slots__ = (
        "_arrival", "_connection", "_expects_continue", "_head", "_is_chunked",
        "_takes_chunks", "_target",
        "app", "gone", "headers", "held", "is_answered", "keep_alive", "method", "more_body",
        "parts", "path", "query", "status", "unread",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        keep_alive: bool,
        more_body: bool,
        takes_chunks: bool = True,
    ) -> None:
        """`target` has no scheme and host. Clients of HTTP/1.0 take no chunks, so that a stream
        ends with its connection, and no `100 Continue`."""
        self._connection = connection
        self._target = target
        path, _, self.query = target.partition("?")
        self.method = method
        self.path = unquote(path) if "%" in path else path
        self.headers = headers
        self.app: Any = None
        self.keep_alive = keep_alive
        self.more_body = more_body
        self.unread = 0
        """Bytes of the body that wait for the endpoint."""
        self.gone: asyncio.Future[None] = connection.loop.create_future()
        self.held: Sequence[Held] = ()
        self.status = 0
        self.is_answered = False
        self.parts: list[bytes] = []
        self._arrival: asyncio.Future[None] | None = None
        self._expects_continue = (
            more_body and takes_chunks and headers.get("expect", "").lower() == "100-continue"
        )
        self._head = b""
        """The answer's head while it waits for the body."""
        self._takes_chunks = takes_chunks
        self._is_chunked = False

    @property
    def query_params(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))

    # ---- the body comes in ------------------------------------------------------------------

    def feed(self, part: bytes, *, more_body: bool) -> None:
        """Take the next part of the body, from the connection."""
        self.more_body = more_body
        self.parts.append(part)
        self.unread += len(part)
        self._wake()

    def lose_client(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def receive(self) -> bytes:
        """The next part of the body, perhaps an empty one; `more_body` tells if it was the last,
        `gone` if no other comes."""
        if self._expects_continue:
            self._expects_continue = False
            if self._is_writable():
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.more_body and not self.parts and not self.gone.done():
            self._connection.resume_reading()
            self._arrival = self._connection.loop.create_future()
            await self._arrival
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self.unread = 0
        return body

    # ---- the answer goes out ----------------------------------------------------------------

    def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Begin the answer. Its body has `length` bytes; None: it comes in parts, until `end`.

        Raises:
            ValueError: A header has a line break.
        """
        if self.more_body:
            self.keep_alive = False
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}", self._connection.date]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self.keep_alive:
            lines.append("connection: close")
        if length is not None:
            lines.append(f"content-length: {length}")
        elif self.method != "HEAD" and self._takes_chunks:
            self._is_chunked = True
            lines.append("transfer-encoding: chunked")
        head = _LINE_END.join(lines)
        if head.count("\n") != len(lines) - 1:
            raise ValueError("a header of the answer has a line break")
        self._head = f"{head}\r\n\r\n".encode(errors="surrogateescape")
        self.status = status
        if logger.isEnabledFor(logging.DEBUG):
            # Without the query: clients send keys there, too.
            peer = self._connection.transport.get_extra_info("peername")
            path = self._target.partition("?")[0]
            logger.debug('%s - "%s %s" %d', peer, self.method, path, status)

    def write(self, part: bytes) -> None:
        """Write the next part of an answer, which is not empty. Call `drain` before it."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)

    def end(self, body: bytes = b"") -> None:
        """Write the last part of the answer, or all of it."""
        self._write(b"0\r\n\r\n" if self._is_chunked else body)
        self.is_answered = True
        self._connection.on_answered()

    def _write(self, data: bytes) -> None:
        # asyncio would log each write to a client that is gone.
        if not self._is_writable():
            return
        if self.method == "HEAD":
            data = b""
        transport = self._connection.transport
        if self._head:
            if len(data) > _ONE_WRITE_BYTES:
                transport.write(self._head)
            else:
                data = self._head + data
            self._head = b""
        if data:
            transport.write(data)

    def _is_writable(self) -> bool:
        return not (self.gone.done() or self._connection.transport.is_closing())

    async def drain(self) -> None:
        """Wait while the client reads too slowly. Returns at once if it has left."""
        if self._connection.drained is not None:
            await asyncio.shield(self._connection.drained)


class Response:
    """A whole answer. `headers` may be added to until it is sent."""

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = dict(headers or {})
        if media_type is not None:
            self.headers["content-type"] = media_type

    async def send(self, request: Request) -> None:
        """Answer `request`."""
        request.begin(self.status, self.headers, len(self.body))
        request.end(self.body)
