"""Writes answers, head and body in one write, and refusals of bytes that are not HTTP."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, Final, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from sglang.srt.utils.error_answers import error_object

_ONE_WRITE_BYTES: Final = 65536
"""Most bytes of body data that are joined with the head: joining more costs more than a second
write."""


class AnsweringConnection(Protocol):
    """The connection that a request came on."""

    transport: asyncio.Transport
    cycle: RequestResponseCycle

    def end(self) -> None:
        """Close the connection after an answer."""


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

    def __init__(self, connection: AnsweringConnection) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Write `data`, or hold it back if it is the head: the first data after the start of the
        response. Only a `100 Continue` comes before that."""
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
