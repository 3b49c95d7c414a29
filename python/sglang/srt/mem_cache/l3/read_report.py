"""Notes in the cache report of a request what a read from L3 brought to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.cache_report import CacheReport, Tier
from sglang.srt.mem_cache.storage.types import CacheOutcome

if TYPE_CHECKING:
    from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation


def report_read(
    report: CacheReport, read: PrefetchOperation, needed: int, page_size: int, cut: CacheOutcome
) -> None:
    """Note in `report` what `read` has brought. Scheduler's thread.

    Args:
        needed: Pages of the read that the request needed.
        page_size: Tokens.
        cut: Why the request leaves a read that goes on.
    """
    landed = read.progress.landed
    stored = read.start + min(needed, max(0, read.progress.hit)) * page_size
    report.storage = max(report.storage or 0, stored - report.on_arrival)
    reason: CacheOutcome | None = None
    if landed < needed:
        ending = _ending_of(read)
        reason = cut if ending is None else ending
        report.cut(Tier.STORAGE, read.start + landed * page_size, reason)
    if read.began:
        tokens = min(landed, needed) * page_size
        report.add_span("l3_read", read.began, read.ended or time.monotonic(), tokens, reason)


def _ending_of(read: PrefetchOperation) -> CacheOutcome | None:
    """Reason why a read brings no more than what has landed; None: it may bring more."""
    if read.is_cancelled:
        return CacheOutcome.OVERTAKEN
    if not read.progress.ended or read.outcome is None:
        return None
    if read.outcome is not CacheOutcome.LANDED:
        return read.outcome
    # All that the store has was read on this rank. Another rank may have got less.
    is_common = read.progress.landed == read.landed_pages
    return CacheOutcome.MISS if is_common else CacheOutcome.SHORT
