"""States in L3: they are written, asked for and read with the pages that they stand behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rigs.caches.marks_pool import marks_of
from rigs.caches.state_pools import TRAILING, StatePools
from rigs.stores.host_pools import PAGE, device_bytes, page_slots, storage_config
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, PoolName, PoolTransfer
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation
from sglang.srt.mem_cache.l3.storage_settings import StorageSettings
from sglang.srt.mem_cache.l3.storage_writes import StorageOperation
from sglang.srt.mem_cache.l3.stored_pools import StoredPools
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGES = 6
HASHES = [PageHash(f"{page:064x}") for page in range(PAGES)]
SLOTS = page_slots([*range(1, PAGES + 1)])
LANDED, MISS = CacheOutcome.LANDED, CacheOutcome.MISS


class Bench:
    """Pools with L3 in files, two pages a get."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pools = StatePools()
        group = self.pools.group
        self.io = AttachedStore(
            lambda: StorageBackendFactory.create_backend(
                "file", storage_config(), group.primary, extra_pools=group.extra_pools
            ),
            backend="file",
            config={},
            settings=StorageSettings(prefetch_threshold=PAGE),
            page_size=PAGE,
            page_bytes=group.page_bytes,
            pages_per_read=2,
            metrics=HiCacheMetrics(None),
            pools=StoredPools("ns", group.extra_queries, group.auxiliary_pools),
        )
        self.slots = self.pools.group.primary.alloc(PAGES * PAGE)
        self.state_slots = self.pools.state_host.alloc(2)

    def write(self, *behind: int) -> CacheOutcome | None:
        """The outcome of writing all pages, and states 50 and 51 or 60 and 61 after those named."""
        pools = self.pools
        states = pools.states
        states.marks[:, 4] = torch.tensor([60, 61])
        written = PoolTransfer(PoolName.MAMBA, None, torch.tensor([5, 4])[: len(behind)])
        operation = pools.controller.write(SLOTS, [written])
        assert operation is not None
        pools.controller.start_writing(is_urgent=True)
        pools.finish_copies()
        state = PoolTransfer(
            PoolName.MAMBA, written.host_indices, keys=[HASHES[at] for at in behind],
            hit_policy=TRAILING,
        )  # fmt: skip
        write = StorageOperation(
            node=TreeNode(1, RadixKey([])), host_indices=operation.host_indices, hashes=HASHES,
            prefix_hashes=[], after=None, epoch=0, extra_transfers=[state],
        )  # fmt: skip
        self.io.writes.queue.put(write)
        wait_for(write)
        return write.outcome

    def read(self) -> PrefetchOperation:
        """Read all pages that the store has, and the state at the end of them."""
        assert self.slots is not None and self.state_slots is not None
        state = PoolTransfer(PoolName.MAMBA, self.state_slots[:1], hit_policy=TRAILING)
        operation = PrefetchOperation(
            request_id="r", key=RadixKey(range(PAGES * PAGE)), start=0, host_indices=self.slots,
            hashes=HASHES, prefix_hashes=[], deadline=0.0, epoch=0, extra_transfers=[state],
        )  # fmt: skip
        self.io.reads.queue.put([operation])
        wait_for(operation)
        return operation

    def file(self, page: int, pool: str) -> Path:
        (found,) = self.root.glob(f"ns/??/{HASHES[page]}%2F{pool}")
        return found

    def bring_to_device(self, pages: int) -> None:
        """The first pages that were read and their state, to where they came from and slot 1."""
        assert self.slots is not None and self.state_slots is not None
        for buffer in (*self.pools.kv.k_buffer, *self.pools.kv.v_buffer):
            buffer.zero_()
        state = PoolTransfer(PoolName.MAMBA, self.state_slots[:1], torch.tensor([1]))
        self.pools.controller.load(self.slots[: pages * PAGE], SLOTS[: pages * PAGE], [state])
        self.pools.controller.start_loading()
        self.pools.finish_copies()


def wait_for(operation: StorageOperation | PrefetchOperation) -> None:
    deadline = time.monotonic() + 30
    while operation.outcome is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(storage_writes, "_GATHER_S", 0.0)
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        made = Bench(tmp_path)
        yield made
        assert made.io.close()
        made.pools.controller.shutdown()


def test_a_state_is_read_with_the_pages_that_it_stands_behind(bench: Bench) -> None:
    wanted = device_bytes(bench.pools.kv, SLOTS)
    assert bench.write(PAGES - 1) is LANDED
    operation = bench.read()
    assert (operation.outcome, operation.hit_pages, operation.landed_pages) == (LANDED, 6, 6)
    bench.bring_to_device(6)
    assert device_bytes(bench.pools.kv, SLOTS) == wanted
    assert marks_of(bench.pools.states, torch.tensor([1])) == [50, 51]


def test_a_prefix_without_a_state_is_no_hit(bench: Bench) -> None:
    bench.write(2, PAGES - 1)
    bench.file(PAGES - 1, "mamba").unlink()
    operation = bench.read()
    assert (operation.hit_pages, operation.landed_pages) == (3, 3), "the longest that has one"
    bench.bring_to_device(3)
    assert marks_of(bench.pools.states, torch.tensor([1])) == [50, 51]
    bench.file(2, "mamba").unlink()
    operation = bench.read()
    assert (operation.hit_pages, operation.outcome) == (0, CacheOutcome.NO_STATE)


@pytest.mark.parametrize("pool", ["kv", "mamba"])
def test_a_read_gives_nothing_where_a_part_is_damaged(bench: Bench, pool: str) -> None:
    bench.write(PAGES - 1)
    file = bench.file(PAGES - 1, pool)
    raw = file.read_bytes()
    file.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    operation = bench.read()
    assert operation.outcome is CacheOutcome.DAMAGED
    assert (operation.hit_pages, operation.landed_pages) == (6, 0)
    # The write brings back what is missing.
    assert bench.write(PAGES - 1) is LANDED
    assert file.read_bytes() == raw
    assert bench.read().landed_pages == 6
