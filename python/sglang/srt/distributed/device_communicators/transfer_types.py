"""Words of a transfer between two engines: what is asked, how each block ended, what goes wrong.

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
    """Bytes go to the peer; the transfer is done once the peer's memory has them."""
    READ = "read"


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are contiguous on both sides."""

    local: int
    """Address in this process, within a registered range."""
    remote: int
    """Address in the peer's process."""
    length: int
    """Bytes, at least one."""


class BlockOutcome(Enum):
    """Outcome of one block."""

    NOT_SENT = "not sent"
    """Not all of it was sent, and nothing of it moves or will move."""
    IN_FLIGHT = "in flight"
    """The transport may still access both sides' memory: neither may be used for anything else."""
    DONE = "done"
    FAILED = "failed"
    """The peer refuses it: its address is outside the peer's registered memory. Parts may have
    moved; nothing moves any more."""


class TransferError(RuntimeError):
    """A transfer did not happen, or not all of it. Nothing of it is in flight."""


class PeerError(TransferError):
    """The peer, not the request, is at fault."""

    def __init__(self, peer: str, what: str) -> None:
        super().__init__(f"peer {peer} {what}")
        self.peer = peer


class PeerUnreachable(PeerError):
    """Nothing listens at the peer's address, or it breaks off: it ended or was replaced."""


class PeerStalled(PeerError):
    """The peer accepts connections and moves nothing: it is stopped, or its network drops packets.

    What it left in flight is told by `Transfer.outcomes` of the transfer that met it.
    """


class UnknownRange(ValueError):
    """A local address outside the registered ranges."""


class OverlappingRange(ValueError):
    """A range that shares bytes with one that is registered already."""


class RangeInUse(RuntimeError):
    """A range that a transfer in flight may still access."""


class RegistrationError(RuntimeError):
    """The transport refused to register memory."""


class Transfer:
    """One call's blocks under way. The caller's thread and one worker thread share it.

    The worker takes runs of blocks one after the other (`begin`, `end`); the caller waits, and may
    abandon what was not begun. What was begun stays in flight until the transport has let go.
    """

    def __init__(self, blocks: Sequence[Block], on_settled: Callable[[], None]) -> None:
        """Args:
        blocks: The blocks to move.
        on_settled: Called once, when nothing is in flight any more; in any thread.
        """
        self.blocks = blocks
        self._on_settled = on_settled
        self._outcomes = [BlockOutcome.NOT_SENT] * len(blocks)
        self._error: Exception | None = None
        self._abandoned = False
        self._settled = False
        self._ended = threading.Event()
        """The worker has ended, or its work no longer matters."""
        self._lock = threading.Lock()

    @property
    def outcomes(self) -> list[BlockOutcome]:
        """One a block, as of now. Those in flight still change."""
        with self._lock:
            return list(self._outcomes)

    @property
    def in_flight(self) -> list[int]:
        """Indices of the blocks whose memory must not be reused yet, on either side."""
        return [i for i, outcome in enumerate(self.outcomes) if outcome is BlockOutcome.IN_FLIGHT]

    @property
    def is_done(self) -> bool:
        """Whether all blocks have arrived."""
        return all(outcome is BlockOutcome.DONE for outcome in self.outcomes)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight any more, and nothing will be."""
        return self._settled

    @property
    def is_left(self) -> bool:
        """Whether what is in flight stays so for as long as this process lives."""
        return self._ended.is_set() and not self._settled

    @property
    def error(self) -> Exception | None:
        """Why it ended early; None where it did not, or has not ended."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; whether it is settled then."""
        self._ended.wait(timeout)
        return self._settled

    def abandon(self) -> None:
        """Send nothing more. What is in flight stays so, and settles later."""
        with self._lock:
            self._abandoned = True
            is_over = BlockOutcome.IN_FLIGHT not in self._outcomes
        if is_over:
            self.settle()

    def begin(self, first: int, last: int, deadline: float | None) -> bool:
        """Worker: blocks `[first, last]` go to the transport now. False: leave it at that."""
        with self._lock:
            if self._abandoned or (deadline is not None and time.monotonic() >= deadline):
                return False
            self._mark(first, last, BlockOutcome.IN_FLIGHT)
            return True

    def end(self, first: int, last: int, outcome: BlockOutcome) -> None:
        """Worker: the transport has let go of blocks `[first, last]`."""
        with self._lock:
            self._mark(first, last, outcome)

    def settle(self, error: Exception | None = None) -> None:
        """Worker: nothing is in flight any more. The first call counts."""
        with self._lock:
            is_first, self._settled = not self._settled, True
            if is_first:
                self._error = error
                self._mark_all_ended()
        if is_first:
            self._on_settled()
            self._ended.set()

    def leave(self) -> None:
        """Worker: what is in flight stays so for as long as this process lives."""
        self._ended.set()

    def _mark_all_ended(self) -> None:
        """A worker that met the unexpected leaves blocks as they were begun."""
        self._outcomes = [
            BlockOutcome.FAILED if outcome is BlockOutcome.IN_FLIGHT else outcome
            for outcome in self._outcomes
        ]

    def _mark(self, first: int, last: int, outcome: BlockOutcome) -> None:
        for index in range(first, last + 1):
            # A block that was cut into several requests is no better than the worst of them.
            if self._outcomes[index] is not BlockOutcome.FAILED:
                self._outcomes[index] = outcome
