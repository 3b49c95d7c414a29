"""Receives a shard of a prompt: what a rank of a decode server reads from one rank of a prefill
server.

The decode server reads; no other server writes into its memory. So its pages are free again as soon
as its own reads have ended, even if the prefill server has failed. While it reads, it goes on
asking: the prefill server keeps the pages only for readers that ask, and a missing answer fails the
request before the transport gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sglang.srt.disaggregation.common.conversation import (
    POLL_S,
    Cancellation,
    Conversation,
    RoomFailed,
    cannot_serve,
)
from sglang.srt.disaggregation.common.geometry import Portion
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.packed_read import PackedRead
from sglang.srt.disaggregation.common.page_reads import PageReads
from sglang.srt.disaggregation.common.protocol import (
    Ask,
    FirstToken,
    GiveUp,
    Hello,
    Offer,
    Pack,
    Received,
    Released,
    RoomNews,
)
from sglang.srt.disaggregation.common.staging import StagingBuffer, rounds
from sglang.srt.disaggregation.common.transfer_context import TransferContext
from sglang.srt.distributed.device_communicators.transfer_types import Block

logger = logging.getLogger(__name__)

STEPS: Final = ("asking", "reading", "confirming")
"""Steps of a prompt in which tests inject a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Place of a prompt in this server's pools.

    Attributes:
        pages: Pages for the prompt's pages from `first_page` on.
        first_page: Number of leading pages of the prompt that this server has already.
        state: Slot for the prompt's recurrent state; None: the model has none.
    """

    pages: Sequence[int]
    first_page: int = 0
    state: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rank of a prefill server, and the identity of the asking rank.

    Attributes:
        where: Name of the prefill server, for errors.
        endpoint: Endpoint of the rank.
        instance_id: The instance that has to answer there.
        room: Room of the prompt there.
        reader: See `Reader`.
        part: Index of the asking rank among the reader's ranks that ask this one.
        num_parts: Number of the reader's ranks that ask this one.
    """

    where: str
    endpoint: str
    instance_id: str
    room: int
    reader: str
    part: int = 0
    num_parts: int = 1


class ShardReceiver:
    """One prefill rank's shard of a prompt, on its way. One thread calls `run`; any thread may call
    the rest.

    Args:
        source: The prefill rank.
        own: Place of the prompt in this server's pools.
        context: What all receivers of this rank share.
        portion_of: Returns the portion to read of a rank with this offer. May wait for the offers
            of other ranks; raises RoomFailed.
        on_failure: Called with the reason if the shard cannot be received, maybe long before
            `has_ended`.
        cancelled: When set, the shard ends soon.
        fails_at: Step of STEPS that fails, for tests.
    """

    def __init__(
        self,
        source: Source,
        own: OwnSlots,
        context: TransferContext,
        *,
        portion_of: Callable[[Offer], Portion],
        on_failure: Callable[[str], None],
        cancelled: Cancellation,
        fails_at: str | None = None,
    ) -> None:
        self._source = source
        self._own = own
        self._context = context
        self._portion_of = portion_of
        self._on_failure = on_failure
        self._patience = context.patience
        self._reads = PageReads(context.mover, context.staging, self._patience.waiting)
        self._num_packings = 0
        self._row_read = context.metadata.row_read(context.mover, self._patience.waiting)
        self._session_id: str | None = None
        """The rank's session, which is kept."""
        self._cancelled = cancelled
        self._fails_at = fails_at
        self._ended = threading.Event()
        self._returned = threading.Event()
        self.metadata: FirstToken | None = None
        """The metadata, set before `has_ended` if the whole shard was received."""
        self.read_seconds = 0.0
        """Seconds during which reads were in flight, or pages were packed for them."""
        self.metadata_bytes = {CONTROL: 0, TRANSPORT: 0}
        """Bytes of the received first token, by the way that it came."""

    @property
    def num_bytes_read(self) -> int:
        return self._reads.num_bytes

    @property
    def has_ended(self) -> bool:
        """Whether no read into the pages is in flight any more."""
        return self._ended.is_set()

    def join(self) -> None:
        """Wait for the end of `run`."""
        self._returned.wait()

    def run(self) -> None:
        """Receive the shard. Never raises. `has_ended` is true afterwards, unless the transport
        never lets go of the pages."""
        try:
            self.metadata = self._receive()
        except RoomFailed as error:
            self._on_failure(str(error))
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._on_failure(f"receiving the prompt failed: {type(error).__name__}: {error}")
        has_settled = self._reads.settle()
        if has_settled:
            self._ended.set()
        else:
            logger.error(
                "room %d: its pages are lost, since the transport does not let go of them",
                self._source.room,
            )
        self._row_read.settle()
        if self._session_id is not None and has_settled and not self._row_read.is_lost:
            self._context.sessions.leave(self._session_id)
        self._returned.set()

    def _receive(self) -> FirstToken:
        source = self._source
        with Conversation(
            source.endpoint,
            self._context.secret,
            self._patience,
            self._cancelled,
            source.instance_id,
        ) as talk:
            try:
                return self._converse(talk)
            except Exception as error:
                self._reads.abandon()
                talk.tell(GiveUp(source.room, source.reader, str(error)[:500]))
                raise

    def _converse(self, talk: Conversation) -> FirstToken:
        source = self._source
        self._reach("asking")
        offer = talk.ask(Hello(), Offer)
        refusal = self._context.geometry.why_not(offer)
        if refusal is not None:
            raise cannot_serve(source.where, refusal)
        portion = self._portion_of(offer)
        self._session_id = self._context.sessions.enter(
            offer.session_id, offer.instance_id, source.endpoint
        )
        offer = msgspec.structs.replace(offer, session_id=self._session_id)
        first_token = self._read_all(talk, offer, portion)
        self._read_state(talk, offer, portion, first_token)
        self._reach("confirming")
        received = Received(source.room, source.reader, source.part)
        if not talk.ask(received, Released).was_held:
            raise RoomFailed("the prefill server let go of the pages while they were read")
        return first_token

    def _reach(self, step: str) -> None:
        if step == self._fails_at:
            raise RoomFailed(f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed")

    def _ask(self, have: int, *, may_wait: bool = True, wants_words: bool = False) -> Ask:
        """Args:
        have: Pages that were read or are being read.
        wants_words: Whether the first token has to be sent, and is not read from its row.
        """
        return Ask(
            self._source.room,
            self._source.reader,
            self._own.first_page + have,
            has_token=not may_wait,
            may_wait=may_wait,
            part=self._source.part,
            num_parts=self._source.num_parts,
            wants_words=wants_words,
        )

    def _read_all(self, talk: Conversation, offer: Offer, portion: Portion) -> FirstToken:
        first_page = self._own.first_page
        have, total = 0, len(self._own.pages)
        patience = self._patience
        is_known = False
        wants_words = not self._context.metadata.reads(offer, self._source.where)
        deadline = time.monotonic() + patience.bootstrap
        while True:
            news = talk.ask(self._ask(have, wants_words=wants_words), RoomNews)
            _check(news)
            coming = have + len(news.pages)
            if coming > total or (news.is_complete and coming < total):
                raise RoomFailed(
                    f"the prefill server computed a prompt of {first_page + coming} pages, "
                    f"this server expects {first_page + total}: both need the same tokenizer "
                    "and chat template"
                )
            if news.pages:
                self._reach("reading")
                if news.first_page != first_page + have:
                    raise RoomFailed(
                        "the prefill server answered for other pages than were asked for"
                    )
                self._read_pages(talk, offer, portion, news.pages, have)
                have = coming
            if news.row is not None and not wants_words:
                words = self._read_row(talk, offer, news.row)
                if words is not None:
                    return words
                wants_words = True
                continue
            if news.first_token is not None:
                self.metadata_bytes[CONTROL] += len(msgspec.msgpack.encode(news.first_token))
                return news.first_token
            now = time.monotonic()
            if news.pages or (news.is_known and not is_known):
                is_known = True
                deadline = now + patience.waiting
            elif now >= deadline:
                what = "has not computed more" if news.is_known else "does not know the request"
                raise RoomFailed(f"the prefill server {what} in time")

    def _read_pages(
        self,
        talk: Conversation,
        offer: Offer,
        portion: Portion,
        theirs: Sequence[int],
        have: int,
    ) -> None:
        """Read pages `theirs`, which follow the first `have` pages."""
        coming = have + len(theirs)
        own = self._own.pages[have:coming]
        if self._read_packed(talk, offer, portion, theirs, have):
            return
        self._read(talk, offer, portion.page_blocks(theirs, own), coming)
        if not portion.cuts:
            return
        buffer = self._take_buffer(talk, coming)
        index = self._reads.staging.index(own)
        sizes = [cut.page_bytes for cut in portion.cuts]
        for pieces in rounds(sizes, len(own), self._reads.staging.num_bytes):
            blocks = [
                block
                for piece in pieces
                for block in piece.blocks(buffer.address, portion.cuts[piece.place].address, theirs)
            ]
            self._read(talk, offer, blocks, coming)
            buffer.unpack(portion.cuts, pieces, index)
        self._reads.give_back(buffer)

    def _read_packed(
        self, talk: Conversation, offer: Offer, portion: Portion, theirs: Sequence[int], have: int
    ) -> bool:
        """Read pages as `_read_pages`, packed by the prefill server. False: packing does not pay,
        or there is no memory for it soon; no page was read."""
        own = self._own.pages[have : have + len(theirs)]
        buffers = portion.buffers
        unit_bytes = min(offer.unit_bytes, self._reads.staging.num_bytes)
        link, most = self._context.link, max((one.page_bytes for one in buffers), default=0)
        if link is None or most > unit_bytes:
            return False
        num_blocks, num_bytes = portion.num_blocks(theirs, own), portion.page_bytes * len(own)
        if not (buffers and link.packing_pays(num_blocks, num_bytes, unit_bytes)):
            return False
        source, number = self._source, self._num_packings
        self._num_packings += 1
        first = Pack(
            source.room,
            source.reader,
            source.part,
            number,
            [buffer.address for buffer in buffers],
            self._own.first_page + have,
            len(own),
            unit_bytes,
        )
        packed = PackedRead(
            first,
            offer.session_id,
            buffers,
            own,
            talk=talk,
            reads=self._reads,
            waiting=self._patience.waiting,
        )
        started = time.monotonic()
        # The patience is the time of a read without packing, so waiting in vain at most doubles the
        # time.
        has_come = packed.run(link.direct_s(num_blocks, num_bytes))
        self.read_seconds += time.monotonic() - started
        return has_come

    def _take_buffer(self, talk: Conversation, have: int) -> StagingBuffer:
        deadline = time.monotonic() + self._patience.waiting
        while time.monotonic() < deadline:
            buffer = self._reads.take(POLL_S)
            if buffer is not None:
                return buffer
            _check(talk.keep_alive(self._ask(have, may_wait=False), RoomNews))
        seconds = f"{self._patience.waiting:g} s"
        raise RoomFailed(f"no memory for pages of ranks with other heads was free in {seconds}")

    def _read_row(self, talk: Conversation, offer: Offer, row: int) -> FirstToken | None:
        """Read the first token from its row; None: it has to be sent."""
        alive = self._ask(len(self._own.pages), may_wait=False)
        words = self._row_read.run(
            offer,
            row,
            self._source.room,
            self._source.where,
            lambda: _check(talk.keep_alive(alive, RoomNews)),
        )
        self.metadata_bytes[TRANSPORT] += self._row_read.num_bytes
        return words

    def _read_state(
        self, talk: Conversation, offer: Offer, portion: Portion, first_token: FirstToken
    ) -> None:
        """Read the recurrent state after the prompt, which is ready with the first token."""
        theirs, own = first_token.state_slot, self._own.state
        if (theirs is None) != (own is None):
            raise RoomFailed("the prefill server has not sent the slot of the recurrent state")
        if theirs is not None and own is not None:
            self._read(talk, offer, portion.state_blocks(theirs, own), len(self._own.pages))

    def _read(self, talk: Conversation, offer: Offer, blocks: Sequence[Block], have: int) -> None:
        """Args:
        have: Pages that are there after the read.
        """
        if not blocks:
            return
        started = time.monotonic()
        transfer = self._reads.begin(offer.session_id, blocks)
        alive = self._ask(have, may_wait=False)
        try:
            self._reads.finish(transfer, lambda: _check(talk.keep_alive(alive, RoomNews)))
        finally:
            self.read_seconds += time.monotonic() - started


def _check(news: RoomNews | None) -> None:
    if news is not None and news.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {news.failure}")
