"""HTTP/1.1 connections with bounds on what arrives before an answer.

- A head may have `MAX_HEAD_BYTES` and take `HEAD_SECONDS`. `body.py` bounds the bytes and seconds
  of a body, and `BodyMeter` the overhead of its chunks.
- One request is parsed at a time; data after it waits until it is answered. Over `MAX_AHEAD_BYTES`
  of it are discarded, and the answer ends the connection: it is read on, because the kernel tells
  of a client that leaves only behind all that it sent.
- An answer that comes before the whole body ends the connection. The rest of the body is discarded
  unparsed, for a while, so that the client can read the answer (`_discard`).
- A connection is paused at `MAX_UNREAD_BYTES` of a body that its endpoint has not read.
- The number of idle connections is bounded (`OpenConnections`), and the time for which a client may
  read nothing of an answer (`bounded_listener`).
- Answers that clients do not read may take `MAX_WAITING_BYTES` in all (`end_slow_readers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from sglang.srt.constants import GIB, KIB, MIB
from sglang.srt.entrypoints.http.body_framing import TOO_SMALL, BodyMeter, ChunkDecoder
from sglang.srt.entrypoints.http.request import Request
from sglang.srt.utils.bad_messages import BadMessages
from sglang.srt.utils.bounded_listener import MAX_IDLE_CONNECTIONS, OpenConnections
from sglang.srt.utils.error_answers import error_object
from sglang.srt.utils.http_head import HEAD_END, MAX_HEAD_BYTES, parse_head

logger = logging.getLogger(__name__)


def refusal(status: int, message: str) -> bytes:
    """A whole answer with an error in the common format; it ends the connection."""
    body = json.dumps(error_object(message, "invalid_request_error", status)).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


HEAD_SECONDS: Final = 10.0
"""Seconds from the first byte (or the connection) to the end of a request's head."""
KEEP_ALIVE_SECONDS: Final = 75
"""Seconds for which an idle connection stays open. Clients close theirs earlier (after 5 to 15 s):
a server that closes first breaks a request that is just being sent."""
MAX_UNREAD_BYTES: Final = 256 * KIB
"""A connection is paused while more than this of a body waits for its endpoint. asyncio receives as
much at once."""
MAX_AHEAD_BYTES: Final = 64 * KIB
"""Most data that waits behind a request which is not answered yet: hundreds of small requests."""
MAX_WAITING_BYTES: Final = GIB
"""Most memory that answers which wait for their clients take, over all connections."""
WAITING_SECONDS: Final = 5.0
"""An answer that waits for less time is safe from that bound: its client may be reading."""
DISCARD_SECONDS: Final = 10.0
DISCARD_BYTES: Final = 64 * MIB
"""Bounds for discarding data that a client still sends after an answer that ends its connection
(four times the largest body). Many clients send all before they read the answer, and closing at
once would take the answer away."""

_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"
"""The first head of a client that speaks HTTP/2 (RFC 9113, 3.4). `sglang_router` asks every server
so, twice, whether it speaks gRPC."""
_NO_REQUEST: Final = "this is no HTTP request"

App: TypeAlias = Callable[[Request], Coroutine[Any, Any, None]]


class ServerState:
    """What the connections of one server share. Event loop thread only.

    Attributes:
        num_answered: Requests so far.
        date: Header line of the present second.
    """

    def __init__(self, app: App, max_idle: int = MAX_IDLE_CONNECTIONS) -> None:
        self.app = app
        self.bad_requests = BadMessages(logger, "HTTP request")
        self.slow_readers = BadMessages(logger, "connection")
        self.open_connections = OpenConnections(max_idle)
        self.connections: set[BoundedProtocol] = set()
        self.waiting: dict[BoundedProtocol, float] = {}
        """Connections whose clients had to read before more was written and have not caught up
        since, with the time of the event loop since when; longest first."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_answered = 0
        self.head_seconds = HEAD_SECONDS
        self.discard_seconds = DISCARD_SECONDS
        self.note_time()

    def note_time(self) -> None:
        self.date = f"date: {formatdate(usegmt=True)}"

    def end_slow_readers(self) -> None:
        """End connections that wait for their clients, longest first, until the rest takes at most
        `MAX_WAITING_BYTES` or one is left: a single answer is bounded by the limits of a request.
        A client that reads, but less than comes, waits on."""
        for connection in [one for one in self.waiting if one.is_caught_up]:
            del self.waiting[connection]
        sizes = {one: one.num_waiting_bytes for one in self.waiting}
        total = sum(sizes.values())
        for connection, since in list(self.waiting.items()):
            is_new = connection.loop.time() - since < WAITING_SECONDS
            if total <= MAX_WAITING_BYTES or is_new or len(self.waiting) == 1:
                return
            total -= sizes[connection]
            del self.waiting[connection]
            self.slow_readers.add(
                f"its client reads too slowly: such answers took over {MAX_WAITING_BYTES} bytes"
            )
            connection.transport.abort()


class BoundedProtocol(asyncio.Protocol):
    """One connection. Event loop thread only."""

    transport: asyncio.Transport

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.loop = asyncio.get_running_loop()
        self.drained: asyncio.Future[None] | None = None
        self._request: Request | None = None
        """The request that is not answered yet."""
        self._head = bytearray()
        self._meter = BodyMeter(0)
        self._chunks: ChunkDecoder | None = None
        """Decoder of the body under way; None: its length is known."""
        self._ahead = b""
        """Data received after a request that is not answered yet."""
        self._is_paused = False
        self._timer: asyncio.TimerHandle | None = None
        """The time for a head, between requests, or for discarded data."""
        self._awaits_head = False
        """The timer is that of a head."""
        self._discarding = False
        self._discarded = 0
        """Bytes thrown away. If there are any, the connection ends with its answer."""

    # ---- life ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.state.connections.add(self)
        self.state.open_connections.add_idle(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.state.connections.discard(self)
        self.state.open_connections.remove_idle(self)
        if self._request is not None:
            self._request.lose_client()
        self.state.waiting.pop(self, None)
        self.resume_writing()

    @property
    def date(self) -> str:
        return self.state.date

    def pause_writing(self) -> None:
        self.drained = self.loop.create_future()
        self.state.waiting.setdefault(self, self.loop.time())

    def resume_writing(self) -> None:
        if self.drained is not None:
            self.drained.set_result(None)
            self.drained = None

    @property
    def is_caught_up(self) -> bool:
        """The client has read all that was written; its system may still hold some."""
        return self.drained is None and not self.transport.get_write_buffer_size()

    @property
    def num_waiting_bytes(self) -> int:
        """Memory of the answer, written or not, that waits for the client."""
        held = () if self._request is None else self._request.held
        return sum(one.num_bytes for one in held) + self.transport.get_write_buffer_size()

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def end_with_answer(self) -> None:
        """Let the answer under way end the connection, with a header that says so. If its head has
        already gone out, it keeps the connection, as the head says."""
        if self._request is not None and not self._request.status:
            self._request.keep_alive = False

    def shut_down(self) -> None:
        """Close the connection, behind the answer under way if there is one."""
        if self._request is None:
            self.transport.close()
        else:
            self._request.keep_alive = False

    def _discard(self) -> None:
        """Close the connection behind an answer, once the client has had time to read it.

        A close with unread bytes makes the kernel reset the connection, and the client may lose
        the answer.
        """
        self._discarding = True
        self._ahead = b""
        self.state.open_connections.add_idle(self)
        self.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot.
            with contextlib.suppress(OSError):  # The client may be gone.
                self.transport.write_eof()
        self._set_timer(self.state.discard_seconds, self.transport.close)

    # ---- requests come in ------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._discarded:
            self._discarded += len(data)
            if self._discarded > DISCARD_BYTES:
                self.transport.close()
            return
        self._parse(memoryview(self._ahead + data if self._ahead else data))

    def _parse(self, data: memoryview) -> None:
        """Take `data` up to the end of a request; later data waits for the answer."""
        self._ahead = b""
        while data and not self._discarding and not self.transport.is_closing():
            if self._request is None:
                data = self._take_head(data)
            elif self._request.more_body:
                data = self._take_body(data, self._request)
            else:
                self._ahead = bytes(data).lstrip(b"\r\n")
                if len(self._ahead) > MAX_AHEAD_BYTES:
                    self._discarded, self._ahead = len(self._ahead), b""
                    self._request.keep_alive = False
                return
        if self._request is None and not (self._awaits_head or self._discarding):
            self._await_head()

    def _take_head(self, data: memoryview) -> memoryview:
        """Parse a request's head once it is complete; return the rest of `data`."""
        held = len(self._head)
        piece = bytes(data[: MAX_HEAD_BYTES - held])
        if not held and piece[:1] in (b"\r", b"\n"):
            # Old clients send empty lines between requests (RFC 9112, 2.2).
            return data[len(piece) - len(piece.lstrip(b"\r\n")) :]
        self._head += piece
        end = self._head.find(HEAD_END, max(held - len(HEAD_END) + 1, 0))
        if end >= 0:
            size = end + len(HEAD_END)
            head = bytes(self._head[:size])
            self._head.clear()
            if head == _HTTP2_PREFACE:
                # Not counted as a mistake: the client asks whether the server speaks HTTP/2.
                self._hang_up(505, "HTTP/2 is not spoken here: send HTTP/1.1")
            else:
                self._begin_request(head)
            return data[size - held :]
        if not self._head[:1].isalpha():
            self._refuse(400, f"{_NO_REQUEST}: no method begins with this byte")
        elif len(self._head) == MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
        return data[len(piece) :]

    def _begin_request(self, head: bytes) -> None:
        try:
            message = parse_head(head)
        except ValueError as error:
            self._refuse(400, f"{_NO_REQUEST}: {error}")
            return
        self._chunks = ChunkDecoder() if message.chunked else None
        length = None if message.chunked else int(message.headers.get("content-length", "0"))
        self._meter = BodyMeter(length)
        self._cancel_timer()
        self.state.open_connections.remove_idle(self)
        self._request = request = Request(
            self,
            message.method,
            message.url.raw_path_qs,
            message.headers,
            keep_alive=(
                message.version == (1, 1)
                and not message.should_close
                and not self.state.open_connections.end_with_answer
            ),
            more_body=length != 0,
            takes_chunks=message.version == (1, 1),
        )
        task = self.loop.create_task(self.state.app(request))
        self.state.tasks.add(task)
        task.add_done_callback(partial(self._on_task_done, request))

    def _take_body(self, data: memoryview, request: Request) -> memoryview:
        """Hand over the next part of a body; return the rest of `data`."""
        part = self._meter.take(data)
        data = data[len(part) :]
        body = bytes(part)
        if self._chunks is None:
            more = not self._meter.is_complete
        else:
            try:
                body, rest = self._chunks.feed(body)
            except ValueError as error:
                self._refuse(400, f"{_NO_REQUEST}: {error}")
                return data
            more = not self._chunks.has_ended
            self._meter.note_body(len(body))
            if more and self._meter.costs_too_much:
                self._refuse(400, TOO_SMALL)
                return data
            if rest:
                data = memoryview(rest + bytes(data))
        request.feed(body, more_body=more)
        # Each pause takes the connection out of the loop's selector, and reading puts it back.
        if more and request.unread > MAX_UNREAD_BYTES:
            self._pause_reading()
        return data

    # ---- answers go out --------------------------------------------------------------------

    def on_answered(self) -> None:
        request, self._request = self._request, None
        self.state.num_answered += 1
        if request is None or self.transport.is_closing() or self._discarding:
            return
        if not request.keep_alive:
            if request.more_body or self._ahead or self._discarded:
                self._discard()
            else:
                self.transport.close()
            return
        self.state.open_connections.add_idle(self)
        self.resume_reading()
        if self._ahead:
            self._parse(memoryview(self._ahead))
        else:
            self._set_timer(KEEP_ALIVE_SECONDS, self._close_idle)

    def _on_task_done(self, request: Request, task: asyncio.Task[None]) -> None:
        self.state.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request failed", exc_info=error)
        if self._request is request:
            self.transport.close()  # No client can read the rest of half an answer.

    def _refuse(self, status: int, message: str) -> None:
        """Answer bytes that are no HTTP with an error, and hang up."""
        self.state.bad_requests.add(message)
        request, self._request = self._request, None
        if request is not None:
            # The body of a request is malformed: its task must not answer as well.
            request.lose_client()
            if request.status:
                # No client can read an error behind half an answer.
                self.transport.close()
                return
        self._hang_up(status, message)

    def _hang_up(self, status: int, message: str) -> None:
        self.transport.write(refusal(status, message))
        self._discard()

    # ---- time ------------------------------------------------------------------------------

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _cancel_timer(self) -> None:
        self._awaits_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._set_timer(self.state.head_seconds, self._on_head_timeout)
            self._awaits_head = True

    def _on_head_timeout(self) -> None:
        if not self.transport.is_closing():
            seconds = self.state.head_seconds
            self.state.bad_requests.add(f"no whole request head within {seconds:g} s")
            self.transport.close()

    def _close_idle(self) -> None:
        self.transport.close()
