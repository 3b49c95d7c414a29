"""Writes of several nodes: which go in one call, and what a refused page takes down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from rigs.stores.hanging_store import HangingStore, wait_for
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.storage_settings import StorageSettings
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL, StorageOperation, next_group
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_a_write_goes_along_only_with_what_it_hangs_on() -> None:
    def operation(after: StorageOperation | None) -> StorageOperation:
        return StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(1),
            hashes=[PageHash("p")], prefix_hashes=[], after=after, epoch=0,
        )  # fmt: skip

    first, lost = operation(None), operation(None)
    lost.outcome = CacheOutcome.FAILED
    second, orphan = operation(first), operation(lost)
    assert next_group([first, second, orphan]) == [first, second]
    assert next_group([orphan, first]) == [orphan], "alone it finds out why"
    first.outcome = CacheOutcome.LANDED
    assert next_group([second, operation(None)])[0] is second


FIRST = "first"
"""A page whose write keeps the thread busy."""


class RecordingStore(HangingStore):
    """Keeps what is written beside `FIRST`; refuses what holds `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.refused: str | None = None
        self.before: list[list[str] | None] = []
        """Keys of the pages before those of each call; None: it got none."""

    def batch_set_v2(
        self, transfers: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, Any]:
        keys = [key.rsplit("/", 1)[-1] for key in transfers[0].keys]
        if keys == [FIRST]:
            assert self.goes_on.wait(30)
            return {"kv": [CacheOutcome.LANDED]}
        self.calls.append(keys)
        self.before.append(None if extra_info is None else extra_info.prefix_keys)
        assert len(transfers[0].host_indices) == len(keys)
        if self.refused not in keys:
            return {"kv": [CacheOutcome.LANDED] * len(keys)}
        good = keys.index(self.refused)
        rest = [CacheOutcome.SHORT] * (len(keys) - good - 1)
        return {"kv": [*[CacheOutcome.LANDED] * good, CacheOutcome.FAILED, *rest]}


def write_at_once(
    recording: tuple[RecordingStore, AttachedStore],
    chains: list[list[str]],
    above: Mapping[str, Sequence[str]] | None = None,
) -> list[StorageOperation]:
    """Queue one write a chain, behind a first that hangs until all are there; those of the same
    first letter follow each other, behind those of `above`. Returns them when all have ended."""
    store, io = recording
    store.goes_on.clear()
    operations: list[StorageOperation] = []
    for pages in [[FIRST], *chains]:
        before = [o for o in operations if o.hashes[0][0] == pages[0][0]]
        path = [
            *map(PageHash, (above or {}).get(pages[0][0], ())),
            *(page for one in before for page in one.hashes),
        ]
        operation = StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=torch.arange(len(pages)),
            hashes=[PageHash(page) for page in pages], prefix_hashes=path,
            after=before[-1] if before else None, epoch=0,
        )  # fmt: skip
        operations.append(operation)
    io.writes.queue.put(operations[0])
    wait_for(lambda: io.is_calling)
    for operation in operations[1:]:
        io.writes.queue.put(operation)
    store.goes_on.set()
    wait_for(lambda: all(operation.outcome is not None for operation in operations))
    return operations[1:]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RecordingStore, AttachedStore]]:
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    store = RecordingStore()
    io = AttachedStore(
        lambda: store,
        backend="recording", config={}, settings=StorageSettings(prefetch_threshold=1),
        page_size=1, page_bytes=64, pages_per_read=64, metrics=HiCacheMetrics(None),
        pools=StoredPools("ns"),
    )  # fmt: skip
    yield store, io
    assert io.close()


def test_nodes_that_queue_up_are_written_in_one_call(
    recording: tuple[RecordingStore, AttachedStore],
) -> None:
    store, _ = recording
    operations = write_at_once(recording, [["a1", "a2"], ["b1"], ["a3"]])
    assert {operation.outcome for operation in operations} == {CacheOutcome.LANDED}
    assert store.calls == [["a1", "a2", "b1", "a3"]]


def test_a_call_takes_no_more_pages_than_it_may(
    recording: tuple[RecordingStore, AttachedStore],
) -> None:
    store, _ = recording
    whole = [f"b{i}" for i in range(PAGES_PER_CALL)]
    operations = write_at_once(recording, [["a1"], whole, ["a2"]])
    assert {operation.outcome for operation in operations} == {CacheOutcome.LANDED}
    assert max(map(len, store.calls)) == PAGES_PER_CALL
    assert sorted(key for call in store.calls for key in call) == sorted([*whole, "a1", "a2"])


def test_a_store_that_renews_prefixes_gets_the_pages_before_a_call_once(
    recording: tuple[RecordingStore, AttachedStore],
) -> None:
    store, io = recording
    chains, above = [["a1", "a2"], ["b1"], ["a3"]], {"a": ["root"], "b": ["root", "fork"]}
    write_at_once(recording, chains, above)
    assert store.before == [None], "other stores get none"
    store.renews_prefixes = True
    assert io.wants_prefixes
    write_at_once(recording, chains, above)
    assert sorted(store.before[-1] or ()) == ["ns/fork", "ns/root"], "of all chains, not its own"
    long = [f"a{i}" for i in range(PAGES_PER_CALL + 1)]
    write_at_once(recording, [long], above)
    assert store.before[-2:] == [["ns/root"], ["ns/root", *(f"ns/{page}" for page in long[:-1])]]


def test_one_refused_page_takes_its_own_chain_down_and_no_other(
    recording: tuple[RecordingStore, AttachedStore],
) -> None:
    store, _ = recording
    store.refused = "a2"
    a, b, after_a = write_at_once(recording, [["a1", "a2"], ["b1"], ["a3"]])
    assert (a.outcome, b.outcome) == (CacheOutcome.FAILED, CacheOutcome.LANDED)
    assert after_a.outcome is CacheOutcome.SHORT
    assert not any("a3" in call for call in store.calls[1:])
