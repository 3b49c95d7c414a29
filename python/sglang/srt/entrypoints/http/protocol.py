"""uvicorn's HTTP/1.1 connections on its C parser, with bounds on what arrives before an answer.

uvicorn does not bound the size of a request's head, the time it takes to come, or the cost of
parsing a body; and it goes on parsing after it has refused a request. This protocol differs:

- A head may have `MAX_HEAD_BYTES` and take `HEAD_SECONDS`. `body.py` bounds the bytes and seconds
  of a body, and `BodyMeter` the overhead of its chunks.
- One request is parsed at a time; data after it waits until it is answered.
- An answer that comes before the whole body ends the connection. The rest of the body is discarded
  unparsed, for a while, so that the client can read the answer (`_discard`).
- A connection is paused later, at `MAX_UNREAD_BYTES` of a body that its endpoint has not read.
- The number of idle connections is bounded (`OpenConnections`).
- A response's head goes out with the first part of its body (`AnswerTransport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import urllib.parse
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sglang.srt.constants import KIB, MIB
from sglang.srt.utils.bad_messages import BadMessages
from sglang.srt.utils.bounded_listener import MAX_IDLE_CONNECTIONS, OpenConnections
from sglang.srt.utils.error_answers import error_object

logger = logging.getLogger(__name__)

_CHUNKED_PIECE: Final = 16384
"""Bytes of a chunked body between two checks of the overhead."""
_FREE_FRAMING_BYTES: Final = 65536
_BODY_PER_FRAMING_BYTE: Final = 64


class BodyMeter:
    """Counts the bytes of one body, with and without its framing.

    Framing is the overhead of chunks: lengths, extensions, trailers. Some 10,000 chunks of any size
    are allowed, and any number of chunks of at least 512 bytes.
    """

    def __init__(self, length: int | None) -> None:
        """Start with a body of `length` bytes; None: it comes in chunks."""
        self._left = length
        self._raw_bytes = 0
        """Bytes of a chunked body with its framing."""
        self._body_bytes = 0

    def take(self, data: memoryview) -> memoryview:
        """Count and return the front of `data` that is to be parsed next."""
        if self._left is None:
            part = data[:_CHUNKED_PIECE]
            self._raw_bytes += len(part)
        else:
            part = data[: self._left]
            self._left -= len(part)
        return part

    def note_body(self, count: int) -> None:
        self._body_bytes += count

    @property
    def costs_too_much(self) -> bool:
        """True if there is too much framing for the bytes of the body so far."""
        room = self._body_bytes + self._body_bytes // _BODY_PER_FRAMING_BYTE
        return self._raw_bytes > _FREE_FRAMING_BYTES + room


_ONE_WRITE_BYTES: Final = 65536
"""Most bytes of body data that are joined with the head: joining more costs more than a second
write."""


class Answer(RequestResponseCycle):
    """One request and its answer. The answer ends the connection if the request's body is
    incomplete."""

    async def send(self, message: Any) -> None:
        if not self.response_started and self.more_body:
            self.keep_alive = False
        await super().send(message)


class AnswerTransport:
    """The transport that an answer is written to.

    The head waits for the start of the body, so that both are one write and wake the client once.
    The wait is short: every endpoint has the first bytes of its body when it starts its answer.
    """

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Write `data`, or hold it back if it is the head: the first data after the start of the
        response. Only a `100 Continue` comes before that. A client that is gone gets nothing:
        asyncio would log each further write."""
        if self.is_closing():
            return
        if self._head is None and self._connection.cycle.response_started:
            self._head = data
        elif self._head and len(data) <= _ONE_WRITE_BYTES:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self.flush()
            self._transport.write(data)

    def flush(self) -> None:
        """Write a head that is still held back, if the answer has no body."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._connection.end()


def refusal(status: int, message: str) -> bytes:
    """A whole answer with an error in the common format; it ends the connection."""
    body = json.dumps(error_object(message, "invalid_request_error", status)).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


MAX_HEAD_BYTES: Final = 16384
"""Longest head of a request, its empty line included."""
HEAD_SECONDS: Final = 10.0
"""Seconds from the first byte (or the connection) to the end of a request's head."""
MAX_UNREAD_BYTES: Final = 256 * KIB
"""A connection is paused while more than this of a body waits for its endpoint. asyncio receives as
much at once: with uvicorn's 64 KiB, each part of a long prompt would pause and resume the
connection."""
DISCARD_SECONDS: Final = 10.0
DISCARD_BYTES: Final = 64 * MIB
"""Bounds for discarding data that a client still sends after an answer that ends its connection
(four times the largest body). Many clients send all before they read the answer, and closing at
once would take the answer away."""

_HEAD_END: Final = b"\r\n\r\n"
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"
"""The first head of a client that speaks HTTP/2 (RFC 9113, 3.4). `sglang_router` asks every server
so, twice, whether it speaks gRPC."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_NO_REQUEST: Final = "this is no HTTP request"


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Event loop thread only.

    Make a subclass for each server (`bounded_protocol`): its connections share `bad_requests` and
    `open_connections`.
    """

    bad_requests: BadMessages
    open_connections: OpenConnections
    quiet_logger: logging.Logger
    head_seconds: float = HEAD_SECONDS
    discard_seconds: float = DISCARD_SECONDS

    _outlet: AnswerTransport | None = None
    _timer: asyncio.TimerHandle | None = None
    """Timer for a head, or for discarded data."""
    _meter = BodyMeter(0)
    """Meter of the request under way."""
    _ahead = b""
    """Data received after a request that is not answered yet."""
    _discarding = False
    _discarded = 0
    """Bytes thrown away."""

    # ---- life ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = bytearray()
        # uvicorn's own logger would warn of every bad request; `bad_requests` counts them.
        self.logger = self.quiet_logger
        self.open_connections.add_idle(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._unset_keepalive_if_required()
        self.open_connections.remove_idle(self)
        super().connection_lost(exc)

    def end_with_answer(self) -> None:
        """Let the answer under way end the connection, with a header that says so. If its head has
        already gone out, it keeps the connection, as the head says."""
        if self._has_request() and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def end(self) -> None:
        """Close the connection behind an answer, once the client has had time to read it.

        A close with unread bytes makes the kernel reset the connection, and the client may lose
        the answer.
        """
        if self.transport.is_closing() or self._discarding:
            return
        if self.cycle is not None and not self.cycle.more_body and not self._ahead:
            self.transport.close()
        else:
            self._discard()

    def _discard(self) -> None:
        self._discarding = True
        self._ahead = b""
        self._cancel_timer()
        self._unset_keepalive_if_required()
        self.open_connections.add_idle(self)
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot.
            with contextlib.suppress(OSError):  # The client may be gone.
                self.transport.write_eof()
        self._timer = self.loop.call_later(self.discard_seconds, self.transport.close)

    # ---- requests come in ------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > DISCARD_BYTES:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        self._parse(memoryview(self._ahead + data if self._ahead else data))

    def _parse(self, data: memoryview) -> None:
        """Feed the parser up to the end of a request; later data waits for the answer."""
        self._ahead = b""
        while data and not self._discarding and not self.transport.is_closing():
            if not self._has_request():
                data = self._take_head(data)
            elif self.cycle.more_body:
                data = self._take_body(data)
            else:
                self._ahead = bytes(data)
                self.flow.pause_reading()
                return
        if self._timer is None and not self._has_request():
            self._await_head()

    def _take_head(self, data: memoryview) -> memoryview:
        """Parse a request's head once it is complete; return the rest of `data`."""
        held = len(self._head)
        piece = bytes(data[: MAX_HEAD_BYTES - held])
        if not held and piece[:1] in (b"\r", b"\n"):
            # Old clients send empty lines between requests (RFC 9112, 2.2).
            return data[len(piece) - len(piece.lstrip(b"\r\n")) :]
        self._head += piece
        end = self._head.find(_HEAD_END, max(held - len(_HEAD_END) + 1, 0))
        if end >= 0:
            size = end + len(_HEAD_END)
            if self._head[:size] == _HTTP2_PREFACE:
                # Not counted as a mistake: the client asks whether the server speaks HTTP/2.
                self._hang_up(505, "HTTP/2 is not spoken here: send HTTP/1.1")
                return data[size - held :]
            # There is no protocol to upgrade to, and a parser that sees `Upgrade` skips the body.
            self._feed(_UPGRADE.sub(rb"\r\nno-upgrade:", bytes(self._head[:size])))
            self._head.clear()
            return data[size - held :]
        if not self._head[:1].isalpha():
            self._refuse(400, f"{_NO_REQUEST}: no method begins with this byte")
        elif len(self._head) == MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
        return data[len(piece) :]

    def _take_body(self, data: memoryview) -> memoryview:
        """Parse the next part of a body; return the rest of `data`."""
        part = self._meter.take(data)
        self._feed(part)
        if self.cycle.more_body and self._meter.costs_too_much:
            self._refuse(400, "the body comes in too many small chunks: send larger ones")
        return data[len(part) :]

    def _feed(self, part: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(part)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._has_request() and not self.cycle.more_body:
                # Bytes after the last chunk: the request is answered, then the connection ends.
                self.cycle.keep_alive = False
            else:
                self._refuse(400, f"{_NO_REQUEST}: {_cause_of(error)}")

    # ---- calls from the parser -------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._has_request():
            raise httptools.HttpParserError("a request behind one that is not answered")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here too, and are dropped.
        if not self._has_request():
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        headers = dict(self.headers)
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise httptools.HttpParserError(f"HTTP/{version} is not spoken here")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise httptools.HttpParserError("exactly one Host header is needed")
        is_chunked = b"transfer-encoding" in headers
        self._meter = BodyMeter(None if is_chunked else int(headers.get(b"content-length", b"0")))
        self._fill_scope(version)
        self._outlet = AnswerTransport(self)
        self.cycle = Answer(
            scope=self.scope,
            transport=self._outlet,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=(
                version != "1.0"
                and self.parser.should_keep_alive()
                and not self.open_connections.end_with_answer
            ),
            on_response=self.on_response_complete,
        )
        self._cancel_timer()
        self.open_connections.remove_idle(self)
        self._start_asgi_task(self.cycle, self.app)

    def _fill_scope(self, version: str) -> None:
        """Fill in the fields that the base class sets in the method that this class replaces."""
        url = httptools.parse_url(self.url)
        raw_path = url.path or b""
        path = raw_path.decode("ascii")
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = url.query or b""

    def on_body(self, body: bytes) -> None:
        self._meter.note_body(len(body))
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        # Each pause takes the connection out of the loop's selector, and reading puts it back.
        if len(self.cycle.body) > MAX_UNREAD_BYTES:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    # ---- answers go out --------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self._outlet is not None:
            self._outlet.flush()
        if self._discarding:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if not self.transport.is_closing():
            self.open_connections.add_idle(self)
            if self._ahead:
                self._unset_keepalive_if_required()
                self._parse(memoryview(self._ahead))

    def _refuse(self, status: int, message: str) -> None:
        """Answer bytes that are no HTTP with an error, and hang up."""
        self.bad_requests.add(message)
        has_begun = self._has_request() and self.cycle.response_started
        if self._has_request():
            # The body of a request is malformed: its task must not answer as well.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if has_begun:
            # No client can read an error behind half an answer.
            self.transport.close()
            return
        self._hang_up(status, message)

    def _hang_up(self, status: int, message: str) -> None:
        self.transport.write(refusal(status, message))
        self._discard()

    # ---- time ------------------------------------------------------------------------------

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_seconds, self._on_head_timeout)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_timeout(self) -> None:
        self._timer = None
        if not self._has_request() and not self.transport.is_closing():
            self.bad_requests.add(f"no whole request head within {self.head_seconds:g} s")
            self.transport.close()


def _cause_of(error: Exception) -> str:
    """Message of the parser, or of the error that one of the callbacks above raised."""
    inner = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
    return str(inner if isinstance(inner, httptools.HttpParserError) else error)


def bounded_protocol(max_idle: int = MAX_IDLE_CONNECTIONS) -> type[BoundedProtocol]:
    """A protocol class for one server. Its connections share a count of bad requests and the list
    of idle connections."""
    quiet = logging.getLogger("uvicorn.error.connections")
    quiet.setLevel(logging.ERROR)
    shared = {
        "bad_requests": BadMessages(logger, "HTTP request"),
        "open_connections": OpenConnections(max_idle),
        "quiet_logger": quiet,
    }
    return type("ServerProtocol", (BoundedProtocol,), shared)
