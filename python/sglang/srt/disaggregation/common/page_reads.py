"""Reads in flight of one part of a prompt, and their staging buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sglang.srt.disaggregation.common.conversation import POLL_S, RoomFailed
from sglang.srt.disaggregation.common.staging import Staging, StagingBuffer
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)


class Mover(Protocol):
    """The part of the Transfer Engine that a room uses; see `MooncakeTransferEngine.begin`."""

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer: ...


class PageReads:
    """Reads of pages. Used by the thread of the part.

    Args:
        mover: The transport.
        staging: Staging buffers of the rank.
        timeout: Seconds for each read.

    Attributes:
        num_bytes: Bytes read so far.
    """

    def __init__(self, mover: Mover, staging: Staging, timeout: float) -> None:
        self.staging = staging
        self.num_bytes = 0
        self._mover = mover
        self._timeout = timeout
        self._under_way: list[Transfer] = []
        self._buffers: list[StagingBuffer] = []
        """Staging buffers that were taken."""

    def begin(self, session_id: str, blocks: Sequence[Block]) -> Transfer:
        """Begin a read. Raises RoomFailed."""
        try:
            transfer = self._mover.begin(session_id, TransferOp.READ, blocks, timeout=self._timeout)
        except TransferError as error:
            raise RoomFailed(f"reading from the prefill server failed: {error}") from error
        self._under_way.append(transfer)
        return transfer

    def has_come(self, transfer: Transfer, timeout: float) -> bool:
        """Wait at most `timeout` seconds; return whether all bytes are there. Raises RoomFailed if
        the read has failed."""
        if not transfer.wait(timeout):
            if transfer.is_left:
                raise RoomFailed(
                    f"reading from the prefill server failed, and cannot end: {transfer.error}"
                )
            return False
        self._under_way.remove(transfer)
        self.num_bytes += sum(block.length for block in transfer.blocks)
        if transfer.error is not None:
            raise RoomFailed(f"reading from the prefill server failed: {transfer.error}")
        if not transfer.is_done:
            raise RoomFailed(
                f"the prefill server's pages could not be read within {self._timeout:g} s, or it "
                "refuses their addresses"
            )
        return True

    def finish(self, transfer: Transfer, stay: Callable[[], None]) -> None:
        """Wait until all bytes are there; raises RoomFailed.

        Args:
            stay: Called repeatedly meanwhile; may raise RoomFailed.
        """
        while not self.has_come(transfer, POLL_S):
            stay()

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
        for transfer in self._under_way:
            transfer.abandon()

    def settle(self) -> bool:
        """Wait until all reads have ended, and give all buffers back. False: a read never ends."""
        have_settled = [transfer.wait() for transfer in self._under_way]
        if not all(have_settled):
            return False
        for buffer in list(self._buffers):
            self.give_back(buffer)
        return True
