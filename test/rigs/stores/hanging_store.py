"""A store that hangs, fails and answers as a test demands, and the threads in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
    StorageUnavailable,
)
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation
from sglang.srt.mem_cache.l3.storage_settings import StorageSettings
from sglang.srt.mem_cache.l3.storage_writes import StorageOperation
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode


class StandingClock:
    """Replaces the module `time`; time passes only when a test or its store says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """The current time in seconds."""
        return self.now

    def pass_too_long(self) -> None:
        """Advance the time by more than a call of the store may take."""
        self.now += 100.0


class HangingStore(HiCacheStorage):
    """Has every page and answers probes; a transfer of a page in `hangs` takes too long."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.goes_on = threading.Event()
        """Event that hanging transfers wait for."""
        self.goes_on.set()
        self.hangs: set[str] = set()
        self.raises = self.is_mute = False
        self.asked: list[list[str]] = []
        self.moved: object = None
        """Answer to transfers in place of the true one; None: the truth."""
        self.found: object = None
        """Answer to questions in place of the true one; None: the truth."""
        self.absent: set[str] = set()
        self.questions: list[int] = []
        """Number of prompts of each question."""
        self.probe_gate = threading.Event()
        self.probe_gate.set()

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        self.questions.append(len(prompts))
        if self.is_mute:
            raise StorageUnavailable("no answer")
        if self.found is not None:
            return self.found  # type: ignore[return-value]
        absent = {f"ns/{page}" for page in self.absent}
        return [PoolTransferResult(0 if absent & set(keys) else len(keys)) for keys in prompts]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        keys = transfers[0].keys or []
        self.asked.append([key.removeprefix("ns/") for key in keys])
        if isinstance(self.moved, BaseException):
            raise self.moved
        if self.moved is not None:
            return self.moved  # type: ignore[return-value]
        if not self.hangs & set(self.asked[-1]):
            return {"kv": [CacheOutcome.LANDED] * len(keys)}
        self.clock.pass_too_long()
        assert self.goes_on.wait(30)
        if self.raises:
            raise StorageUnavailable("timed out")
        return {"kv": [CacheOutcome.FAILED] * len(keys)}

    batch_set_v2 = batch_get_v2

    def probe(self) -> bool:
        return self.probe_gate.wait(30)

    def get(self, *args: object, **kwargs: object) -> torch.Tensor | None:
        raise NotImplementedError

    set = get  # type: ignore[assignment]

    def exists(self, key: str) -> bool:
        raise NotImplementedError


class HangingBench:
    """An `AttachedStore` on a hanging store, whose clock counts."""

    def __init__(self) -> None:
        self.store = HangingStore()
        self.clock = self.store.clock
        self.metrics = HiCacheMetrics(None)
        self.io = AttachedStore(
            lambda: self.store,
            backend="hanging", config={}, settings=StorageSettings(prefetch_threshold=1),
            page_size=1, page_bytes=64, pages_per_read=64, metrics=self.metrics,
            pools=StoredPools("ns"),
        )  # fmt: skip
        self.io.breaker._clock = self.clock.monotonic

    def read(self, *pages: str) -> CacheOutcome | None:
        """Read `pages` to the end; returns the outcome."""
        operation = self.submit(*pages)
        wait_for(lambda: operation.outcome is not None)
        return operation.outcome

    def submit(self, *pages: str) -> PrefetchOperation:
        operation = self.operation(*pages)
        self.io.reads.queue.put([operation])
        return operation

    def operation(self, *pages: str) -> PrefetchOperation:
        return PrefetchOperation(
            request_id="r", key=RadixKey([]), start=0,
            host_indices=torch.arange(len(pages)), hashes=[PageHash(page) for page in pages],
            prefix_hashes=[], deadline=0.0, epoch=0,
        )  # fmt: skip

    def write(self, *pages: str) -> CacheOutcome | None:
        """Write `pages` to the end; returns the outcome."""
        operation = self.begin_write(*pages)
        wait_for(lambda: operation.outcome is not None)
        return operation.outcome

    def begin_write(self, *pages: str) -> StorageOperation:
        operation = StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(len(pages)),
            hashes=[PageHash(page) for page in pages], prefix_hashes=[], after=None, epoch=0,
        )  # fmt: skip
        self.io.writes.queue.put(operation)
        return operation

    def count(self, call: str, outcome: str) -> float:
        """Pages whose `call` had this outcome."""
        pages: float = self.metrics.pages.labels(call, outcome)._value.get()
        return pages

    def let_the_pause_pass(self) -> None:
        """Let the breaker probe the store now, if it is open."""
        breaker = self.io.breaker
        with breaker._changed:
            if breaker.is_open:
                breaker._retry_at = self.clock.now
                breaker._changed.notify_all()

    def recover(self) -> None:
        """Let the breaker probe the store, which works."""
        self.let_the_pause_pass()
        wait_for(lambda: not self.io.breaker.is_open)


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
