"""One transfer, from its requests to an outcome for each block. Runs in a worker thread.

A call of the transport has one code for all its requests. Where that is an error, the connection
is made anew once (it may have been broken by an earlier call, or lead to a process that is gone);
what fails then too is halved until the blocks are found that the peer refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang.srt.distributed.device_communicators.engine_pool import PooledEngine
from sglang.srt.distributed.device_communicators.peer import CallFailed, Peer, TransfersLeft
from sglang.srt.distributed.device_communicators.transfer_plan import (
    Batch,
    Request,
    cut_batches,
    split_request,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BlockOutcome,
    PeerUnreachable,
    Transfer,
    TransferError,
    TransferOp,
)

logger = logging.getLogger(__name__)


class TransferWorker:
    """Moves one transfer's requests to or from one peer."""

    def __init__(
        self,
        peer: Peer,
        op: TransferOp,
        transfer: Transfer,
        requests: Sequence[Request],
        deadline: float | None,
    ) -> None:
        """Args:
        peer: The other side.
        op: Which way.
        transfer: Its blocks' outcomes are kept here.
        requests: All of its blocks.
        deadline: On the clock of `time.monotonic`: nothing is begun after it; None: none.
        """
        self._peer = peer
        self._op = op
        self._transfer = transfer
        self._requests = requests
        self._deadline = deadline

    def run(self) -> None:
        """Move all that is begun in time. Never raises: the transfer has the error."""
        error: Exception | None = None
        try:
            for batch in cut_batches(self._requests):
                if not self._move(batch):
                    break
        except TransfersLeft as left:
            logger.error(
                "%s: %d blocks stay in flight with peer %s until this process ends",
                left,
                len(self._transfer.in_flight),
                self._peer.name,
            )
            self._transfer.leave(TransferError(f"peer {self._peer.name}: {left}"))
            return
        except TransferError as known:
            error = known
        except Exception as unknown:
            logger.exception("a transfer with peer %s failed", self._peer.name)
            error = TransferError(f"{type(unknown).__name__}: {unknown}")
        self._transfer.settle(error)

    def _move(self, batch: Batch) -> bool:
        """False: there was no time left to begin it."""
        engine = self._peer.connect(self._deadline)
        num_slices = len(batch.requests)
        if engine is None or not self._peer.budget.acquire(num_slices, self._deadline):
            return False
        has_let_go = True
        try:
            return self._move_over(engine, batch)
        except TransfersLeft:
            has_let_go = False
            raise
        finally:
            if has_let_go:
                self._peer.budget.release(num_slices)

    def _move_over(self, engine: PooledEngine, batch: Batch) -> bool:
        if not self._begin(batch):
            return False
        try:
            self._peer.call(engine, self._op, batch.requests)
        except CallFailed:
            self._end(batch, BlockOutcome.NOT_SENT)
        except TransferError:
            self._end(batch, BlockOutcome.FAILED)
            raise
        else:
            self._end(batch, BlockOutcome.DONE)
            return True
        self._peer.drop(engine)
        return self._move_anew(batch)

    def _move_anew(self, batch: Batch) -> bool:
        """The same over a new connection, and one by one what that does not move either."""
        engine = self._peer.connect(self._deadline)
        if engine is None or not self._begin(batch):
            return False
        try:
            refused = self._move_in_halves(engine, batch.requests)
        except TransferError:
            self._end(batch, BlockOutcome.FAILED)
            raise
        for request in refused:
            self._transfer.fail(request.first)
        self._end(batch, BlockOutcome.DONE)
        if len(refused) >= len(batch.requests) and not self._peer.is_listening():
            self._peer.drop(engine)
            raise PeerUnreachable(self._peer.name, "ended during a transfer")
        return True

    def _move_in_halves(self, engine: PooledEngine, requests: Sequence[Request]) -> list[Request]:
        """The requests, of one block each, that the peer refuses; the others have arrived."""
        try:
            self._peer.call(engine, self._op, requests)
        except CallFailed:
            if len(requests) == 1:
                parts = split_request(requests[0], self._transfer.blocks)
                if len(parts) == 1:
                    return parts
                return self._move_in_halves(engine, parts)
            middle = len(requests) // 2
            return self._move_in_halves(engine, requests[:middle]) + self._move_in_halves(
                engine, requests[middle:]
            )
        return []

    def _begin(self, batch: Batch) -> bool:
        return self._transfer.begin(batch.first, batch.last, self._deadline)

    def _end(self, batch: Batch, outcome: BlockOutcome) -> None:
        self._transfer.end(batch.first, batch.last, outcome)
        if outcome is BlockOutcome.DONE and not batch.is_last_whole:
            self._transfer.end(batch.last, batch.last, BlockOutcome.NOT_SENT)
