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

from sglang.srt.disaggregation.base.first_token import FirstToken
from sglang.srt.disaggregation.common.control_connection import (
    Cancellation,
    ControlConnection,
    RoomFailed,
    cannot_serve,
)
from sglang.srt.disaggregation.common.geometry import ShardSlice
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.page_reader import OwnSlots, PageReader, Source
from sglang.srt.disaggregation.common.protocol import (
    GiveUp,
    Hello,
    KVLayout,
    Poll,
    Received,
    Released,
    RoomStatus,
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
        slice_of: Returns what to read of a rank with this layout. May wait for the layouts of
            other ranks; raises RoomFailed.
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
        slice_of: Callable[[KVLayout], ShardSlice],
        on_failure: Callable[[str], None],
        cancelled: Cancellation,
        fails_at: str | None = None,
    ) -> None:
        self._source = source
        self._own = own
        self._context = context
        self._slice_of = slice_of
        self._on_failure = on_failure
        self._timeouts = context.timeouts
        self._reader: PageReader | None = None
        """Set once it is settled what to read."""
        self._row_read = context.metadata.row_read(context.mover, self._timeouts.waiting)
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
        with ControlConnection(
            source.endpoint,
            self._context.secret,
            self._timeouts,
            self._cancelled,
            source.instance_id,
        ) as connection:
            try:
                return self._converse(connection)
            except Exception as error:
                if self._reader is not None:
                    self._reader.abandon()
                connection.tell(GiveUp(source.room, source.reader, str(error)[:500]))
                raise

    def _converse(self, connection: ControlConnection) -> FirstToken:
        source = self._source
        self._reach("asking")
        layout = connection.ask(Hello(), KVLayout)
        refusal = self._context.geometry.why_not(layout)
        if refusal is not None:
            raise cannot_serve(source.where, refusal)
        shard_slice = self._slice_of(layout)
        self._session_id = self._context.sessions.enter(
            layout.session_id, layout.instance_id, source.endpoint
        )
        layout = msgspec.structs.replace(layout, session_id=self._session_id)
        self._reader = PageReader(
            source,
            self._own,
            self._context,
            connection=connection,
            layout=layout,
            shard_slice=shard_slice,
            stay=functools.partial(self._stay, connection),
        )
        first_token = self._read_all(connection, layout, self._reader)
        self._read_state(self._reader, first_token)
        self._reach("confirming")
        received = Received(source.room, source.reader, source.part)
        if not connection.ask(received, Released).was_held:
            raise RoomFailed("the prefill server let go of the pages while they were read")
        return first_token

    def _reach(self, step: str) -> None:
        if step == self._fails_at:
            raise RoomFailed(f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed")

    def _ask(self, have: int, *, may_wait: bool = True, wants_inline: bool = False) -> Poll:
        """Args:
        have: Pages that were read or are being read.
        wants_inline: Whether the first token has to be sent, and is not read from its row.
        """
        return Poll(
            self._source.room,
            self._source.reader,
            self._own.first_page + have,
            has_token=not may_wait,
            may_wait=may_wait,
            part=self._source.part,
            num_parts=self._source.num_parts,
            wants_inline=wants_inline,
        )

    def _read_all(
        self, connection: ControlConnection, layout: KVLayout, reader: PageReader
    ) -> FirstToken:
        first_page = self._own.first_page
        have, total = 0, len(self._own.pages)
        timeouts = self._timeouts
        is_known = False
        wants_inline = not self._context.metadata.reads(layout, self._source.where)
        deadline = time.monotonic() + timeouts.bootstrap
        while True:
            news = connection.ask(self._ask(have, wants_inline=wants_inline), RoomStatus)
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
            if news.row is not None and not wants_inline:
                words = self._read_row(connection, layout, news.row)
                if words is not None:
                    return words
                wants_inline = True
                continue
            if news.first_token is not None:
                self.metadata_bytes[CONTROL] += len(msgspec.msgpack.encode(news.first_token))
                return news.first_token
            now = time.monotonic()
            if news.pages or (news.is_known and not is_known):
                is_known = True
                deadline = now + timeouts.waiting
            elif now >= deadline:
                what = "has not computed more" if news.is_known else "does not know the request"
                raise RoomFailed(f"the prefill server {what} in time")

    def _read_row(
        self, connection: ControlConnection, layout: KVLayout, row: int
    ) -> FirstToken | None:
        """Read the first token from its row; None: it has to be sent."""
        stay = functools.partial(self._stay, connection, len(self._own.pages))
        words = self._row_read.run(layout, row, self._source.room, self._source.where, stay)
        self.metadata_bytes[TRANSPORT] += self._row_read.num_bytes
        return words

    def _read_state(self, reader: PageReader, first_token: FirstToken) -> None:
        """Read the recurrent state after the prompt, which is ready with the first token."""
        theirs, own = first_token.state_slot, self._own.state
        if (theirs is None) != (own is None):
            raise RoomFailed("the prefill server has not sent the slot of the recurrent state")
        if theirs is not None and own is not None:
            reader.read_state(theirs, own)

    def _stay(self, connection: ControlConnection, have: int) -> None:
        """Show that this server is alive; raises RoomFailed if the prefill server has failed.

        Args:
            have: Pages that are there, or are being read.
        """
        _check(connection.keep_alive(self._ask(have, may_wait=False), RoomStatus))


def _check(news: RoomStatus | None) -> None:
    if news is not None and news.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {news.failure}")
