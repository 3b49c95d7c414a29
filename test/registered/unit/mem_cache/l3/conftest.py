"""A bench with a hanging store, whose waits are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang.srt.mem_cache.l3 import guarded_store, storage_writes
from sglang.test.hanging_store import STUCK_S, HangingBench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingBench]:
    monkeypatch.setattr(guarded_store, "_STUCK_AFTER_S", STUCK_S)
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    made = HangingBench()
    yield made
    made.store.probe_gate.set()
    assert made.io.close()
