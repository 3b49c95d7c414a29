"""A bench with a hanging store, for which time passes as it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rigs.stores.hanging_store import HangingBench
from sglang.srt.mem_cache.l3 import storage_writes, store_calls


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingBench]:
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    made = HangingBench()
    monkeypatch.setattr(store_calls, "time", made.clock)
    yield made
    made.store.probe_gate.set()
    made.store.goes_on.set()
    assert made.io.close()
