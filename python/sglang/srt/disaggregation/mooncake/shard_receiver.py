"""Receives a shard of a prompt: the part that one decode rank reads from one prefill rank.

The decode server reads, and no other server writes to its memory. Its pages are free as soon as its
own reads have ended, even if the prefill server has failed. It polls the room while it reads: a
prefill server keeps pages only for readers that poll, and a missing answer fails the request before
the transport gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.disaggregation.base.first_token import FirstToken
from sglang.srt.disaggregation.common.control_connection import (
    ControlConnection,
    RoomFailed,
    incompatible,
)
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT, RowRead
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

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.receiver import MooncakeKVReceiver

logger = logging.getLogger(__name__)

STEPS: Final = ("asking", "reading", "confirming")
"""Steps of a prompt in which tests inject a failure."""


class ShardReceiver:
    """Receives the shard of one prefill rank. One thread calls `run`; any thread may read the
    attributes.

    Args:
        receiver: The prompt. Its failure ends the shard, and a failure of the shard fails it, maybe
            long before `has_ended`.
        context: What all receivers of this rank share.
        source: The prefill rank.
        own: Place of the prompt in this server's pools.

    Attributes:
        metadata: The metadata, set before `has_ended` if the whole shard was received.
        metadata_bytes: Bytes of the received first token, by the way that it came.
        reader: Reads the pages; None: it is not settled yet what to read.
        fails_at: Step of `STEPS` that fails, for tests.
    """

    def __init__(
        self, receiver: MooncakeKVReceiver, context: TransferContext, source: Source, own: OwnSlots
    ) -> None:
        self.source = source
        self.metadata: FirstToken | None = None
        self.metadata_bytes = {CONTROL: 0, TRANSPORT: 0}
        self.reader: PageReader | None = None
        self.fails_at: str | None = None
        self._receiver = receiver
        self._own = own
        self._context = context
        self._row_read: RowRead | None = None
        self._session_id: str | None = None
        """The rank's session, which is kept."""
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """True once no read into the pages is in flight."""
        return self._ended.is_set()

    def run(self) -> None:
        """Receive the shard. Never raises. `has_ended` is true afterwards, unless the transport
        never lets go of the pages."""
        try:
            self.metadata = self._receive()
        except RoomFailed as error:
            self._receiver.fail(str(error))
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._receiver.fail(f"receiving the prompt failed: {type(error).__name__}: {error}")
        has_settled = self.reader is None or self.reader.settle()
        if has_settled:
            self._ended.set()
        else:
            logger.error(
                "room %d: its pages are lost, since the transport does not let go of them",
                self.source.room,
            )
        if self._row_read is not None:
            has_settled = self._row_read.settle() and has_settled
        if self._session_id is not None and has_settled:
            self._context.sessions.leave(self._session_id)

    def _receive(self) -> FirstToken:
        source, context = self.source, self._context
        with ControlConnection(
            source.endpoint,
            context.secret,
            context.timeouts,
            self._receiver.cancelled,
            source.instance_id,
        ) as connection:
            try:
                return self._read_shard(connection)
            except Exception as error:
                if self.reader is not None:
                    self.reader.abandon()
                connection.send(GiveUp(source.room, source.reader, str(error)[:500]))
                raise

    def _read_shard(self, connection: ControlConnection) -> FirstToken:
        source, context = self.source, self._context
        self._fail_at("asking")
        layout = connection.ask(Hello(), KVLayout)
        refusal = context.geometry.incompatibility(layout)
        if refusal is not None:
            raise incompatible(source.where, refusal)
        shard_slice = self._receiver.slice_for(self, layout)
        self._session_id = context.sessions.enter(
            layout.session_id, layout.instance_id, source.endpoint
        )
        layout = msgspec.structs.replace(layout, session_id=self._session_id)
        self.reader = reader = PageReader(
            source,
            self._own,
            context,
            connection=connection,
            layout=layout,
            shard_slice=shard_slice,
            heartbeat=lambda have: self._heartbeat(connection, have),
        )
        first_token = self._read_pages(connection, layout, reader)
        theirs, own = first_token.state_slot, self._own.state
        if (theirs is None) != (own is None):
            raise RoomFailed("the prefill server has not sent the slot of the recurrent state")
        if theirs is not None and own is not None:
            reader.read_state(theirs, own)  # It is ready with the first token.
        self._fail_at("confirming")
        received = Received(source.room, source.reader, source.part)
        if not connection.ask(received, Released).was_held:
            raise RoomFailed("the prefill server let go of the pages while they were read")
        return first_token

    def _fail_at(self, step: str) -> None:
        if step == self.fails_at:
            raise RoomFailed(f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed")

    def _read_pages(
        self, connection: ControlConnection, layout: KVLayout, reader: PageReader
    ) -> FirstToken:
        """Read pages as they are computed; return the metadata, which comes after the last."""
        first_page = self._own.first_page
        have, total = 0, len(self._own.pages)
        timeouts = self._context.timeouts
        is_known = False
        wants_inline = not self._context.metadata.reads(layout, self.source.where)
        deadline = time.monotonic() + timeouts.bootstrap
        while True:
            status = connection.ask(self._poll(have, wants_inline=wants_inline), RoomStatus)
            _check(status)
            coming = have + len(status.pages)
            if coming > total or (status.is_complete and coming < total):
                raise RoomFailed(
                    f"the prefill server computed a prompt of {first_page + coming} pages, "
                    f"this server expects {first_page + total}: both need the same tokenizer "
                    "and chat template"
                )
            if status.pages:
                self._fail_at("reading")
                if status.first_page != first_page + have:
                    raise RoomFailed(
                        "the prefill server answered for other pages than were asked for"
                    )
                reader.read(status.pages, have)
                have = coming
            if status.row is not None and not wants_inline:
                metadata = self._read_row(connection, layout, status.row)
                if metadata is not None:
                    return metadata
                wants_inline = True
                continue
            if status.first_token is not None:
                self.metadata_bytes[CONTROL] += len(msgspec.msgpack.encode(status.first_token))
                return status.first_token
            now = time.monotonic()
            if status.pages or (status.is_known and not is_known):
                is_known = True
                deadline = now + timeouts.waiting
            elif now >= deadline:
                what = "has not computed more" if status.is_known else "does not know the request"
                raise RoomFailed(f"the prefill server {what} in time")

    def _read_row(
        self, connection: ControlConnection, layout: KVLayout, row: int
    ) -> FirstToken | None:
        """Read the first token from its row; None: it has to be sent inline."""
        have = len(self._own.pages)
        self._row_read = read = RowRead(self._context)
        metadata = read.run(layout, row, self.source, lambda: self._heartbeat(connection, have))
        self.metadata_bytes[TRANSPORT] += read.num_bytes
        return metadata

    def _heartbeat(self, connection: ControlConnection, have: int) -> None:
        """Show that this server is alive; raises RoomFailed if the prefill server has failed.

        Args:
            have: Pages that are there, or are being read.
        """
        _check(connection.keep_alive(self._poll(have, may_wait=False), RoomStatus))

    def _poll(self, have: int, *, may_wait: bool = True, wants_inline: bool = False) -> Poll:
        """Args:
        have: Pages that were read or are being read.
        wants_inline: Whether the first token has to be sent, and is not read from its row.
        """
        return Poll(
            self.source.room,
            self.source.reader,
            self._own.first_page + have,
            has_token=not may_wait,
            may_wait=may_wait,
            part=self.source.part,
            num_parts=self.source.num_parts,
            wants_inline=wants_inline,
        )


def _check(status: RoomStatus | None) -> None:
    if status is not None and status.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {status.failure}")
