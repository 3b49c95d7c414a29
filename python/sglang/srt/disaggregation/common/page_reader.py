"""Reads pages and states of one rank of a prefill server, by one of three strategies.

direct   from pool to pool; pages that follow one another on both sides are one block
staged   whole pages of a rank with other heads, into a buffer that the heads are copied from
packed   units into which the prefill server copies pages first; see `PackedRead`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.disaggregation.common.control_connection import (
    POLL_S,
    ControlConnection,
    RoomFailed,
)
from sglang.srt.disaggregation.common.geometry import ShardSlice
from sglang.srt.disaggregation.common.link_costs import LinkCosts
from sglang.srt.disaggregation.common.packed_read import PackedRead
from sglang.srt.disaggregation.common.protocol import KVLayout, Pack
from sglang.srt.disaggregation.common.staging import StagingBuffer, rounds
from sglang.srt.disaggregation.common.transfer_context import TransferContext
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)


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


class PageReader:
    """Reads pages and states of one rank. Used by the thread of the shard.

    Args:
        source: The rank.
        own: Place of the prompt in this server's pools.
        context: What all receivers of this rank share.
        connection: Connection to the rank.
        layout: Its layout, with the session for reads.
        shard_slice: The part of it to read.
        heartbeat: Called repeatedly while a read is in flight, with the number of pages that are
            there after it; may raise RoomFailed.

    Attributes:
        num_bytes: Bytes read so far.
        seconds: Seconds during which reads were in flight, or pages were packed for them.
    """

    def __init__(
        self,
        source: Source,
        own: OwnSlots,
        context: TransferContext,
        *,
        connection: ControlConnection,
        layout: KVLayout,
        shard_slice: ShardSlice,
        heartbeat: Callable[[int], None],
    ) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self.timeout = context.timeouts.waiting
        """Seconds for each read, for a buffer, and for a further unit of packed pages."""
        self.staging = context.staging
        self._engine = context.engine
        self._link = context.link
        self._source = source
        self._own = own
        self._connection = connection
        self._layout = layout
        self._shard_slice = shard_slice
        self._heartbeat = heartbeat
        self._num_packings = 0
        self._in_flight: list[Transfer] = []
        self._buffers: list[StagingBuffer] = []
        """Staging buffers that were taken."""

    # -- the strategies --------------------------------------------------------------------------

    def read(self, theirs: Sequence[int], have: int) -> None:
        """Read pages `theirs`, which follow the first `have` pages. Raises RoomFailed."""
        coming = have + len(theirs)
        own = self._own.pages[have:coming]
        if self._link is not None and self._read_packed(self._link, theirs, own, have):
            return
        self._read_blocks(self._shard_slice.page_blocks(theirs, own), coming)
        if self._shard_slice.cuts:
            self._read_staged(theirs, own, coming)

    def read_state(self, theirs: int, own: int) -> None:
        """Read the recurrent state in slot `theirs` into slot `own`. Raises RoomFailed."""
        self._read_blocks(self._shard_slice.state_blocks(theirs, own), len(self._own.pages))

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
        cuts, buffer = self._shard_slice.cuts, self._wait_for_buffer(coming)
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
        buffers, source = self._shard_slice.buffers, self._source
        unit_bytes = min(self._layout.unit_bytes, self.staging.num_bytes)
        if not buffers or max(one.page_bytes for one in buffers) > unit_bytes:
            return False
        num_blocks = self._shard_slice.num_blocks(theirs, own)
        num_bytes = self._shard_slice.page_bytes * len(own)
        if not link.packing_pays(num_blocks, num_bytes, unit_bytes):
            return False
        first = Pack(
            source.room,
            source.reader,
            source.part,
            self._num_packings,
            [buffer.address for buffer in buffers],
            self._own.first_page + have,
            len(own),
            unit_bytes,
        )
        self._num_packings += 1
        started = time.monotonic()
        # Wait at most as long as a read without packing takes: waiting in vain doubles the time.
        timeout = link.direct_s(num_blocks, num_bytes)
        is_read = PackedRead(first, buffers, own, connection=self._connection, reader=self).run(
            timeout
        )
        self.seconds += time.monotonic() - started
        return is_read

    def _wait_for_buffer(self, coming: int) -> StagingBuffer:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if (buffer := self.take(POLL_S)) is not None:
                return buffer
            self._heartbeat(coming)
        raise RoomFailed(
            f"no memory for pages of ranks with other heads was free in {self.timeout:g} s"
        )

    # -- reads in flight and their buffers -------------------------------------------------------

    def begin(self, blocks: Sequence[Block]) -> Transfer:
        """Begin a read. Raises RoomFailed."""
        try:
            transfer = self._engine.begin(
                self._layout.session_id, TransferOp.READ, blocks, timeout=self.timeout
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
        """Wait until all bytes are there; raises RoomFailed.

        Args:
            heartbeat: Called repeatedly meanwhile; may raise RoomFailed.
        """
        while not self.is_read(transfer, POLL_S):
            heartbeat()

    def take(self, timeout: float) -> StagingBuffer | None:
        """Take a buffer as `Staging.take` does; `settle` gives it back at the latest."""
        buffer = self.staging.take(timeout)
        if buffer is not None:
            self._buffers.append(buffer)
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Give back a buffer into which no read is in flight."""
        self._buffers.remove(buffer)
        buffer.give_back()

    def abandon(self) -> None:
        """Begin no further slices of the reads in flight."""
        for transfer in self._in_flight:
            transfer.abandon()

    def settle(self) -> bool:
        """Wait until all reads have ended, and give all buffers back. False: a read never ends."""
        have_settled = [transfer.wait() for transfer in self._in_flight]
        if not all(have_settled):
            return False
        for buffer in list(self._buffers):
            self.give_back(buffer)
        return True
