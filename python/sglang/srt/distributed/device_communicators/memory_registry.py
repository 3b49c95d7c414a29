"""The registry of registered memory. Only its addresses may reach the transport.

Over TCP Mooncake accepts any address, and reads its memory or crashes.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    OverlappingRange,
    RangeInUse,
    UnknownRange,
)


@dataclass(slots=True, eq=False)
class MemoryRange:
    """Registered bytes `[start, end)`."""

    start: int
    end: int
    users: int = field(default=0)
    """Number of transfers that may still access the range."""


class MemoryRegistry:
    """Registered ranges, disjoint and sorted by address. Any thread."""

    def __init__(self) -> None:
        self._keep([])
        self._lock = threading.Lock()

    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of all registered ranges."""
        with self._lock:
            return [(known.start, known.end - known.start) for known in self._ranges]

    def add(self, ptrs: Sequence[int], lengths: Sequence[int]) -> None:
        """Add all ranges or none.

        Raises:
            ValueError: A length is below 1, an address is not positive, or the lists differ in
                length.
            OverlappingRange: Bytes are registered already, or occur twice.
        """
        if len(ptrs) != len(lengths):
            raise ValueError(f"{len(ptrs)} addresses with {len(lengths)} lengths")
        for ptr, length in zip(ptrs, lengths, strict=True):
            if length < 1 or ptr < 1:
                raise ValueError(f"cannot register {length} bytes at {ptr:#x}")
        new = [MemoryRange(ptr, ptr + length) for ptr, length in zip(ptrs, lengths, strict=True)]
        with self._lock:
            ranges = sorted([*self._ranges, *new], key=lambda one: one.start)
            for before, after in itertools.pairwise(ranges):
                if after.start < before.end:
                    raise OverlappingRange(
                        f"{after.end - after.start} bytes at {after.start:#x} overlap the "
                        f"registered range of {before.end - before.start} bytes at "
                        f"{before.start:#x}"
                    )
            self._keep(ranges)

    def remove(self, ptrs: Sequence[int]) -> None:
        """Remove all ranges or none.

        Raises:
            UnknownRange: No range begins at one of the addresses, or one occurs twice.
            RangeInUse: A transfer in flight may still access one.
        """
        with self._lock:
            if len(set(ptrs)) != len(ptrs):
                raise UnknownRange("a range occurs twice")
            for ptr in ptrs:
                known = self._at(ptr)
                if known is None or known.start != ptr:
                    raise UnknownRange(f"no registered range begins at {ptr:#x}")
                if known.users:
                    raise RangeInUse(
                        f"the range at {ptr:#x} is in use by {known.users} transfers; wait until "
                        "they are settled (Transfer.wait)"
                    )
            self._keep([known for known in self._ranges if known.start not in ptrs])

    def holds(self, ptr: int, length: int) -> bool:
        """True if these bytes are within one range."""
        with self._lock:
            known = self._at(ptr)
            return known is not None and ptr + length <= known.end

    def pin(self, blocks: Sequence[Block]) -> list[MemoryRange]:
        """Pin the range of each block until `unpin`, and return the ranges.

        Raises:
            UnknownRange: Not all bytes of a block are in one range; no range is pinned.
            ValueError: A block has no bytes, or a negative address at the peer.
        """
        with self._lock:
            ranges = []
            for index, block in enumerate(blocks):
                if block.length < 1 or block.remote < 0:
                    raise ValueError(
                        f"block {index}: {block.length} bytes at the peer's {block.remote}; a "
                        "block has at least one byte and no negative address"
                    )
                known = self._at(block.local)
                if known is None or block.local + block.length > known.end:
                    raise UnknownRange(
                        f"block {index}: {block.length} bytes at {block.local:#x} are not within "
                        "one registered range; register the memory first"
                    )
                ranges.append(known)
            for known in set(ranges):
                known.users += 1
            return ranges

    def unpin(self, ranges: Sequence[MemoryRange]) -> None:
        """Undo one `pin`."""
        with self._lock:
            for known in set(ranges):
                known.users -= 1

    def _at(self, address: int) -> MemoryRange | None:
        """The range that contains `address`."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ranges[index].end:
            return None
        return self._ranges[index]

    def _keep(self, ranges: list[MemoryRange]) -> None:
        self._ranges = ranges
        self._starts = [known.start for known in ranges]
