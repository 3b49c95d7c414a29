"""Groups operations on L3 into calls to the store. Pure, the same on all ranks.

A call takes as much CPU time as ten more pages of 64 KB in it, or 500 more keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from sglang.srt.mem_cache.l3.storage_operation import PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.storage.types import CacheOutcome

PAGES_PER_CALL: Final = 64
"""Pages of one get or put: enough to hide the round trip, few enough to cut a read soon."""
_STUCK_SHARE: Final = 8
"""A get is given at most one in this many pages of L2, since it keeps them while it hangs."""
_PROMPTS_PER_QUESTION: Final = 16
_PAGES_PER_QUESTION: Final = 1024
"""All prompts of a question together; a single prompt may have more."""


def pages_per_read(host_pages: int) -> int:
    """Pages of one get where L2 has `host_pages` pages."""
    return max(1, min(PAGES_PER_CALL, host_pages // _STUCK_SHARE))


def prompts_per_question(
    operations: Sequence[PrefetchOperation],
) -> Iterator[list[PrefetchOperation]]:
    """Prompts in groups, in their order; one call asks the store about a group."""
    group: list[PrefetchOperation] = []
    pages = 0
    for operation in operations:
        pages_then = pages + len(operation.hashes)
        if group and (len(group) == _PROMPTS_PER_QUESTION or pages_then > _PAGES_PER_QUESTION):
            yield group
            group, pages = [], 0
        group.append(operation)
        pages += len(operation.hashes)
    yield group


def next_group(queued: Sequence[StorageOperation]) -> list[StorageOperation]:
    """The first writes of `queued` that can go in one call; at least one.

    A write joins where the pages before its own are in the store, or are written before it in
    the same call.
    """
    group: list[StorageOperation] = []
    pages = 0
    for operation in queued:
        pages += len(operation.hashes)
        may_join = operation.after in group or not lacks_predecessor(operation)
        if pages > PAGES_PER_CALL or not may_join:
            break
        group.append(operation)
    return group or list(queued[:1])


def lacks_predecessor(operation: StorageOperation) -> bool:
    """Whether the pages before these are not in the store, so that no reader could use these."""
    return operation.after is not None and operation.after.outcome is not CacheOutcome.LANDED
