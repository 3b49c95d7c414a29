"""A transfer between two engines: blocks, outcomes, errors, and the plan of its calls. No I/O.

The transport moves few large requests faster than many small ones, over a few connections per peer.
Neighbouring blocks are merged up to a size that still keeps all connections busy, and larger blocks
are cut at that size. A call moves a batch of requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sglang.srt.constants import MIB

REQUEST_BYTES: Final = 16 * MIB
"""Most bytes of a request if several are in flight at once. Mooncake's rate grows up to about this
size."""
BATCH_REQUESTS: Final = 512
"""Most requests of one call. Two such calls fit into a peer's budget."""
MAX_SLICES: Final = 1024
"""Most slices in flight: half of the number that breaks the transport, by measurement."""
BATCH_BYTES: Final = 256 * MIB
"""Most bytes of one call over a network. A call times out after two minutes even if it makes
progress; at `LEAST_RATE` this size is fast enough."""
LEAST_RATE: Final = 3e6
"""Least bytes per second of a peer that makes progress: 90 s for a call of `BATCH_BYTES`."""
COPY_BYTES: Final = 256 * MIB
"""Most bytes of a request that is one copy between devices."""
COPIES_BYTES: Final = 8192 * MIB
"""Most bytes of a call with such requests. The transport is idle between two calls."""


class TransferOp(Enum):
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
    NOT_SENT = "not sent"
    """Not all of its bytes were sent, and no more will be."""
    IN_FLIGHT = "in flight"
    """The transport may still access the memory on both sides, so it must not be reused."""
    DONE = "done"
    FAILED = "failed"
    """The peer refused the block: its address is outside the peer's registered memory. Parts may
    have been transferred; no more will be."""


class TransferError(RuntimeError):
    """A transfer failed completely or in part. No block of the transfer is in flight any more."""


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

    Attributes:
        error: Error that ended the transfer early; None: no error, or it has not ended.
        is_settled: True if no block is in flight, and none will be.
    """

    def __init__(self, blocks: Sequence[Block], on_settled: Callable[[], None]) -> None:
        """Args:
        blocks: The blocks to move.
        on_settled: Called once, in any thread, when no block is in flight any more.
        """
        self.blocks = blocks
        self.error: Exception | None = None
        self.is_settled = False
        self._on_settled = on_settled
        self._outcomes = [BlockOutcome.NOT_SENT] * len(blocks)
        self._abandoned = False
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
        return all(outcome is BlockOutcome.DONE for outcome in self._outcomes)

    @property
    def is_left(self) -> bool:
        """True if blocks stay in flight until this process ends; `error` has the reason."""
        return self._ended.is_set() and not self.is_settled

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end. Returns True if the transfer is settled."""
        self._ended.wait(timeout)
        return self.is_settled

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
            is_first = not self.is_settled
            if is_first:
                self.error = error
                # An unexpected error in the worker leaves some in flight.
                self._outcomes = [
                    BlockOutcome.FAILED if outcome is BlockOutcome.IN_FLIGHT else outcome
                    for outcome in self._outcomes
                ]
                # Last, because callers read it without the lock before error and outcomes.
                self.is_settled = True
        if is_first:
            self._on_settled()
            self._ended.set()

    def leave(self, error: Exception) -> None:
        """Worker: record that blocks in flight stay so until this process ends."""
        with self._lock:
            self.error = error
        self._ended.set()

    def _mark(self, first: int, last: int, outcome: BlockOutcome) -> None:
        for index in range(first, last + 1):
            # A block that was cut into several requests has the worst of their outcomes.
            if self._outcomes[index] is not BlockOutcome.FAILED:
                self._outcomes[index] = outcome


class SliceBudget:
    """Limits the slices in flight of one user of Mooncake's transport. A counting semaphore whose
    callers take several permits at once, in order of arrival, so that small puts do not starve a
    large get. Any thread. A thread may release permits that another thread acquired.

    A slice is one buffer of one request. Mooncake's TCP transport fails or hangs for a minute if
    more than 2,048 slices are in flight to a peer, and the connection stays broken. Each engine
    object and each store client has its own transport and therefore its own budget, see
    `docs/transports.md`, "Beside the store".
    """

    def __init__(self, capacity: int = MAX_SLICES) -> None:
        self.capacity = capacity
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self.in_flight = 0
        self.peak = 0
        """Largest number of slices held at the same time so far."""

    def acquire(self, slices: int, deadline: float | None = None) -> bool:
        """Wait for room for `slices`, and hold them until `release`. False: the deadline, in
        seconds of `time.monotonic()`, has passed. Raises ValueError if they can never fit: split
        the batch."""
        if not 0 <= slices <= self.capacity:
            raise ValueError(f"{slices} slices do not fit a budget of {self.capacity}")
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            has_room = self._condition.wait_for(
                lambda: self._waiting[0] is ticket and self.in_flight + slices <= self.capacity,
                timeout,
            )
            self._waiting.remove(ticket)
            if has_room:
                self.in_flight += slices
                self.peak = max(self.peak, self.in_flight)
            self._condition.notify_all()
            return has_room

    def release(self, slices: int) -> None:
        with self._condition:
            self.in_flight -= slices
            self._condition.notify_all()

    @contextmanager
    def hold(self, slices: int) -> Iterator[None]:
        """Context that waits for room for `slices`, and holds them inside. Raises like
        `acquire`."""
        self.acquire(slices)
        try:
            yield
        finally:
            self.release(slices)


@dataclass(slots=True)
class Request:
    """Contiguous bytes that belong to the blocks `first` to `last`."""

    local: int
    remote: int
    length: int
    first: int
    last: int


def merge_blocks(
    blocks: Sequence[Block], ranges: Sequence[object], most: int = REQUEST_BYTES
) -> list[Request]:
    """Requests for all blocks, in order.

    Args:
        blocks: The blocks to move.
        ranges: The registered range of each block; a request never spans two.
    """
    requests: list[Request] = []
    joined: object = None
    for index, (block, known) in enumerate(zip(blocks, ranges, strict=True)):
        if requests and known is joined:
            end = requests[-1]
            if (
                end.length + block.length <= most
                and end.local + end.length == block.local
                and end.remote + end.length == block.remote
            ):
                end.length += block.length
                end.last = index
                continue
        joined = known
        for offset in range(0, block.length, most):
            length = min(most, block.length - offset)
            local, remote = block.local + offset, block.remote + offset
            requests.append(Request(local, remote, length, index, index))
    return requests


@dataclass(slots=True)
class Batch:
    """Requests of one call, with the blocks `first` to `last`."""

    requests: list[Request]
    is_last_whole: bool = True
    """True if the batch has the end of its last block; otherwise the next batch continues the
    block."""

    @property
    def first(self) -> int:
        return self.requests[0].first

    @property
    def last(self) -> int:
        return self.requests[-1].last


def cut_batches(
    requests: Sequence[Request], most: int = BATCH_REQUESTS, most_bytes: int = BATCH_BYTES
) -> Iterator[Batch]:
    """Cut requests into batches for one call each, with at most `most` requests and
    `most_bytes`."""
    pending: list[Request] = []
    num_bytes = 0
    for request in requests:
        if pending and (len(pending) == most or num_bytes + request.length > most_bytes):
            yield Batch(pending, is_last_whole=pending[-1].last != request.first)
            pending, num_bytes = [], 0
        pending.append(request)
        num_bytes += request.length
    if pending:
        yield Batch(pending)


def one_by_one(batch: Batch) -> Iterator[Batch]:
    for single in cut_batches(batch.requests, most=1):
        if single.requests[0] is batch.requests[-1]:
            single.is_last_whole = batch.is_last_whole
        yield single


def split_merged(batch: Batch, blocks: Sequence[Block]) -> list[Batch]:
    """A batch for each block of a merged request; empty if the request has only one block."""
    if batch.first == batch.last:
        return []
    return [
        Batch([Request(block.local, block.remote, block.length, index, index)])
        for index, block in enumerate(blocks[batch.first : batch.last + 1], batch.first)
    ]
