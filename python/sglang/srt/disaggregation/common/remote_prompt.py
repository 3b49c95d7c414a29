"""The decode server's side of a room: reads a prompt's pages from the prefill server's memory.

The decode server reads; nobody writes into its memory. So its pages are free again as soon as its
own reads have ended, which it knows itself, whatever becomes of the prefill server.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
import zmq

from sglang.srt.disaggregation.common.bootstrap_client import BootstrapError
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.protocol import (
    Answer,
    Answered,
    Ask,
    Asked,
    FirstToken,
    GiveUp,
    Hello,
    Offer,
    Question,
    Received,
    Released,
    RoomNews,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.managers.messages.io_struct import Bootstrap

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""After so long without an answer a question is asked again."""
_A = TypeVar("_A", Offer, RoomNews, Released)


class RoomFailed(RuntimeError):
    """The prompt does not come; the message says which step failed, and why."""


class Mover(Protocol):
    """What a room asks of the Transfer Engine; see `MooncakeTransferEngine.transfer`."""

    def transfer(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a room waits."""

    bootstrap: float
    """For the prefill server to know the room."""
    waiting: float
    """For the next pages, once it does."""
    silence: float
    """For any answer of the prefill server."""


FindEndpoint = Callable[[str, int], str]
"""The control endpoint of the prefill server whose bootstrap server is at a host and port. Asks
once and may take time; raises BootstrapError."""


class RemotePrompt:
    """One prompt on its way. `run` is a thread's work; the others any thread's.

    Args:
        meeting: Where the prefill server is, and the room.
        own_pages: Pages of this server's pools for the prompt's pages from `first_page` on.
        first_page: Pages of the prompt that this server has already.
    """

    def __init__(
        self,
        meeting: Bootstrap,
        own_pages: Sequence[int],
        first_page: int,
        *,
        geometry: PoolGeometry,
        mover: Mover,
        find_endpoint: FindEndpoint,
        patience: Patience,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._meeting = meeting
        self._own_pages = own_pages
        self._first_page = first_page
        self._geometry = geometry
        self._mover = mover
        self._find_endpoint = find_endpoint
        self._patience = patience
        self._context = context
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self.first_token: FirstToken | None = None
        """Set at the end, where all has come."""
        self.failure: str | None = None
        """Set at the end, where it has not."""
        self.read_seconds = 0.0
        """Spent in transfers."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing touches the pages any more."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """It is not wanted any more: end soon."""
        self._cancelled.set()

    def run(self) -> None:
        """Get the prompt. Never raises; `has_ended` afterwards."""
        try:
            self.first_token = self._receive()
        except RoomFailed as error:
            self.failure = str(error)
        except Exception as error:
            logger.exception("a prompt could not be received")
            self.failure = f"receiving the prompt failed: {type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _receive(self) -> FirstToken:
        meeting = self._meeting
        endpoint = _found(self._find_endpoint, meeting, self._patience, self._cancelled)
        with _Conversation(endpoint, self._context, self._patience, self._cancelled) as talk:
            try:
                offer = talk.ask(Hello(), Offer)
                self._check(offer)
                first_token = self._read_all(talk, offer)
            except RoomFailed as error:
                talk.tell(GiveUp(meeting.room, str(error)))
                raise
            if not talk.ask(Received(meeting.room), Released).was_held:
                raise RoomFailed("the prefill server let go of the pages while they were read")
            return first_token

    def _check(self, offer: Offer) -> None:
        refusal = self._geometry.why_not(offer)
        if refusal is not None:
            where = f"{self._meeting.host}:{self._meeting.port}"
            raise RoomFailed(f"the prefill server at {where} cannot serve this one: {refusal}")

    def _read_all(self, talk: _Conversation, offer: Offer) -> FirstToken:
        room, have = self._meeting.room, 0
        total = len(self._own_pages)
        patience = self._patience
        deadline = time.monotonic() + patience.bootstrap
        while True:
            news = talk.ask(Ask(room, self._first_page + have), RoomNews)
            if news.failure is not None:
                raise RoomFailed(f"the prefill server ended the request: {news.failure}")
            is_news = bool(news.pages) or news.first_token is not None
            if is_news:
                have += self._read(offer, news, have)
                deadline = time.monotonic() + patience.waiting
            if news.first_token is not None and have == total:
                return news.first_token
            if time.monotonic() >= deadline:
                what = "has not computed more" if news.is_known else "does not know the request"
                raise RoomFailed(f"the prefill server {what} in time")

    def _read(self, offer: Offer, news: RoomNews, have: int) -> int:
        """Read the pages of `news`: how many."""
        pages = news.pages[: len(self._own_pages) - have]
        if news.first_page != self._first_page + have:
            raise RoomFailed("the prefill server answered for other pages than were asked for")
        if not pages:
            return 0
        own = self._own_pages[have : have + len(pages)]
        blocks = self._geometry.blocks(offer, pages, own)
        started = time.monotonic()
        try:
            transfer = self._mover.transfer(
                offer.session_id, TransferOp.READ, blocks, timeout=self._patience.waiting
            )
            # What is in flight writes to this server's pages until the transport lets go.
            transfer.wait()
        except TransferError as error:
            raise RoomFailed(f"reading from the prefill server failed: {error}") from error
        self.read_seconds += time.monotonic() - started
        if not transfer.is_done:
            raise RoomFailed("reading from the prefill server ended early")
        return len(pages)


def _found(
    find_endpoint: FindEndpoint, meeting: Bootstrap, patience: Patience, cancelled: threading.Event
) -> str:
    """The control endpoint of a room's prefill server, which may have just been started."""
    deadline = time.monotonic() + patience.silence
    while True:
        try:
            return find_endpoint(meeting.host, meeting.port)
        except BootstrapError as error:
            if time.monotonic() >= deadline:
                raise RoomFailed(f"the prefill server is not found: {error}") from error
        if cancelled.wait(REPEAT_S):
            raise RoomFailed("the request was aborted")


def decline(
    meeting: Bootstrap,
    reason: str,
    *,
    find_endpoint: FindEndpoint,
    patience: Patience,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Tell the prefill server that nobody will come for a room. A thread's work; never raises."""
    cancelled = threading.Event()
    try:
        endpoint = _found(find_endpoint, meeting, patience, cancelled)
        with _Conversation(endpoint, context, patience, cancelled) as talk:
            talk.ask(GiveUp(meeting.room, reason), Released)
    except RoomFailed as error:
        # It gives the room up by itself after a while.
        logger.warning("room %d could not be declined: %s", meeting.room, error)


class _Conversation:
    """Questions to one prefill server, one at a time, over a socket of its own."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        patience: Patience,
        cancelled: threading.Event,
    ) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._cancelled = cancelled
        self._number = 0
        self._instance_id: str | None = None
        self._decoder = msgspec.msgpack.Decoder(Answered)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.connect(endpoint)

    def __enter__(self) -> _Conversation:
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
        deadline = time.monotonic() + self._patience.silence
        next_time = 0.0
        while not self._cancelled.is_set():
            now = time.monotonic()
            if now >= deadline:
                raise RoomFailed(
                    f"the prefill server at {self._endpoint} has not answered for "
                    f"{self._patience.silence:.0f} s"
                )
            if now >= next_time:
                self._send(question)
                next_time = now + REPEAT_S
            answer = self._receive(100)
            if isinstance(answer, kind):
                return answer
        raise RoomFailed("the request was aborted")

    def _send(self, question: Question) -> None:
        message = msgspec.msgpack.encode(Asked(self._number, question))
        with contextlib.suppress(zmq.Again):  # Without a connection: the question is repeated.
            self._socket.send(message, zmq.NOBLOCK)

    def _receive(self, timeout_ms: int) -> Answer | None:
        """The answer to the last question; None: there is none yet."""
        if not self._socket.poll(timeout_ms):
            return None
        try:
            message = self._decoder.decode(self._socket.recv())
        except msgspec.DecodeError:
            return None
        if self._instance_id not in (None, message.instance_id):
            raise RoomFailed("the prefill server was replaced by another instance")
        self._instance_id = message.instance_id
        return message.answer if message.number == self._number else None
