"""The decode server's side of a room: reads a prompt's pages from the prefill server's memory.

The decode server reads; nobody writes into its memory. So its pages are free again as soon as its
own reads have ended, which it knows itself, whatever becomes of the prefill server. While it reads,
it goes on asking: the prefill server keeps the pages for those that it hears of, and a prefill
server that is gone fails the request before the transport has given up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
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
from sglang.srt.utils.bad_messages import MALFORMED

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""After so long without an answer a question is asked again, earlier where patience is short."""
_POLL_S: Final = 0.1
"""How soon an abort is seen."""
ABORTED: Final = "the request was aborted"
STEPS: Final = ("asking", "reading", "confirming")
"""Of a prompt, where tests let it fail."""
_A = TypeVar("_A", Offer, RoomNews, Released)


class RoomFailed(RuntimeError):
    """The prompt does not come; the message says which step failed, and why."""


class Mover(Protocol):
    """What a room asks of the Transfer Engine; see `MooncakeTransferEngine.begin`."""

    def begin(
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

    @property
    def repeat(self) -> float:
        """For an answer, before a question is asked again."""
        return min(REPEAT_S, self.silence / 4)


FindEndpoint = Callable[[str, int], str]
"""The control endpoint of the prefill server whose bootstrap server is at a host and port. Asks
once and may take time; raises BootstrapError."""


class RemotePrompt:
    """One prompt on its way. `run` is a thread's work; the others any thread's.

    Args:
        meeting: Where the prefill server is, and the room.
        own_pages: Pages of this server's pools for the prompt's pages from `first_page` on.
        first_page: Pages of the prompt that this server has already.
        fails_at: One of STEPS, which then fails; for tests.
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
        fails_at: str | None = None,
    ) -> None:
        self._meeting = meeting
        self._own_pages = own_pages
        self._first_page = first_page
        self._geometry = geometry
        self._mover = mover
        self._find_endpoint = find_endpoint
        self._patience = patience
        self._context = context
        self._fails_at = fails_at
        self._reader = uuid.uuid4().hex
        self._transfer: Transfer | None = None
        """The last one that was begun."""
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self.first_token: FirstToken | None = None
        """Set before `has_ended`, where all has come."""
        self.failure: str | None = None
        """Set where it will not come, maybe long before `has_ended`."""
        self.has_met = False
        """Whether the prefill server has said that it has the request too."""
        self.read_seconds = 0.0
        """With a read in flight."""
        self.num_bytes_read = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing touches the pages any more."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """It is not wanted any more: end soon."""
        self._cancelled.set()

    def run(self) -> None:
        """Get the prompt. Never raises; `has_ended` afterwards, unless the transport never lets go
        of the pages."""
        try:
            self.first_token = self._receive()
        except RoomFailed as error:
            self.failure = str(error)
        except Exception as error:
            logger.exception("a prompt could not be received")
            self.failure = f"receiving the prompt failed: {type(error).__name__}: {error}"
        transfer = self._transfer
        if transfer is None or transfer.wait():
            self._ended.set()
        else:
            logger.error(
                "room %d: its pages are lost, since the transport does not let go of them",
                self._meeting.room,
            )

    def _receive(self) -> FirstToken:
        meeting = self._meeting
        endpoint = _found(self._find_endpoint, meeting, self._patience, self._cancelled)
        with _Conversation(endpoint, self._context, self._patience, self._cancelled) as talk:
            try:
                return self._converse(talk)
            except Exception as error:
                talk.tell(GiveUp(meeting.room, self._reader, str(error)))
                raise

    def _converse(self, talk: _Conversation) -> FirstToken:
        room = self._meeting.room
        self._reach("asking")
        offer = talk.ask(Hello(), Offer)
        refusal = self._geometry.why_not(offer)
        if refusal is not None:
            host, port = self._meeting.host, self._meeting.port
            raise RoomFailed(
                f"the prefill server at {host}:{port} cannot serve this one: {refusal}"
            )
        first_token = self._read_all(talk, offer)
        self._reach("confirming")
        if not talk.ask(Received(room, self._reader), Released).was_held:
            raise RoomFailed("the prefill server let go of the pages while they were read")
        return first_token

    def _reach(self, step: str) -> None:
        if step == self._fails_at:
            raise RoomFailed(f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed")

    def _ask(self, have: int, *, may_wait: bool = True) -> Ask:
        """Args:
        have: Pages that were read or are being read.
        """
        return Ask(
            self._meeting.room,
            self._reader,
            self._first_page + have,
            has_token=not may_wait,
            may_wait=may_wait,
        )

    def _read_all(self, talk: _Conversation, offer: Offer) -> FirstToken:
        have, total = 0, len(self._own_pages)
        patience = self._patience
        is_known = False
        deadline = time.monotonic() + patience.bootstrap
        while True:
            news = talk.ask(self._ask(have), RoomNews)
            _check(news)
            self.has_met |= news.is_known
            coming = have + len(news.pages)
            if coming > total or (news.first_token is not None and coming < total):
                raise RoomFailed(
                    f"the prefill server computed a prompt of {self._first_page + coming} pages, "
                    f"this server expects {self._first_page + total}: both need the same tokenizer "
                    "and chat template"
                )
            if news.pages:
                self._reach("reading")
                self._read(talk, offer, news, have)
                have = coming
            if news.first_token is not None:
                return news.first_token
            now = time.monotonic()
            if news.pages or (news.is_known and not is_known):
                is_known = True
                deadline = now + patience.waiting
            elif now >= deadline:
                what = "has not computed more" if news.is_known else "does not know the request"
                raise RoomFailed(f"the prefill server {what} in time")

    def _read(self, talk: _Conversation, offer: Offer, news: RoomNews, have: int) -> None:
        """Read the pages of `news`, after the `have` ones that there are."""
        if news.first_page != self._first_page + have:
            raise RoomFailed("the prefill server answered for other pages than were asked for")
        coming = have + len(news.pages)
        blocks = self._geometry.blocks(offer, news.pages, self._own_pages[have:coming])
        started = time.monotonic()
        try:
            transfer = self._mover.begin(
                offer.session_id, TransferOp.READ, blocks, timeout=self._patience.waiting
            )
        except TransferError as error:
            raise RoomFailed(f"reading from the prefill server failed: {error}") from error
        self._transfer = transfer
        try:
            while not transfer.wait(_POLL_S):
                if transfer.is_left:
                    raise RoomFailed("reading from the prefill server failed, and cannot end")
                _check(talk.keep_alive(self._ask(coming, may_wait=False), RoomNews))
        except BaseException:
            transfer.abandon()
            raise
        self.read_seconds += time.monotonic() - started
        self.num_bytes_read += sum(block.length for block in blocks)
        if transfer.error is not None:
            raise RoomFailed(f"reading from the prefill server failed: {transfer.error}")
        if not transfer.is_done:
            raise RoomFailed(
                "the prefill server's pages could not be read within "
                f"{self._patience.waiting:g} s, or it refuses their addresses"
            )


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
        if cancelled.wait(patience.repeat):
            raise RoomFailed("the request was aborted")


def decline_room(
    meeting: Bootstrap,
    reason: str,
    *,
    find_endpoint: FindEndpoint,
    patience: Patience,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Tell a prefill server, once, that nobody will read a prompt. A thread's work; never raises:
    a prefill server that does not hear it waits in vain for a while."""
    cancelled = threading.Event()
    try:
        endpoint = _found(find_endpoint, meeting, patience, cancelled)
        with _Conversation(endpoint, context, patience, cancelled) as talk:
            talk.tell(GiveUp(meeting.room, uuid.uuid4().hex, reason))
    except RoomFailed as error:
        logger.warning("room %d could not be declined: %s", meeting.room, error)
    except Exception:
        logger.exception("room %d could not be declined", meeting.room)


def _check(news: RoomNews | None) -> None:
    if news is not None and news.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {news.failure}")


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
        self._heard = time.monotonic()
        """When the prefill server was last heard of, or began to be asked."""
        self._sent = 0.0
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
        self._sent = 0.0
        self._heard = time.monotonic()
        while not self._cancelled.is_set():
            self._repeat(question)
            answer = self._receive(_POLL_S)
            if isinstance(answer, kind):
                return answer
        raise RoomFailed(ABORTED)

    def keep_alive(self, question: Question, kind: type[_A]) -> _A | None:
        """Now and then ask, without waiting for the answer: an answer to this or to one before.

        Raises:
            RoomFailed: As `ask`. The silence begins with the last answer.
        """
        if self._cancelled.is_set():
            raise RoomFailed(ABORTED)
        self._repeat(question)
        answer = self._receive(0.0)
        return answer if isinstance(answer, kind) else None

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
