"""Receives a shard of a prompt: what a rank of a decode server reads from one rank of a prefill
server.

The decode server reads; no other server writes into its memory. So its pages are free again as soon
as its own reads have ended, even if the prefill server has failed. While it reads, it goes on
asking: the prefill server keeps the pages only for readers that ask, and a missing answer fails the
request before the transport gives up.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from sglang.srt.disaggregation.common.conversation import (
    Cancellation,
    Conversation,
    RoomFailed,
    cannot_serve,
)
from sglang.srt.disaggregation.common.geometry import Portion
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.page_reader import OwnSlots, PageReader, Source
from sglang.srt.disaggregation.common.protocol import (
    Ask,
    FirstToken,
    GiveUp,
    Hello,
    Offer,
    Received,
    Released,
    RoomNews,
)
from sglang.srt.disaggregation.common.transfer_context import TransferContext

logger = logging.getLogger(__name__)

STEPS: Final = ("asking", "reading", "confirming")
"""Steps of a prompt in which tests inject a failure."""


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
        self._reader: PageReader | None = None
        """Set once it is settled what to read."""
        self._row_read = context.metadata.row_read(context.mover, self._patience.waiting)
        self._session_id: str | None = None
        """The rank's session, which is kept."""
        self._cancelled = cancelled
        self._fails_at = fails_at
        self._ended = threading.Event()
        self._returned = threading.Event()
        self.metadata: FirstToken | None = None
        """The metadata, set before `has_ended` if the whole shard was received."""
        self.metadata_bytes = {CONTROL: 0, TRANSPORT: 0}
        """Bytes of the received first token, by the way that it came."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of pages and states that were read."""
        return 0 if self._reader is None else self._reader.num_bytes

    @property
    def read_seconds(self) -> float:
        """Seconds during which reads were in flight, or pages were packed for them."""
        return 0.0 if self._reader is None else self._reader.seconds

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
        has_settled = self._reader is None or self._reader.settle()
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
                if self._reader is not None:
                    self._reader.abandon()
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
        self._reader = PageReader(
            source,
            self._own,
            self._context,
            talk=talk,
            offer=offer,
            portion=portion,
            stay=functools.partial(self._stay, talk),
        )
        first_token = self._read_all(talk, offer, self._reader)
        self._read_state(self._reader, first_token)
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

    def _read_all(self, talk: Conversation, offer: Offer, reader: PageReader) -> FirstToken:
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
                reader.read(news.pages, have)
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

    def _read_row(self, talk: Conversation, offer: Offer, row: int) -> FirstToken | None:
        """Read the first token from its row; None: it has to be sent."""
        stay = functools.partial(self._stay, talk, len(self._own.pages))
        words = self._row_read.run(offer, row, self._source.room, self._source.where, stay)
        self.metadata_bytes[TRANSPORT] += self._row_read.num_bytes
        return words

    def _read_state(self, reader: PageReader, first_token: FirstToken) -> None:
        """Read the recurrent state after the prompt, which is ready with the first token."""
        theirs, own = first_token.state_slot, self._own.state
        if (theirs is None) != (own is None):
            raise RoomFailed("the prefill server has not sent the slot of the recurrent state")
        if theirs is not None and own is not None:
            reader.read_state(theirs, own)

    def _stay(self, talk: Conversation, have: int) -> None:
        """Show that this server is alive; raises RoomFailed if the prefill server has failed.

        Args:
            have: Pages that are there, or are being read.
        """
        _check(talk.keep_alive(self._ask(have, may_wait=False), RoomNews))


def _check(news: RoomNews | None) -> None:
    if news is not None and news.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {news.failure}")
