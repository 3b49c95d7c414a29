"""Reads of one part of a prompt that are under way, and staging buffers that they go through."""

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
    """Reads of pages, by the thread of the part.

    Args:
        mover: The transport.
        staging: Its buffers.
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
        """Those that were taken."""

    def begin(self, session_id: str, blocks: Sequence[Block]) -> Transfer:
        """Begin to read. Raises RoomFailed."""
        try:
            transfer = self._mover.begin(session_id, TransferOp.READ, blocks, timeout=self._timeout)
        except TransferError as error:
            raise RoomFailed(f"reading from the prefill server failed: {error}") from error
        self._under_way.append(transfer)
        return transfer

    def has_come(self, transfer: Transfer, timeout: float) -> bool:
        """Whether all bytes are there after at most `timeout` seconds; raises RoomFailed where they
        never will be."""
        if not transfer.wait(timeout):
            if transfer.is_left:
                raise RoomFailed("reading from the prefill server failed, and cannot end")
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
            stay: Called now and then; may raise RoomFailed.
        """
        while not self.has_come(transfer, POLL_S):
            stay()

    def take(self, timeout: float) -> StagingBuffer | None:
        """As `Staging.take`; `settle` gives it back at the latest."""
        buffer = self.staging.take(timeout)
        if buffer is not None:
            self._buffers.append(buffer)
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Nothing is read into it any more."""
        self._buffers.remove(buffer)
        buffer.give_back()

    def abandon(self) -> None:
        """Begin nothing more of what is under way."""
        for transfer in self._under_way:
            transfer.abandon()

    def settle(self) -> bool:
        """Wait until nothing is read any more, and give all buffers back. False: that is never."""
        have_settled = [transfer.wait() for transfer in self._under_way]
        if not all(have_settled):
            return False
        for buffer in list(self._buffers):
            self.give_back(buffer)
        return True
