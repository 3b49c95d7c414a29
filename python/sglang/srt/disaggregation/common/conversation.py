"""Questions of a decode server to a prefill server, and how long it waits for answers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import zmq

from sglang.srt.disaggregation.common.protocol import (
    Answer,
    Answered,
    Asked,
    Offer,
    Packed,
    Question,
    Released,
    RoomNews,
)
from sglang.srt.utils.bad_messages import MALFORMED

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""After so long without an answer a question is asked again, earlier where patience is short."""
POLL_S: Final = 0.1
"""How soon an abort is seen."""
ABORTED: Final = "the request was aborted"
_A = TypeVar("_A", Offer, RoomNews, Packed, Released)


class RoomFailed(RuntimeError):
    """The prompt does not come; the message says which step failed, and why."""


class Cancellation:
    """Says that a prompt is not wanted any more, and why. Any thread."""

    def __init__(self) -> None:
        self.why = ABORTED
        """Set before `is_set`; the first reason counts."""
        self._event = threading.Event()
        self._lock = threading.Lock()

    def set(self, why: str) -> None:
        with self._lock:
            if not self._event.is_set():
                self.why = why
                self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; whether it is set then."""
        return self._event.wait(timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a room waits for something."""

    bootstrap: float
    """Until the prefill server knows the room."""
    waiting: float
    """Until the next pages, once it knows the room."""
    silence: float
    """Until any answer of the prefill server."""

    @property
    def repeat(self) -> float:
        """Seconds for an answer before a question is repeated."""
        return min(REPEAT_S, self.silence / 4)


class Conversation:
    """Questions to one prefill server, one at a time, over a socket of its own."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        patience: Patience,
        cancelled: Cancellation,
    ) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._cancelled = cancelled
        self._number = 0
        self._heard = time.monotonic()
        """When the prefill server was last heard of, or began to be asked."""
        self._sent = 0.0
        self._instance_id: str | None = None
        self._decoder = msgspec.msgpack.Decoder(Answered)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.connect(endpoint)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def tell(self, question: Question) -> None:
        """Say it once, without waiting for an answer."""
        self._number += 1
        self._send(question)

    def ask(self, question: Question, kind: type[_A]) -> _A:
        """The answer, however often it takes to ask.

        Raises:
            RoomFailed: There is none for too long, another instance answers, or the room was
                cancelled.
        """
        self._number += 1
        self._sent = 0.0
        self._heard = time.monotonic()
        while not self._cancelled.is_set():
            self._repeat(question)
            answer = self._receive(POLL_S)
            if isinstance(answer, kind):
                return answer
        raise RoomFailed(self._cancelled.why)

    def keep_alive(self, question: Question, kind: type[_A], timeout: float = 0.0) -> _A | None:
        """Repeat the question now and then, and wait at most `timeout` seconds for an answer to it
        or to an earlier one.

        Raises:
            RoomFailed: As `ask`. The silence begins with the last answer.
        """
        if self._cancelled.is_set():
            raise RoomFailed(self._cancelled.why)
        self._repeat(question)
        answer = self._receive(timeout)
        return answer if isinstance(answer, kind) else None

    def begin(self, question: Question) -> None:
        """Ask, without waiting. What follows, until the next question begins, is one question
        whose asker comes further: answers to all of it count."""
        self._number += 1
        self._heard = time.monotonic()
        self.advance(question)

    def advance(self, question: Question) -> None:
        """The asker of the last question has come further: say so at once."""
        self._send(question)
        self._sent = time.monotonic()

    def _repeat(self, question: Question) -> None:
        now = time.monotonic()
        if now >= self._heard + self._patience.silence:
            raise RoomFailed(
                f"the prefill server at {self._endpoint} has not answered for "
                f"{self._patience.silence:g} s"
            )
        if now >= self._sent + self._patience.repeat:
            self._send(question)
            self._sent = now

    def _send(self, question: Question) -> None:
        message = msgspec.msgpack.encode(Asked(self._number, question))
        with contextlib.suppress(zmq.Again):  # Without a connection: the question is repeated.
            self._socket.send(message, zmq.NOBLOCK)

    def _receive(self, timeout: float) -> Answer | None:
        """The answer to the last question, after at most `timeout` seconds; None: there is none."""
        if not self._socket.poll(round(timeout * 1000)):
            return None
        try:
            message = self._decoder.decode(self._socket.recv())
        except MALFORMED as error:
            logger.warning("a bad message of the prefill server at %s: %s", self._endpoint, error)
            return None
        if self._instance_id not in (None, message.instance_id):
            raise RoomFailed("the prefill server was replaced by another instance")
        self._instance_id = message.instance_id
        self._heard = time.monotonic()
        return message.answer if message.number == self._number else None
