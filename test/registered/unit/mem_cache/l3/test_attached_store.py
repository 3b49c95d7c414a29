"""The threads of L3: none is left behind where the system has too few."""

from __future__ import annotations

import threading

import pytest

from rigs.stores.hanging_store import HangingStore, wait_for
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.storage_settings import StorageSettings
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.storage.types import StorageUnavailable
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class ClosingStore(HangingStore):
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("missing", ["hicache-prefetch", "hicache-backup"])
def test_without_a_thread_for_l3_its_client_is_closed(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    store, start, before = ClosingStore(), threading.Thread.start, set(threading.enumerate())

    def start_unless_missing(thread: threading.Thread) -> None:
        if thread.name == missing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_missing)
    with pytest.raises(StorageUnavailable, match="no thread for L3: can't start new thread"):
        AttachedStore(
            lambda: store,
            backend="closing",
            config={},
            settings=StorageSettings(),
            pools=StoredPools("n"),
            page_size=1,
            page_bytes=8,
            pages_per_read=4,
            metrics=HiCacheMetrics(None),
        )
    assert store.closed == 1
    wait_for(lambda: set(threading.enumerate()) <= before)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
