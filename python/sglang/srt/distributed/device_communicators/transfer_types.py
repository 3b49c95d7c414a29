"""Types of a transfer between two engines: blocks, outcomes, errors.

Plain values and one handle, no I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class TransferOp(Enum):
    """Direction of a transfer."""

    WRITE = "write"
    """Bytes go to the peer. The transfer is done once the peer's memory has them."""
    READ = "read"


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are contiguous in both processes."""

    local: int
    """Address in this process, within a registered range."""
    remote: int
    """Address in the peer's process."""
    length: int
    """Bytes, at least one."""


class BlockOutcome(Enum):
    """Outcome of one block."""

    NOT_SENT = "not sent"
    """Not all of its bytes were sent, and no more will be."""
    IN_FLIGHT = "in flight"
    """The transport may still access the memory on both sides, so it must not be reused."""
    DONE = "done"
    FAILED = "failed"
    """The peer refused the block: its address is outside the peer's registered memory. Parts may
    have been transferred; no more will be."""


class TransferError(RuntimeError):
    """A transfer failed completely or in part. None of its blocks is in flight."""


class PeerError(TransferError):
    """A transfer failed because of the peer, not of the request."""

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"peer {peer} {what}")
        self.peer = peer


class PeerUnreachable(PeerError):
    """No process listens at the peer's address, or the connection broke: the peer ended or was
    replaced."""


class PeerStalled(PeerError):
    """The peer accepts connections but moves no bytes: it is stopped, or its network drops packets.

    `Transfer.outcomes` of the failed transfer names the blocks still in flight.
    """


class BatchFailed(PeerError):
    """A batch failed at a running peer, and cannot be repeated request by request, because its
    requests in flight cannot be ended."""


class UnknownRange(ValueError):
    """A local address is outside the registered ranges."""


class OverlappingRange(ValueError):
    """A range overlaps a registered one."""


class RangeInUse(RuntimeError):
    """A transfer in flight may still access the range."""


class RegistrationError(RuntimeError):
    """The transport refused to register memory."""


class Transfer:
    """The blocks of one call. The caller's thread and one worker thread share it.

    The worker takes one run of blocks after another (`begin`, `end`). The caller waits, and may
    abandon blocks that have not begun. Begun blocks stay in flight until the transport releases
    them.
    """

    def __init__(self, blocks: Sequence[Block], on_settled: Callable[[], None]) -> None:
        """Args:
        blocks: The blocks to move.
        on_settled: Called once, in any thread, when no block is in flight any more.
        """
        self.blocks = blocks
        self._on_settled = on_settled
        self._outcomes = [BlockOutcome.NOT_SENT] * len(blocks)
        self._error: Exception | None = None
        self._abandoned = False
        self._settled = False
        self._ended = threading.Event()
        """Set when the worker has ended, or its result no longer matters."""
        self._lock = threading.Lock()

    @property
    def outcomes(self) -> list[BlockOutcome]:
        """The current outcome of each block. Outcomes of blocks in flight may change."""
        with self._lock:
            return list(self._outcomes)

    @property
    def in_flight(self) -> list[int]:
        """Indices of the blocks whose memory must not be reused yet on either side."""
        return [i for i, outcome in enumerate(self.outcomes) if outcome is BlockOutcome.IN_FLIGHT]

    @property
    def is_done(self) -> bool:
        """True if all blocks have arrived."""
        return all(outcome is BlockOutcome.DONE for outcome in self.outcomes)

    @property
    def is_settled(self) -> bool:
        """True if no block is in flight, and none will be."""
        return self._settled

    @property
    def is_left(self) -> bool:
        """True if blocks stay in flight until this process ends; `error` has the reason."""
        return self._ended.is_set() and not self._settled

    @property
    def error(self) -> Exception | None:
        """Error that ended the transfer early; None: no error, or it has not ended."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end. Returns True if the transfer is settled."""
        self._ended.wait(timeout)
        return self._settled

    def abandon(self) -> None:
        """Begin no further blocks. Blocks in flight settle later."""
        with self._lock:
            self._abandoned = True
            is_over = BlockOutcome.IN_FLIGHT not in self._outcomes
        if is_over:
            self.settle()

    def begin(self, first: int, last: int, deadline: float | None) -> bool:
        """Worker: mark blocks `[first, last]` as in flight, before the transport gets them. False:
        the transfer was abandoned or the deadline has passed, so they must not be sent."""
        with self._lock:
            if self._abandoned or (deadline is not None and time.monotonic() >= deadline):
                return False
            self._mark(first, last, BlockOutcome.IN_FLIGHT)
            return True

    def end(self, first: int, last: int, outcome: BlockOutcome) -> None:
        """Worker: record that the transport has released blocks `[first, last]`."""
        with self._lock:
            self._mark(first, last, outcome)

    def settle(self, error: Exception | None = None) -> None:
        """Worker: record that no block is in flight any more. Only the first call has an effect."""
        with self._lock:
            is_first = not self._settled
            if is_first:
                self._error = error
                self._mark_all_ended()
                # Last, because callers read it without the lock before error and outcomes.
                self._settled = True
        if is_first:
            self._on_settled()
            self._ended.set()

    def leave(self, error: Exception) -> None:
        """Worker: record that blocks in flight stay so until this process ends."""
        with self._lock:
            self._error = error
        self._ended.set()

    def _mark_all_ended(self) -> None:
        """Mark blocks in flight as failed: an unexpected error in the worker leaves some."""
        self._outcomes = [
            BlockOutcome.FAILED if outcome is BlockOutcome.IN_FLIGHT else outcome
            for outcome in self._outcomes
        ]

    def _mark(self, first: int, last: int, outcome: BlockOutcome) -> None:
        for index in range(first, last + 1):
            # A block that was cut into several requests has the worst of their outcomes.
            if self._outcomes[index] is not BlockOutcome.FAILED:
                self._outcomes[index] = outcome
