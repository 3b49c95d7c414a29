"""Runs one transfer in a worker thread, and records an outcome for each block.

A call of the transport has one code for all its requests, and returns at the first failure. After
an error, the worker first ends the requests that the call left in flight. Then it makes a new
connection (the old one may be broken, or lead to a dead process) and sends the requests one by one,
to find the ones that fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sglang.srt.distributed.device_communicators.engine_pool import PooledEngine
from sglang.srt.distributed.device_communicators.peer import (
    CallFailed,
    ConnectionGone,
    Peer,
)
from sglang.srt.distributed.device_communicators.transfer_plan import (
    Batch,
    Request,
    cut_batches,
    one_by_one,
    split_merged,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BatchFailed,
    BlockOutcome,
    Transfer,
    TransferError,
    TransferOp,
)

logger = logging.getLogger(__name__)

OnFailure = Callable[[PooledEngine, Batch, CallFailed], bool]
"""Handles a failed call. Returns False if there was not enough time for all of its requests."""


class TransferWorker:
    """Moves one transfer's requests to or from one peer."""

    def __init__(
        self,
        peer: Peer,
        op: TransferOp,
        transfer: Transfer,
        requests: Sequence[Request],
        deadline: float | None,
        batch_bytes: int,
    ) -> None:
        """Args:
        peer: The peer.
        op: The direction.
        transfer: Transfer that keeps the outcomes of the blocks.
        requests: Requests for all of its blocks.
        deadline: `time.monotonic()` seconds after which no request is begun; None: no deadline.
        batch_bytes: Most bytes of a call.
        """
        self._peer = peer
        self._op = op
        self._transfer = transfer
        self._requests = requests
        self._deadline = deadline
        self._batch_bytes = batch_bytes
        self._has_left = False
        """True if blocks stay in flight for good."""

    def run(self) -> None:
        """Move all requests that can begin in time. Never raises: errors go to the transfer."""
        error: Exception | None = None
        try:
            for batch in cut_batches(self._requests, most_bytes=self._batch_bytes):
                if not self._move(batch):
                    break
        except TransferError as known:
            error = known
        except Exception as unknown:
            logger.exception("a transfer with peer %s failed", self._peer.name)
            error = TransferError(f"{type(unknown).__name__}: {unknown}")
        if not self._has_left:
            self._transfer.settle(error)
            return
        assert error is not None, "a failure left them"
        logger.error(
            "%s; %d blocks stay in flight with peer %s until this process ends",
            error,
            len(self._transfer.in_flight),
            self._peer.name,
        )
        self._transfer.leave(error)

    def _move(self, batch: Batch) -> bool:
        """Move one batch. False: there was not enough time to begin it."""
        num_slices = len(batch.requests)
        # Connect first, to hold no budget while waiting for a peer's first answer.
        if self._peer.connect(self._deadline) is None:
            return False
        if not self._peer.budget.acquire(num_slices, self._deadline):
            return False
        try:
            return self._call(batch, self._split_batch)
        finally:
            self._peer.budget.release(num_slices)

    def _call(self, batch: Batch, on_failure: OnFailure) -> bool:
        engine = self._peer.connect(self._deadline)
        if engine is None or not self._begin(batch):
            return False
        try:
            self._peer.call(engine, self._op, batch.requests)
        except ConnectionGone:
            self._end(batch, BlockOutcome.NOT_SENT)
            return self._call(batch, on_failure)
        except CallFailed as failure:
            return on_failure(engine, batch, failure)
        self._end(batch, BlockOutcome.DONE)
        return True

    def _split_batch(self, engine: PooledEngine, batch: Batch, failure: CallFailed) -> bool:
        self._retire(engine, batch, failure)
        return all(self._call(single, self._split_request) for single in one_by_one(batch))

    def _split_request(self, engine: PooledEngine, single: Batch, failure: CallFailed) -> bool:
        """Repeat a refused request block by block, if it has several blocks."""
        if failure.is_stall or not self._peer.is_listening():
            self._retire(engine, single, failure)
        blocks = split_merged(single, self._transfer.blocks)
        self._end(single, BlockOutcome.NOT_SENT if blocks else BlockOutcome.FAILED)
        return all(self._call(block, self._split_request) for block in blocks)

    def _retire(self, engine: PooledEngine, batch: Batch, failure: CallFailed) -> None:
        """End the requests that a failed batch left in flight. Raises PeerError if the peer caused
        the failure, or if they cannot be ended."""
        has_ended = self._peer.retire(engine, failure)
        if has_ended:
            self._end(batch, BlockOutcome.NOT_SENT)
        self._has_left |= not has_ended
        error = self._peer.why_failed(engine, failure)
        if error is None and not has_ended:
            error = BatchFailed(
                self._peer.name,
                f"failed a batch of {failure.num_requests} requests ({failure}): it refuses an "
                "address, or broke the connection",
            )
        if error is not None:
            raise error

    def _begin(self, batch: Batch) -> bool:
        return self._transfer.begin(batch.first, batch.last, self._deadline)

    def _end(self, batch: Batch, outcome: BlockOutcome) -> None:
        self._transfer.end(batch.first, batch.last, outcome)
        if outcome is BlockOutcome.DONE and not batch.is_last_whole:
            self._transfer.end(batch.last, batch.last, BlockOutcome.NOT_SENT)
