"""A prefill server's desk for tests: a clock that stands, and decode servers that ask by hand."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq

from sglang.srt.disaggregation.common.protocol import (
    Answer,
    Answered,
    Ask,
    Asked,
    FirstToken,
    Offer,
    Question,
    RoomNews,
)
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.utils.network import wait_until

OFFER = Offer(2, "instance", "session", "layout", {"page size": "4"}, [])
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d", top_logprobs=[(-0.5, 7)])
UNWANTED_S, SILENT_S = 300, 10


class Clock:
    """A clock that stands still, unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asker:
    """A decode server's connection."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._number = 0

    def send(self, question: Question, number: int | None = None) -> int:
        self._number = self._number + 1 if number is None else number
        self.socket.send(msgspec.msgpack.encode(Asked(self._number, question)))
        return self._number

    def hear(self, timeout_ms: int = 10_000) -> Answered:
        assert self.socket.poll(timeout_ms), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=Answered)

    def ask(self, question: Question) -> Answer:
        number = self.send(question)
        answered = self.hear()
        assert (answered.number, answered.instance_id) == (number, "instance")
        return answered.answer

    def look(self, room: int, reader: str = "me", have: int = 0) -> RoomNews:
        """The state of a room, now."""
        news = self.ask(Ask(room, reader, have, may_wait=False))
        assert isinstance(news, RoomNews)
        return news


def until(is_so: Callable[[], bool]) -> None:
    """Wait until `is_so` holds; fail after ten seconds."""
    assert wait_until(is_so, 10, interval=0.005)


def fill(desk: RoomDesk, room: int) -> None:
    """Open a room whose request has two pages and all its prompt."""
    desk.open(room)
    desk.add_pages(room, [3, 4])
    desk.complete(room, TOKEN)
