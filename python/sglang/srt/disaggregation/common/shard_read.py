"""Reads a shard of a prompt: the part that one decode rank reads from one prefill rank.

The decode server polls the room while it reads: a prefill server keeps pages only for readers that
poll, and a missing answer fails the request before the transport gives up.

Pages are read by one of three strategies:

direct   from pool to pool; pages that follow one another on both sides are one block
staged   whole pages of a rank with other heads, into a buffer that the heads are copied from
packed   units into which the prefill server copies pages first; see `PackedRead`
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.geometry import NO_STATES, ShardSlice, StateSlots
from sglang.srt.disaggregation.common.metadata_reader import (
    CONTROL,
    TRANSPORT,
    MetadataReader,
    RowRead,
)
from sglang.srt.disaggregation.common.packing import PackedRead
from sglang.srt.disaggregation.common.room_checksums import Comparison, RoomChecksums
from sglang.srt.disaggregation.common.sessions import Engine, Sessions
from sglang.srt.disaggregation.common.staging import (
    LinkCosts,
    Staging,
    StagingBuffer,
    rounds,
    take_within,
)
from sglang.srt.disaggregation.control.control_client import (
    LINGER_S,
    POLL_S,
    ControlClient,
    RoomFailed,
)
from sglang.srt.disaggregation.control.protocol import (
    MAX_REASON_CHARS,
    GiveUp,
    KVLayout,
    Pack,
    Poll,
    Received,
    Released,
    RoomStatus,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.messages.first_token import FirstToken

logger = logging.getLogger(__name__)

STEPS: Final = ("asking", "reading", "confirming")
"""Steps of a prompt in which tests inject a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Place of a prompt in this server's pools.

    Attributes:
        pages: Pages for the prompt's pages from `first_page` on.
        first_page: Number of leading pages of the prompt that this server has already.
        states: Slots for the prompt's states.
    """

    pages: Sequence[int]
    first_page: int = 0
    states: StateSlots = NO_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReads:
    """State that all reads of a decode rank share. Any thread.

    Attributes:
        staging: Buffers for pages of ranks with other heads, and for packed pages.
        sessions: Sessions of all prefill servers.
        link: Costs that decide whether pages are packed; None: they are never packed.
    """

    engine: Engine
    staging: Staging
    checksums: RoomChecksums
    metadata: MetadataReader
    sessions: Sessions
    timeouts: Timeouts
    link: LinkCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a prompt, and its reader. Plain values.

    Attributes:
        reader: See `Reader`.
        where: Name of the prefill server, for errors.
        part: Index of this rank among the reader's ranks that ask the prefill rank.
        num_parts: Number of these.
        layout: Memory of the prefill rank.
        piece: The part of its pages that this rank reads.
    """

    room: int
    reader: str
    where: str
    part: int
    num_parts: int
    layout: KVLayout
    piece: ShardSlice
    own: OwnSlots


class ShardRead:
    """Reads the shard of one prefill rank. One thread calls `run`; any thread may read the
    attributes.

    Args:
        shared: Its sessions have entered the shard's.
        client: Asks the prefill rank; its room is cancelled once the prompt has failed. It is
            closed if the shard fails.
        on_failure: Fails the prompt with this reason, maybe long before `has_ended`.
        fails_at: Step of `STEPS` that fails, for tests.

    Attributes:
        session_id: The session that is read from.
        metadata: The metadata, set before `has_ended` if the whole shard was received.
        metadata_bytes: Bytes of the received first token, by the way that it came.
        num_bytes: Bytes of pages and states read so far.
        checked: Pages and states by the outcome of their check; see `Comparison`.
        seconds: Seconds during which reads were in flight, or pages were packed for them.
        has_ended: True once no read into the pages is in flight.
        has_settled: True after `run` once no read is in flight, also of metadata.
        timeout: Seconds for each read, for a buffer, and for a further unit of packed pages.
    """

    def __init__(
        self,
        shard: Shard,
        shared: SharedReads,
        client: ControlClient,
        on_failure: Callable[[str], None],
        fails_at: str | None = None,
    ) -> None:
        self.metadata: FirstToken | None = None
        self.metadata_bytes = {CONTROL: 0, TRANSPORT: 0}
        self.num_bytes = 0
        self.seconds = 0.0
        self.checked: Counter[str] = Counter()
        self.has_ended = self.has_settled = False
        self.timeout = shared.timeouts.waiting
        self.staging = shared.staging
        self.client = client
        self.session_id = shard.layout.session_id
        self._shard = shard
        self._shared = shared
        self._on_failure = on_failure
        self._fails_at = fails_at
        self._num_packings = 0
        self._in_flight: list[Transfer] = []
        self._buffers: list[StagingBuffer] = []
        self._row_read: RowRead | None = None
        self._theirs: list[int] = []
        self._checksums: list[list[bytes]] = []
        self._state_checksums: list[bytes] = []

    def run(self) -> None:
        """Read the shard. Never raises. `has_ended` is true afterwards, unless the transport never
        lets go of the pages."""
        try:
            self.metadata = self._read_shard()
        except RoomFailed as error:
            self._fail(str(error), error)
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._fail(f"receiving the prompt failed: {type(error).__name__}: {error}", error)
        self.has_settled = self._settle()

    def _fail(self, why: str, error: Exception) -> None:
        self._on_failure(why)
        for transfer in self._in_flight:
            transfer.abandon()
        give_up([self.client], self._shard.room, self._shard.reader, str(error))

    def _settle(self) -> bool:
        """Wait until all reads have ended, and give back what was taken for them. False: the
        transport never lets go of something."""
        have_settled = [transfer.wait() for transfer in self._in_flight]
        has_settled = all(have_settled)
        if has_settled:
            for buffer in list(self._buffers):
                self.give_back(buffer)
            self.has_ended = True
        else:
            logger.error(
                "room %d: its pages are lost, since the transport does not let go of them",
                self._shard.room,
            )
        if self._row_read is not None:
            has_settled = self._row_read.settle() and has_settled
        return has_settled

    # -- the conversation ------------------------------------------------------------------------

    def _read_shard(self) -> FirstToken:
        shard, own = self._shard, self._shard.own
        self._fail_at("asking")
        first_token = self._read_pages()
        theirs = StateSlots(first_token.state_slot, first_token.request_row)
        if [slot is None for slot in theirs] != [slot is None for slot in own.states]:
            raise RoomFailed("the prefill server has not sent the slots of the prompt's states")
        if theirs != NO_STATES:
            # States are complete once the first token is known.
            self._read_blocks(shard.piece.state_blocks(theirs, own.states), len(own.pages))
        self._verify(theirs)
        self._fail_at("confirming")
        received = Received(shard.room, shard.reader, shard.part)
        if not self.client.ask(received, Released).was_held:
            raise RoomFailed("the prefill server let go of the pages while they were read")
        return first_token

    def _verify(self, their_states: StateSlots) -> None:
        """Compare what was read with its checksums; read once more what differs. Raises
        RoomFailed if it differs again."""
        own, check, names = self._shard.own, self._shared.checksums, self._shard.piece.whole_pools
        chosen, has_state = list(range(len(own.pages))), their_states != NO_STATES
        for attempt in ("first", "second"):
            mine = [own.pages[at] for at in chosen]
            pages = check.compare_pages(names, mine, [self._checksums[at] for at in chosen])
            state = Comparison()
            if has_state:
                state = check.compare_state(names, own.states, self._state_checksums)
            self.checked += pages.outcomes + state.outcomes
            if not pages.damaged and not state.damaged:
                return
            what = (
                f"{len(pages.damaged)} pages and {len(state.damaged)} states of pools "
                f"{', '.join(sorted(pages.pools | state.pools))} differ from their checksums"
            )
            logger.error(
                "room %d from %s, %s read: %s", self._shard.room, self._shard.where, attempt, what
            )
            if attempt == "second":
                raise RoomFailed(f"reading from the prefill server failed: {what}")
            chosen, has_state = [chosen[at] for at in pages.damaged], bool(state.damaged)
            again = [own.pages[at] for at in chosen]
            blocks = self._shard.piece.page_blocks([self._theirs[at] for at in chosen], again)
            if has_state:
                blocks += self._shard.piece.state_blocks(their_states, own.states)
            self._read_blocks(blocks, len(own.pages))

    def _fail_at(self, step: str) -> None:
        if step == self._fails_at:
            raise RoomFailed(f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {step} failed")

    def _read_pages(self) -> FirstToken:
        """Read pages as they are computed; return the metadata, which comes after the last."""
        first_page = self._shard.own.first_page
        have, total = 0, len(self._shard.own.pages)
        timeouts = self._shared.timeouts
        is_known = False
        layout, where, metadata = self._shard.layout, self._shard.where, self._shared.metadata
        wants_inline = metadata.rows is None or not metadata.reads(layout, where)
        deadline = time.monotonic() + timeouts.unknown_room
        while True:
            question = self._poll(have, wants_inline=wants_inline)
            status = self.client.ask(question, RoomStatus)
            _check(status)
            coming = have + len(status.pages)
            if len(status.checksums) not in (0, len(status.pages)):
                raise RoomFailed("the prefill server answered with checksums of other pages")
            is_complete = status.first_token is not None or status.row is not None
            if coming > total or (is_complete and coming < total):
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
                self._read(status.pages, have)
                have = coming
                self._theirs += status.pages
                self._checksums += status.checksums or [[]] * len(status.pages)
            self._state_checksums = status.state_checksums
            if status.row is not None and not wants_inline:
                self._row_read = row = RowRead(metadata, self._shared.engine, self.timeout)
                first_token = row.run(
                    layout, status.row, where, self._shard.room, lambda: self._heartbeat(total)
                )
                self.metadata_bytes[TRANSPORT] += row.num_bytes
                if first_token is not None:
                    return first_token
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

    def _heartbeat(self, have: int) -> None:
        """Show that this server is alive; raises RoomFailed if the prefill server has failed.

        Args:
            have: Pages that are there, or are being read.
        """
        _check(self.client.keep_alive(self._poll(have, may_wait=False), RoomStatus))

    def _poll(self, have: int, *, may_wait: bool = True, wants_inline: bool = False) -> Poll:
        return Poll(
            self._shard.room,
            self._shard.reader,
            self._shard.own.first_page + have,
            has_token=not may_wait,
            may_wait=may_wait,
            part=self._shard.part,
            num_parts=self._shard.num_parts,
            wants_inline=wants_inline,
        )

    # -- the strategies --------------------------------------------------------------------------

    def _read(self, theirs: Sequence[int], have: int) -> None:
        """Read pages `theirs`, which follow the first `have` pages. Raises RoomFailed."""
        coming = have + len(theirs)
        own = self._shard.own.pages[have:coming]
        link = self._shared.link
        if link is not None and self._read_packed(link, theirs, own, have):
            return
        self._read_blocks(self._shard.piece.page_blocks(theirs, own), coming)
        if self._shard.piece.cuts:
            self._read_staged(theirs, own, coming)

    def _read_blocks(self, blocks: Sequence[Block], coming: int) -> None:
        if not blocks:
            return
        started = time.monotonic()
        transfer = self.begin(blocks)
        try:
            self.finish(transfer, lambda: self._heartbeat(coming))
        finally:
            self.seconds += time.monotonic() - started

    def _read_staged(self, theirs: Sequence[int], own: Sequence[int], coming: int) -> None:
        cuts, what = self._shard.piece.cuts, "memory for pages of ranks with other heads"
        buffer = take_within(self.timeout, self.take, lambda: self._heartbeat(coming), what)
        index = self.staging.index(own)
        sizes = [cut.page_bytes for cut in cuts]
        for pieces in rounds(sizes, len(own), self.staging.num_bytes):
            blocks = [
                block
                for piece in pieces
                for block in piece.blocks(buffer.address, cuts[piece.place].address, theirs)
            ]
            self._read_blocks(blocks, coming)
            buffer.unpack(cuts, pieces, index)
        self.give_back(buffer)

    def _read_packed(
        self, link: LinkCosts, theirs: Sequence[int], own: Sequence[int], have: int
    ) -> bool:
        """Read pages packed by the prefill server. False: packing does not pay, or there is no
        memory for it soon; no page was read."""
        buffers = self._shard.piece.buffers
        unit_bytes = min(self._shard.layout.unit_bytes, self.staging.num_bytes)
        if not buffers or max(one.page_bytes for one in buffers) > unit_bytes:
            return False
        num_blocks = self._shard.piece.num_blocks(theirs, own)
        num_bytes = self._shard.piece.page_bytes * len(own)
        if not link.packing_pays(num_blocks, num_bytes, unit_bytes):
            return False
        first = Pack(
            self._shard.room,
            self._shard.reader,
            self._shard.part,
            self._num_packings,
            [buffer.address for buffer in buffers],
            self._shard.own.first_page + have,
            len(own),
            unit_bytes,
        )
        self._num_packings += 1
        started = time.monotonic()
        # Wait at most as long as a read without packing takes: waiting in vain doubles the time.
        timeout = link.direct_s(num_blocks, num_bytes)
        packed = PackedRead(first, buffers, own, client=self.client, reads=self)
        is_read = packed.run(timeout)
        self.seconds += time.monotonic() - started
        return is_read

    # -- reads in flight and their buffers -------------------------------------------------------

    def begin(self, blocks: Sequence[Block]) -> Transfer:
        """Begin a read. Raises RoomFailed."""
        try:
            transfer = self._shared.engine.begin(
                self.session_id, TransferOp.READ, blocks, timeout=self.timeout
            )
        except TransferError as error:
            raise RoomFailed(f"reading from the prefill server failed: {error}") from error
        self._in_flight.append(transfer)
        return transfer

    def is_read(self, transfer: Transfer, timeout: float) -> bool:
        """Wait at most `timeout` seconds; return whether all bytes are there. Raises RoomFailed if
        the read has failed."""
        if not transfer.wait(timeout):
            if transfer.is_left:
                raise RoomFailed(
                    f"reading from the prefill server failed, and cannot end: {transfer.error}"
                )
            return False
        self._in_flight.remove(transfer)
        self.num_bytes += sum(block.length for block in transfer.blocks)
        if transfer.error is not None:
            raise RoomFailed(f"reading from the prefill server failed: {transfer.error}")
        if not transfer.is_done:
            raise RoomFailed(
                f"the prefill server's pages could not be read within {self.timeout:g} s, or it "
                "refuses their addresses"
            )
        return True

    def finish(self, transfer: Transfer, heartbeat: Callable[[], None]) -> None:
        """Wait until all bytes are there. Calls `heartbeat` meanwhile. Both raise RoomFailed."""
        while not self.is_read(transfer, POLL_S):
            heartbeat()

    def take(self, timeout: float) -> StagingBuffer | None:
        """Take a buffer as `Staging.take` does; it is given back at the end at the latest."""
        buffer = self.staging.take(timeout)
        if buffer is not None:
            self._buffers.append(buffer)
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Give back a buffer into which no read is in flight."""
        self._buffers.remove(buffer)
        buffer.give_back()


def _check(status: RoomStatus | None) -> None:
    if status is not None and status.failure is not None:
        raise RoomFailed(f"the prefill server ended the request: {status.failure}")


def give_up(clients: Sequence[ControlClient], room: int, reader: str, why: str) -> None:
    """Tell prefill ranks that the prompt is not wanted any more, and close the connections.

    Waits for their answers, at most `LINGER_S`. A connection that is closed with an unread answer
    is reset, and a rank that writes to it then never reads the message.
    """
    for client in clients:
        client.begin(GiveUp(room, reader, why[:MAX_REASON_CHARS]))
    until = time.monotonic() + LINGER_S
    for client in clients:
        with contextlib.suppress(RoomFailed):
            while (left := until - time.monotonic()) > 0 and client.receive_answer(left) is None:
                pass
        client.close(until)
