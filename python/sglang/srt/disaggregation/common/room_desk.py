"""The prefill server's rooms, and the thread that answers for them.

A room is one request whose other half a decode server computes. Its pages belong to it until the
decode server says that it has read them, gives it up, or is not heard of any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import zmq

from sglang.srt.disaggregation.common.protocol import (
    Answer,
    Answered,
    Ask,
    Asked,
    FirstToken,
    GiveUp,
    Hello,
    Offer,
    Received,
    Released,
    RoomNews,
)
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages

logger = logging.getLogger(__name__)

LONG_POLL_S: Final = 0.5
"""How long a question waits for news: shorter than the asker's patience."""
_REMEMBER_S: Final = 60.0
"""For how long a room that has ended is answered for: the last answer may be lost."""
_MAX_DECLINED: Final = 65_536
"""Rooms that were given up before their requests came."""
_MAX_WAITING: Final = 65_536
"""Questions that wait for news at once."""


@dataclass(slots=True)
class _Room:
    opened: float
    pages: list[int] = field(default_factory=list)
    first_token: FirstToken | None = None
    failure: str | None = None
    asked: float | None = None
    """When the decode server was last heard of; None: never."""
    ended: float | None = None
    """When the pages were let go of."""
    was_received: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A question without an answer yet."""

    number: int
    ask: Ask
    until: float


class RoomExists(ValueError):
    """The room belongs to another request."""


class RoomDeclined(RuntimeError):
    """The decode server has given the room up before its request came here."""


class RoomDesk:
    """Rooms by number. The scheduler's thread opens, fills and ends them; one thread of the desk,
    `disagg-desk`, answers decode servers.

    Args:
        offer: What this server holds.
        host: Address to listen on; a free port of it.
        unclaimed_s: Seconds after which a room that nobody has asked for is given up.
        silent_s: Seconds without a question after which the decode server counts as gone.
    """

    def __init__(
        self,
        offer: Offer,
        host: str,
        *,
        unclaimed_s: float,
        silent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises zmq.ZMQError: the host is not an address of this machine."""
        self._offer = offer
        self._unclaimed_s = unclaimed_s
        self._silent_s = silent_s
        self._clock = clock
        self._rooms: dict[int, _Room] = {}
        self._declined: dict[int, tuple[str, float]] = {}
        """By room: why it was given up before its request came, and when."""
        self._waiting: dict[bytes, _Waiting] = {}
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.port = port
        self._news, self._news_in = self._wake_pair()
        self._closing = threading.Event()
        self._decoder = msgspec.msgpack.Decoder(Asked)
        self._bad = BadMessages(logger, "message of a decode server")
        self._thread = threading.Thread(target=self._serve, name="disagg-desk", daemon=True)
        self._thread.start()

    # -- the scheduler's side --------------------------------------------------------------------

    def open(self, room: int) -> None:
        """A request has arrived.

        Raises:
            RoomExists: Another request has the room, or had it a moment ago.
            RoomDeclined: The decode server does not want it any more.
        """
        with self._lock:
            if room in self._declined:
                raise RoomDeclined(self._declined.pop(room)[0])
            if room in self._rooms:
                raise RoomExists(
                    f"bootstrap_room {room} belongs to another request: draw one for each request"
                )
            self._rooms[room] = _Room(self._clock())
        self._wake()

    def add_pages(self, room: int, pages: Sequence[int]) -> None:
        """The next pages of the prompt are computed. Nothing writes to them until the room ends."""
        with self._lock:
            self._rooms[room].pages += pages
        self._wake()

    def num_pages(self, room: int) -> int:
        """How many pages of the prompt are told."""
        with self._lock:
            return len(self._rooms[room].pages)

    def complete(self, room: int, first_token: FirstToken) -> None:
        """All pages are told, and the first token is known."""
        with self._lock:
            self._rooms[room].first_token = first_token
        self._wake()

    def end(self, room: int, failure: str | None = None) -> None:
        """The request ends, and its pages may be overwritten from now on. Idempotent.

        Args:
            failure: Why, where the decode server has not got it all.
        """
        with self._lock:
            one = self._rooms[room]
            if one.ended is None:
                one.ended = self._clock()
                one.failure = None if one.was_received else failure or "the request has ended"
                one.pages = []
        self._wake()

    def outcome(self, room: int) -> str | None:
        """What became of a room that is complete: "" where the decode server has it, the reason
        where it never will; None: it is not decided."""
        now = self._clock()
        with self._lock:
            one = self._rooms[room]
            if one.was_received:
                return ""
            if one.failure is not None:
                return one.failure
            if one.asked is None:
                if one.first_token is not None and now - one.opened > self._unclaimed_s:
                    return f"no decode server has asked for it within {self._unclaimed_s:.0f} s"
            elif now - one.asked > self._silent_s:
                return f"the decode server has not been heard of for {self._silent_s:.0f} s"
            return None

    def close(self) -> None:
        """End the thread. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake()
            self._thread.join()
            self._context.destroy(linger=0)

    # -- the desk's side -------------------------------------------------------------------------

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket that the thread polls, and one that the scheduler's thread writes to."""
        inside, outside = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        inside.bind("inproc://news")
        outside.connect("inproc://news")
        return inside, outside

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # The thread has enough to wake up for.
            self._news_in.send(b"", zmq.NOBLOCK)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(100))
            if self._news in ready:
                while self._take(self._news) is not None:
                    pass
            if self._socket in ready:
                while (frames := self._take(self._socket)) is not None:
                    self._read(frames)
            self._answer_waiting()

    @staticmethod
    def _take(source: zmq.Socket[bytes]) -> list[bytes] | None:
        try:
            return source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        sender, raw = frames
        try:
            asked = self._decoder.decode(raw)
        except MALFORMED as error:
            self._bad.add(error)
            return
        question = asked.question
        if isinstance(question, Ask):
            until = self._clock() + LONG_POLL_S
            if sender in self._waiting or len(self._waiting) < _MAX_WAITING:
                # Of a question that is repeated the last one counts.
                self._waiting[sender] = _Waiting(asked.number, question, until)
            return
        self._reply(sender, asked.number, self._answer(question))

    def _answer(self, question: Hello | Received | GiveUp) -> Answer:
        if isinstance(question, Hello):
            return self._offer
        with self._lock:
            one = self._rooms.get(question.room)
            reason = ""
            if isinstance(question, GiveUp):
                reason = f"the decode server gave it up: {question.reason[:500]}"
            if one is None:
                if reason and len(self._declined) < _MAX_DECLINED:
                    self._declined[question.room] = reason, self._clock()
                return Released(question.room, was_held=False)
            one.asked = self._clock()
            if reason:
                if not one.was_received and one.failure is None:
                    one.failure = reason
                return Released(question.room, was_held=False)
            held = one.failure is None and one.ended is None and one.first_token is not None
            one.was_received |= held
            return Released(question.room, was_held=one.was_received)

    def _answer_waiting(self) -> None:
        now = self._clock()
        with self._lock:
            for room in [
                number
                for number, one in self._rooms.items()
                if one.ended is not None and now - one.ended > _REMEMBER_S
            ]:
                del self._rooms[room]
            for room in [
                number for number, (_, at) in self._declined.items() if now - at > _REMEMBER_S
            ]:
                del self._declined[room]
            answers = [(sender, self._news_for(one, now)) for sender, one in self._waiting.items()]
        for sender, news in answers:
            if news is not None:
                self._reply(sender, self._waiting.pop(sender).number, news)

    def _news_for(self, waiting: _Waiting, now: float) -> RoomNews | None:
        """The answer; None: there is no news, and the asker has time."""
        ask = waiting.ask
        one = self._rooms.get(ask.room)
        if one is None:
            return RoomNews(ask.room, is_known=False) if now >= waiting.until else None
        one.asked = now
        if one.failure is not None:
            return RoomNews(ask.room, is_known=True, failure=one.failure)
        first = max(ask.have_pages, 0)
        has_news = len(one.pages) > first or (one.first_token is not None and not ask.has_token)
        if not has_news and now < waiting.until:
            return None
        return RoomNews(
            ask.room,
            is_known=True,
            first_page=first,
            pages=one.pages[first:],
            first_token=one.first_token,
        )

    def _reply(self, sender: bytes, number: int, answer: Answer) -> None:
        message = Answered(number, self._offer.instance_id, answer)
        try:
            self._socket.send_multipart([sender, msgspec.msgpack.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("an answer was not sent: %s", error)  # It will be asked for again.
