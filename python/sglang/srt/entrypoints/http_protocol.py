"""uvicorn's HTTP/1.1 connections, with a bound on how long a request may take to arrive.

uvicorn bounds the time between requests, not that of a request's head: a client that sends a byte
a minute would keep its connection for ever. `http_body` bounds the body. And a response's head goes
out with the body, not before it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang.srt.utils.bad_messages import BadMessages

logger = logging.getLogger(__name__)

HEAD_SECONDS: Final = 10.0
"""From the first byte (or the connection) to the end of a request's head."""


class OnePieceConnection(h11.Connection):
    """Holds a response's head back until its body begins: one write, and one wake-up of the
    client, instead of two. Every answer here has the begin of its body when it starts."""

    _head: Sequence[bytes] = ()

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """What to write now, in pieces; `send` joins them."""
        data = super().send_with_data_passthrough(event)
        if isinstance(event, h11.Response):
            self._head = data or ()
            return []
        if data is None:
            return None
        head, self._head = self._head, ()
        return [*head, *data]


class BoundedH11Protocol(H11Protocol):
    """One connection. Event loop thread only.

    h11 itself bounds the head's size (16 KiB). Make a subclass for each server: `bad_requests`
    is shared by its connections.
    """

    bad_requests: BadMessages
    quiet_logger: logging.Logger
    head_seconds: float = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = OnePieceConnection(h11.SERVER)
        # It would warn of every bad request; ours are counted.
        self.logger = self.quiet_logger
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request():
            self._cancel_timer()
        elif self._head_timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP in the shape of every error, and hang up."""
        self.bad_requests.add(msg)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = {"message": msg, "type": "invalid_request_error", "param": None, "code": 400}
            body = json.dumps({"error": error}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        # Else a response is under way, and what follows it is nothing anybody can answer.
        if self.cycle is not None:
            # A request whose body went bad: its task must not answer as well.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._on_head_timeout)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._has_request() and not self.transport.is_closing():
            self.bad_requests.add(f"no whole request head within {self.head_seconds:g} s")
            self.transport.close()


def bounded_protocol() -> type[BoundedH11Protocol]:
    """A protocol class for one server, with a count of its own."""
    quiet = logging.getLogger("uvicorn.error.connections")
    quiet.setLevel(logging.ERROR)
    shared = {"bad_requests": BadMessages(logger, "HTTP request"), "quiet_logger": quiet}
    return type("ServerProtocol", (BoundedH11Protocol,), shared)
