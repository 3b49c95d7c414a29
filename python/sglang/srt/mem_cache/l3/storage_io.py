"""The scheduler's end of L3: two threads that talk to the store, and the queues to them.

    prefetch thread   asks how far the store reaches into a prompt, and reads those pages
    backup thread     writes the pages of nodes

The scheduler thread submits operations and looks at their fields; it never calls the store while
requests run. Whatever the store does, an operation's fields tell how far it came, and `available`
says whether it is worth asking for more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from sglang.srt.mem_cache.l3.fetch_worth import FetchWorth
from sglang.srt.mem_cache.l3.guarded_store import Connect, GuardedStore
from sglang.srt.mem_cache.l3.pool_parts import StoredPools
from sglang.srt.mem_cache.l3.storage_operation import (
    CheckOperation,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.l3.storage_reads import StorageReads
from sglang.srt.mem_cache.l3.storage_writes import StorageWrites
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 5.0
"""Time for calls under way to return, and again for the client to close."""


class StorageIO:
    """Owns the guarded store and the two threads.

    Args:
        connect: Makes the client with its pools registered. Raises StorageUnavailable. Called
            again after failures where there is no client yet.
        namespace: First part of every key.
        page_size: Tokens.
        page_bytes: Bytes of a page in all host pools.
        pages_per_read: Most pages of one get, which a hanging call keeps in the host pools.
        threshold_pages: Shorter hits are not read.
        pass_prefix_keys: Tell the backend the keys of the pages before.
        metrics: Counts what happened.
        pools: The pools beside the anchor; by default there are none.
        degrade: Go on without the store where it cannot be reached.

    Raises:
        StorageUnavailable: The first `connect` failed, and `degrade` is false; or the system has no
            thread left.
        ValueError: The configuration cannot work.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        namespace: str,
        page_size: int,
        page_bytes: int,
        pages_per_read: int,
        threshold_pages: int,
        pass_prefix_keys: bool,
        metrics: HiCacheMetrics,
        pools: StoredPools | None = None,
        degrade: bool = False,
    ) -> None:
        self.worth = FetchWorth()
        """Fed with reads here, and with prefills by the scheduler."""
        self.store = GuardedStore(
            connect,
            namespace=namespace,
            pools=pools or StoredPools(),
            pass_prefix_keys=pass_prefix_keys,
            metrics=metrics,
            degrade=degrade,
        )
        self.reads = StorageReads(
            self.store,
            page_size=page_size,
            page_bytes=page_bytes,
            pages_per_read=pages_per_read,
            threshold_pages=threshold_pages,
            metrics=metrics,
            worth=self.worth,
        )
        self.writes = StorageWrites(
            self.store, page_size=page_size, page_bytes=page_bytes, metrics=metrics
        )
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

    # ---- scheduler thread ------------------------------------------------------------------

    @property
    def storage(self) -> HiCacheStorage | None:
        """The client; None while there is none."""
        return self.store.client

    @property
    def available(self) -> bool:
        """False while a call is stuck, so that asking for more is pointless, and while the store
        is being cleared. Never blocks."""
        return self.store.available

    @property
    def backend_name(self) -> str | None:
        """Class name of the client; None while there is none."""
        return self.store.backend_name

    @property
    def is_open(self) -> bool:
        """True while the store is left alone after failures."""
        return self.store.is_open

    @property
    def reconnects(self) -> int:
        """How often the store came back: what it held before may be gone."""
        return self.store.reconnects

    def submit_prefetches(self, operations: Sequence[PrefetchOperation]) -> None:
        """Queue reads, which the store is asked about together. Each ends in any case; watch its
        `ended`."""
        self.reads.queue.put(operations)

    def submit_check(self, operation: CheckOperation) -> None:
        """Queue a question. It ends in any case; watch `operation.outcome`."""
        self.reads.queue.put(operation)

    def submit_backup(self, operation: StorageOperation) -> None:
        """Queue a write. It ends in any case; watch `operation.ended`."""
        self.writes.queue.put(operation)

    # ---- any thread, while nothing is under way --------------------------------------------

    def clear(self) -> None:
        """Remove this namespace's objects.

        Until it returns `available` is false, so that nothing is asked of the store meanwhile.
        Raises StorageUnavailable or ValueError, or whatever else the backend raises.
        """
        self.store.clear()

    def close(self) -> bool:
        """End the threads and the client, within seconds.

        False if the client is left behind, since a call to it hangs, or did not close.
        """
        self.reads.queue.put(None)
        self.writes.queue.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads) or self.store.is_calling:
            logger.warning("a storage call is stuck; its client is left to the end of the process")
            return False
        return self.store.close(_CLOSE_TIMEOUT_S)
