"""Plan of a transfer: blocks become requests, and requests become batches. Pure functions, any
thread.

The transport moves few large requests faster than many small ones, over a few connections per peer.
Neighbouring blocks are merged up to a size that still keeps all connections busy, and larger blocks
are cut at that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.memory_registry import MemoryRange
from sglang.srt.distributed.device_communicators.transfer_types import Block

REQUEST_BYTES: Final = 16 * MIB
"""Most bytes of a request if several are in flight at once. Mooncake's rate grows up to about this
size."""
BATCH_REQUESTS: Final = 512
"""Most requests of one call. Two such calls fit into a peer's budget."""
BATCH_BYTES: Final = 256 * MIB
"""Most bytes of one call over a network. A call times out after two minutes even if it makes
progress; at `LEAST_RATE` this size is fast enough."""
LEAST_RATE: Final = 3e6
"""Least bytes per second of a peer that makes progress: 90 s for a call of `BATCH_BYTES`."""
COPY_BYTES: Final = 256 * MIB
"""Most bytes of a request that is one copy between devices."""
COPIES_BYTES: Final = 8192 * MIB
"""Most bytes of a call with such requests. Nothing moves between two calls."""


@dataclass(slots=True)
class Request:
    """Contiguous bytes that belong to the blocks `first` to `last`."""

    local: int
    remote: int
    length: int
    first: int
    last: int


def merge_blocks(
    blocks: Sequence[Block], ranges: Sequence[MemoryRange], most: int = REQUEST_BYTES
) -> list[Request]:
    """Requests for all blocks, in order.

    Args:
        blocks: The blocks to move.
        ranges: The registered range of each block; a request never spans two.
        most: Most bytes of a request.
    """
    requests: list[Request] = []
    joined: MemoryRange | None = None
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
        requests.extend(_cut(index, block, most))
    return requests


def _cut(index: int, block: Block, most: int) -> Iterator[Request]:
    for offset in range(0, block.length, most):
        length = min(most, block.length - offset)
        yield Request(block.local + offset, block.remote + offset, length, index, index)


@dataclass(slots=True)
class Batch:
    """Requests of one call, with the blocks `first` to `last`."""

    requests: list[Request]
    is_last_whole: bool = True
    """True if the batch has the end of its last block; otherwise the next batch continues the
    block."""

    @property
    def first(self) -> int:
        """Index of the first block."""
        return self.requests[0].first

    @property
    def last(self) -> int:
        """Index of the last block."""
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
    """A batch for each request of `batch`."""
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
