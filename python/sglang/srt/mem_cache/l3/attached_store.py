"""One attached store: its guarded client, and the two threads that use it.

    prefetch thread   asks how far the store reaches into a prompt, and reads those pages
    backup thread     writes the pages of nodes

The scheduler thread puts operations into the queues of `reads` and `writes`, and looks at their
fields; it never calls the store while requests run. Every operation ends, whatever the store does:
its fields have its progress, and `guard.available` is false while asking for more is pointless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.mem_cache.l3.guarded_store import Connect, GuardedStore
from sglang.srt.mem_cache.l3.prefetch_cost import RateEstimate
from sglang.srt.mem_cache.l3.storage_reads import StorageReads
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.l3.storage_writes import StorageWrites
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 5.0
"""Time for calls under way to return, and again for the client to close."""


class AttachedStore:
    """Owns the guarded client and the two threads.

    Args:
        connect: Makes the client with its pools registered. Called again after failures where there
            is no client yet.
        backend: Name of the backend.
        config: Extra config that the backend was given.
        settings: The engine's own part of it.
        page_size: Tokens.
        page_bytes: Bytes of a page in all host pools.
        pages_per_read: Most pages of one get, which a hanging call keeps in the host pools.
        metrics: Metrics of the tiers.
        pools: How the pages of the model's pools map to objects.

    Attributes:
        guard: The client, and what protects the engine from it.
        reads: Queue and work of the prefetch thread.
        writes: Queue and work of the backup thread.
        threshold_pages: Shorter hits are not read.
        read_rate: Speed of reads on this rank. The prefetch thread adds measurements.
        prefill_rate: Speed of prefills on this rank. The scheduler thread adds measurements.

    Raises:
        StorageUnavailable: The first `connect` failed, and `settings` do not allow that; or the
            system has no thread left.
        ValueError: The configuration cannot work.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        backend: str,
        config: Mapping[str, Any],
        settings: StorageSettings,
        page_size: int,
        page_bytes: int,
        pages_per_read: int,
        metrics: HiCacheMetrics,
        pools: StoredPools,
    ) -> None:
        self.backend = backend
        self.config = config
        self.settings = settings
        self.threshold_pages = settings.threshold_pages(page_size)
        self.read_rate, self.prefill_rate = RateEstimate(), RateEstimate()
        self.guard = GuardedStore(
            connect,
            pools=pools,
            pass_prefix_keys=settings.pass_prefix_keys,
            metrics=metrics,
            degrade=settings.on_unreachable is OnUnreachable.DEGRADE,
        )
        self.reads = StorageReads(
            self.guard,
            page_size=page_size,
            page_bytes=page_bytes,
            pages_per_read=pages_per_read,
            threshold_pages=self.threshold_pages,
            rate=self.read_rate,
        )
        self.writes = StorageWrites(self.guard, page_size=page_size, page_bytes=page_bytes)
        self._threads = [
            threading.Thread(target=self.reads.run, name="hicache-prefetch", daemon=True),
            threading.Thread(target=self.writes.run, name="hicache-backup", daemon=True),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise StorageUnavailable(f"no thread for L3: {error}") from None

    def close(self) -> bool:
        """End the threads and the client, within seconds. Any thread, while nothing is under way.

        False if a call to the client hangs, so that it stays open, or if it failed to close.
        """
        self.reads.queue.put(None)
        self.writes.queue.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads) or self.guard.is_calling:
            logger.warning("a storage call is stuck; its client is left to the end of the process")
            return False
        return self.guard.close(_CLOSE_TIMEOUT_S)
