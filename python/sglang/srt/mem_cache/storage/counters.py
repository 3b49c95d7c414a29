"""What a backend counts. Any thread; a lock is held for the additions only."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from sglang.srt.mem_cache.storage.types import CacheOutcome


class StorageCounters:
    """Pages and bytes that moved, and how every page that was asked for ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, direction: str, outcomes: Iterable[CacheOutcome], page_bytes: int) -> None:
        """Count one call's pages.

        Args:
            direction: `get` or `set`.
            outcomes: One a page.
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
        """Count something else."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts so far; those that never happened are absent, but for the pages and bytes."""
        zero = {f"{way}_{unit}": 0 for way in ("get", "set") for unit in ("pages", "bytes")}
        with self._lock:
            return zero | dict(self._counts)
