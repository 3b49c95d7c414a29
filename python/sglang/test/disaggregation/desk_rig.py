"""A prefill server's desk for tests: a clock that stands, and decode servers that ask by hand."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

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
from sglang.srt.disaggregation.control.control_link import ControlLink
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret
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
    """A decode server's connection, which is open."""

    def __init__(self, port: int, secret: DeploymentSecret | None = None) -> None:
        self.link = ControlLink(f"tcp://127.0.0.1:{port}", secret)
        self._number = 0
        self.until_open()

    def until_open(self) -> None:
        """Wait for the end of the handshake: before it a message takes the place of another."""
        until(lambda: self.link.receive(0.005) is None and self.link._has_met)

    def send(self, question: Question, number: int | None = None) -> int:
        self._number = self._number + 1 if number is None else number
        self.link.send(msgspec.msgpack.encode(Asked(self._number, question)))
        return self._number

    def hear(self, timeout_s: float = 10.0) -> Answered:
        message = self.link.receive(timeout_s)
        assert message is not None, "no answer"
        return msgspec.msgpack.decode(message, type=Answered)

    def hears_nothing(self) -> bool:
        """Whether no answer is there."""
        return self.link.receive(0.0) is None

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
