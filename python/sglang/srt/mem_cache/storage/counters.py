"""Counters of a storage backend. Any thread; a lock guards the additions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from sglang.srt.mem_cache.storage.types import CacheOutcome


class StorageCounters:
    """Pages and bytes moved, and the outcomes of all pages that did not land."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, direction: str, outcomes: Iterable[CacheOutcome], page_bytes: int) -> None:
        """Count the pages of one call.

        Args:
            direction: `get` or `set`.
            outcomes: One for each page.
            page_bytes: Bytes of a page without its trailer.
        """
        by_outcome = Counter(outcomes)
        landed = by_outcome[CacheOutcome.LANDED]
        with self._lock:
            self._counts[f"{direction}_pages"] += landed
            self._counts[f"{direction}_bytes"] += landed * page_bytes
            for outcome, count in by_outcome.items():
                if not outcome:
                    self._counts[f"{direction}_{outcome.value}_pages"] += count

    def bump(self, name: str, amount: int = 1) -> None:
        """Add `amount` to another counter."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters. Pages, bytes and `set_objects` are always present, other counters only if
        not zero. `set_objects` are the objects that this backend has written: pages that landed
        and were not in the store before."""
        zero = {f"{way}_{unit}": 0 for way in ("get", "set") for unit in ("pages", "bytes")}
        with self._lock:
            counts = zero | dict(self._counts)
        counts["set_objects"] = counts["set_pages"] - counts.get("set_present_pages", 0)
        return counts
