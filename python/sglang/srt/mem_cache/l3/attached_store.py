"""One attached store and the threads that use it.

    prefetch thread   asks how far the store reaches into a prompt, and reads those pages
    backup thread     writes the pages of nodes
    probe thread      probes a store that has failed; see `CircuitBreaker`
    presence thread   looks which servers share the namespace; rank 0 has it

The scheduler thread puts operations into the queues of `reads` and `writes`, and looks at their
fields; it never calls the store while requests run. Every operation ends, whatever the store does.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from sglang.srt.mem_cache.l3.storage_reads import NO_RETRIES, LookUpRetries, StorageReads
from sglang.srt.mem_cache.l3.storage_writes import StorageWrites
from sglang.srt.mem_cache.l3.store_calls import StoreCalls
from sglang.srt.mem_cache.l3.store_presence import StorePresence
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.threads import leave_cores_to_model

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 5.0
"""Time for calls under way to return, and again for the client to close."""


@dataclass(eq=False, repr=False, kw_only=True)
class AttachedStore(StoreCalls):
    """A store with the threads that call it.

    Args:
        retries: Repetitions of look-ups that missed.
        presence: Counts the servers that share the namespace; None: another rank does. The others:
            see `StoreCalls`.

    Attributes:
        reads: Queue and work of the prefetch thread.
        writes: Queue and work of the backup thread.

    Raises:
        StorageUnavailable: The system has no thread left; or see `StoreCalls`.
        ValueError: The configuration cannot work.
    """

    retries: LookUpRetries = NO_RETRIES
    presence: StorePresence | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reads, self.writes = StorageReads(self, self.retries), StorageWrites(self)
        self._threads = [
            threading.Thread(target=self.reads.run, name="hicache-prefetch", daemon=True),
            threading.Thread(target=self.writes.run, name="hicache-backup", daemon=True),
            threading.Thread(target=self._run_probes, name="hicache-probe", daemon=True),
        ]
        self._closing = threading.Event()
        if self.presence is not None:
            looks = partial(self.presence.run, self._client_at_rest, self._closing)
            self._threads.append(
                threading.Thread(target=looks, name="hicache-presence", daemon=True)
            )
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise StorageUnavailable(f"no thread for L3: {error}") from None

    def _run_probes(self) -> None:
        """Body of the probe thread."""
        leave_cores_to_model()
        self.breaker.run()

    def _client_at_rest(self) -> HiCacheStorage | None:
        """The client; None while the store fails."""
        return self.client if self.available and not self.breaker.is_open else None

    def close(self) -> bool:
        """End the threads and the client, within seconds.

        False if a call to the client hangs, so that it stays open, or if it failed to close.
        """
        self._closing.set()
        self.breaker.end()
        self.reads.queue.put(None)
        self.writes.queue.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads) or self.is_calling:
            logger.warning("a storage call is stuck; its client is left to the end of the process")
            return False
        client, self.client = self.client, None
        if client is None:
            return True
        closing = BackgroundCall("hicache-close", client.close)
        if not closing.wait(_CLOSE_TIMEOUT_S):
            logger.warning("an L3 backend hangs in close(); it is left to the end of the process")
            return False
        return closing.error is None
