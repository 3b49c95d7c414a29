"""The three tiers against a dict of pages: any order of requests, splits, evictions and landings.

Copies and transfers happen when a rule says so, never beside it, so that a run is decided by its
seed alone: a node can be split, evicted or matched at every page under a write, a load, a backup
and a prefetch. The rig's made-up KV shows a wrong byte, `check_integrity` a wrong book.
A failure prints its steps; the line with `reproduce_failure` repeats it.
"""

from __future__ import annotations

import json
import queue
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang.srt.environ import envs
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.l3.storage_io import StorageIO
from sglang.srt.mem_cache.tiers.host_backup import WRITE_POLICIES
from sglang.srt.mem_cache.tree.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.test.cache_rig import (
    RIG_LAYOUTS,
    CacheRig,
    HeldStream,
    HiCacheSettings,
    Reused,
    RigRequest,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

EVICTION = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
PREFETCH = ("best_effort", "wait_complete")
MAX_PAGES = 6
EXAMPLES = 50
"""The nightly profile beside this file sets more."""


class SteppedRig(CacheRig):
    """A rig in which nothing moves by itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        controller = self.hi.cache_controller
        for stream in (controller._write_stream, controller._load_stream):
            stream.close()
        self.writes, self.loads = HeldStream(), HeldStream()
        controller._write_stream, controller._load_stream = self.writes, self.loads  # type: ignore[assignment]
        self._evict = self.hi.evict
        self.hi.evict = self._evict_with_copies  # type: ignore[method-assign]
        if controller.storage_io is not None:
            _stop_threads(controller.storage_io)

    def _evict_with_copies(self, params: EvictParams) -> EvictResult:
        # Under write_back an eviction waits for its copies.
        self.writes.run()
        self.writes.at_once = True
        try:
            return self._evict(params)
        finally:
            self.writes.at_once = False

    def _compute(self, request: RigRequest) -> None:
        # The forward pass waits for the layers of its load.
        self.loads.run()
        super()._compute(request)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(50):
            if condition():
                return
            self.land_all()
            self.tick()
        raise AssertionError(f"nothing happens any more; busy: {self.tree.is_busy()}")

    def land_all(self) -> None:
        self.hi.ready_to_load_host_cache()
        self.writes.run()
        self.loads.run()
        self.backups(None)
        self.prefetches(None)

    def backups(self, count: int | None) -> None:
        """Do the first `count` writes to L3."""
        if (storage_io := self.hi.cache_controller.storage_io) is not None:
            _serve(storage_io.writes.queue, storage_io.writes.run, count)

    def prefetches(self, count: int | None) -> None:
        """Do the first `count` reads from L3."""
        if (storage_io := self.hi.cache_controller.storage_io) is not None:
            self.hi.storage_prefetch._submit()
            if count is not None:
                _ungroup(storage_io.reads.queue)
            _serve(storage_io.reads.queue, storage_io.reads.run, count)


def _stop_threads(storage_io: StorageIO) -> None:
    for waiting in (storage_io.reads.queue, storage_io.writes.queue):
        waiting.put(None)
    for thread in storage_io._threads:
        thread.join()


def _ungroup(waiting: queue.SimpleQueue[Any]) -> None:
    """Make a question of its own of each prompt."""
    for _ in range(waiting.qsize()):
        one = waiting.get()
        for asked in one if isinstance(one, list) else [one]:
            waiting.put([asked] if isinstance(one, list) else asked)


def _serve(waiting: queue.SimpleQueue[Any], serve: Callable[[], None], count: int | None) -> None:
    """Let the work of a transfer thread be done here, for the first `count` operations."""
    operations = []
    while not waiting.empty():
        operations.append(waiting.get())
    count = len(operations) if count is None else count
    for operation in [*operations[:count], None]:
        waiting.put(operation)
    with patch.object(storage_writes, "_GATHER_S", 0.0):
        serve()
    for operation in operations[count:]:
        waiting.put(operation)


class Tiers(RuleBasedStateMachine):
    """Prompts over an alphabet of two pages per depth, so that they share and part everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="hicache-")
        self.rig: SteppedRig | None = None
        self.running: list[RigRequest] = []
        self.waiting: dict[str, list[int]] = {}
        self.known: set[PageHash] = set()
        """The model: every page that was ever computed."""
        self.removed = False
        """Somebody took pages out of L3: holes are allowed from then on."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        l1_pages=st.integers(MAX_PAGES + 2, 20),
        l2_pages=st.integers(2, 24),
        write_policy=st.sampled_from(WRITE_POLICIES),
        prefetch_policy=st.sampled_from(PREFETCH),
        eviction=st.sampled_from(EVICTION),
        layout=st.sampled_from(RIG_LAYOUTS),
        has_storage=st.booleans(),
    )
    def build(
        self, page_size: int, l1_pages: int, l2_pages: int, write_policy: str,
        prefetch_policy: str, eviction: str, layout: str, has_storage: bool,
    ) -> None:  # fmt: skip
        with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(self.folder.name):
            self.rig = SteppedRig(
                l1_pages=l1_pages,
                page_size=page_size,
                eviction_policy=eviction,
                settings=HiCacheSettings(
                    hicache_ratio=l2_pages / l1_pages,
                    hicache_write_policy=write_policy,
                    hicache_mem_layout=layout,
                    hicache_storage_backend="file" if has_storage else None,
                    hicache_storage_prefetch_policy=prefetch_policy,
                    hicache_storage_backend_extra_config=json.dumps(
                        {"prefetch_threshold": page_size}
                    ),
                ),
            )

    @property
    def page(self) -> int:
        assert self.rig is not None
        return self.rig.page_size

    def tokens(self, shape: list[int], tail: int) -> list[int]:
        """Page i is one of two, by `shape[i]`; `tail` tokens of a last page follow."""
        starts = [(2 * at + which) * 10 for at, which in enumerate(shape)]
        ids = [start + n for start in starts for n in range(self.page)]
        return [*ids, *range(900, 900 + 1 + tail % self.page)]

    # ---- requests --------------------------------------------------------------------------

    shapes = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_PAGES)

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(shape=shapes, tail=st.integers(0, 3), only_join=st.booleans())
    def arrive(self, shape: list[int], tail: int, only_join: bool) -> None:
        assert self.rig is not None
        rid = f"w{len(self.waiting)}-{sum(shape)}-{tail}-{self.rig._next_rid}"
        self.rig._next_rid += 1
        ids = self.tokens(shape, tail)
        self.rig.arrive(rid, ids, only_join=only_join)
        self.waiting[rid] = ids

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def look(self, which: int) -> None:
        """A request is looked at and takes what has landed, but there is no room for it yet."""
        assert self.rig is not None
        self.rig.hi.check_prefetch_progress(sorted(self.waiting)[which % len(self.waiting)])

    @precondition(lambda self: self.waiting and not self.running)
    @rule(which=st.integers(0, 5), finish=st.booleans())
    def admit(self, which: int, finish: bool) -> None:
        """Cut or await the prefetch, load, compute; L1 holds one running request for sure."""
        assert self.rig is not None
        rid = sorted(self.waiting)[which % len(self.waiting)]
        ids = self.waiting.pop(rid)
        self.rig.until(lambda: self.rig is not None and self.rig.hi.check_prefetch_progress(rid))
        request, reused = self.rig.admit(rid, ids)
        pages = RadixKey(ids).page_hashes(self.page)
        assert set(pages[: reused.total // self.page]) <= self.known, "reused what nobody computed"
        assert reused.total < len(ids)
        self.known.update(pages)
        self.running.append(request)
        if finish:
            self.finish(inserted=True)

    @precondition(lambda self: self.running)
    @rule(inserted=st.booleans())
    def finish(self, inserted: bool) -> None:
        assert self.rig is not None
        self.rig.finish(self.running.pop(), is_insert=inserted)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        assert self.rig is not None
        rid = sorted(self.waiting)[which % len(self.waiting)]
        del self.waiting[rid]
        self.rig.hi.release_aborted_request(rid)

    # ---- what may come at any moment -------------------------------------------------------

    @rule(shape=shapes)
    def split(self, shape: list[int]) -> None:
        """A match alone, which cuts nodes wherever the prompt leaves them."""
        assert self.rig is not None
        self.rig.hi.match_prefix(MatchPrefixParams(RadixKey(self.tokens(shape, 0))))

    @rule(shape=shapes, quota=st.one_of(st.none(), st.integers(0, MAX_PAGES)))
    def load(self, shape: list[int], quota: int | None) -> None:
        """Queue a load that no request waits for (its own was aborted since)."""
        assert self.rig is not None
        match = self.rig.hi.match_prefix(MatchPrefixParams(RadixKey(self.tokens(shape, 0))))
        if match.host_hit_length:
            limit = None if quota is None else quota * self.page
            loaded, _ = self.rig.hi.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length, mem_quota=limit)
            )
            assert len(loaded) <= match.host_hit_length

    @rule(pages=st.integers(1, 20))
    def evict(self, pages: int) -> None:
        assert self.rig is not None
        free, tree = self.rig.allocator.available_size(), self.rig.hi
        could = tree.evictable_size()
        freed = tree.evict(EvictParams(num_tokens=pages * self.page)).num_tokens_evicted
        assert self.rig.allocator.available_size() == free + freed
        assert freed <= could

    @rule(pages=st.integers(1, 20))
    def evict_host(self, pages: int) -> None:
        assert self.rig is not None
        free = self.rig.hi.host_pool.available_size()
        freed = self.rig.hi.evict_host(pages * self.page)
        assert self.rig.hi.host_pool.available_size() == free + freed

    @rule(count=st.integers(1, 2))
    def land_writes(self, count: int) -> None:
        assert self.rig is not None
        self.rig.writes.run(count)

    @rule()
    def land_loads(self) -> None:
        assert self.rig is not None
        self.rig.hi.ready_to_load_host_cache()
        self.rig.loads.run()

    @rule(count=st.integers(1, 2))
    def land_backups(self, count: int) -> None:
        assert self.rig is not None
        self.rig.backups(count)

    @rule(count=st.integers(1, 2))
    def land_prefetches(self, count: int) -> None:
        assert self.rig is not None
        self.rig.prefetches(count)

    @rule()
    def tick(self) -> None:
        assert self.rig is not None
        self.rig.tick()

    @precondition(lambda self: self.rig is not None and self.rig.hi.cache_controller.storage_io)
    @rule(which=st.integers(0, 30))
    def lose_an_object(self, which: int) -> None:
        """The store evicts what it likes."""
        self.removed = True
        storage_io = self.storage_io()
        assert storage_io.storage is not None
        root = storage_io.storage._files.root  # type: ignore[attr-defined]
        files = sorted(path for path in root.glob("*/??/*") if path.is_file())
        if files:
            files[which % len(files)].unlink()

    @precondition(lambda self: self.waiting == {} and not self.running)
    @rule()
    def flush(self) -> None:
        assert self.rig is not None
        self.rig.flush()

    def storage_io(self) -> StorageIO:
        assert self.rig is not None
        found = self.rig.hi.cache_controller.storage_io
        assert found is not None
        return found

    # ---- what always holds -----------------------------------------------------------------

    @invariant()
    def books(self) -> None:
        if self.rig is not None:
            table = self.rig.rows.req_to_token.to(torch.int64)
            self.rig.hi.check_integrity(
                table[one.req_pool_idx, one.cache_protected_len : len(one.kv_committed_ids)]
                for one in self.running
            )

    def teardown(self) -> None:
        try:
            if self.rig is not None:
                self._end(self.rig)
        finally:
            self.folder.cleanup()

    def _end(self, rig: SteppedRig) -> None:
        """Whatever came before, it comes to rest, and the tree gives everything back."""
        for request in self.running:
            rig.finish(request)
        for rid in self.waiting:
            rig.hi.release_aborted_request(rid)
        rig.settle()
        assert rig.hi.protected_size() == 0
        storage_io = rig.hi.cache_controller.storage_io
        if storage_io is not None and not self.removed:
            self._check_prefix_closed(rig, storage_io)
        rig.flush()
        assert rig.allocator.available_size() == rig.allocator.size
        assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size

    def _check_prefix_closed(self, rig: SteppedRig, storage_io: StorageIO) -> None:
        """What the tree believes to be in L3 is there, and so is all above it."""
        assert storage_io.storage is not None
        for node in rig.hi.nodes():
            if node.storage_epoch == rig.hi.storage_link.epoch:
                above = node.get_prefix_hash_values(self.page)
                keys = storage_io.store.keys([*above, *node.page_hashes(self.page)])
                assert storage_io.storage.batch_exists_v2(keys).kv_hit_pages == len(keys)


def test_any_order_of_requests_splits_evictions_and_landings() -> None:
    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


# -- a split at every page, under every kind of operation ----------------------------------------

PAGES = 6
CUTS = range(1, PAGES)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield tmp_path


def stepped(storage: str | None = "file") -> SteppedRig:
    return SteppedRig(
        l1_pages=16,
        page_size=2,
        settings=HiCacheSettings(
            hicache_ratio=2.0,
            hicache_storage_backend=storage,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 2}),
        ),
    )


def pages_of(count: int) -> list[int]:
    """A prompt whose `count` first pages can be reused."""
    return list(range(2 * count + 1))


def split_at(rig: SteppedRig, cut: int) -> None:
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey([*range(2 * cut), 99, 99])))
    assert len(match.best_match_node.key) <= 2 * cut
    rig.hi.check_integrity()


def everything(rig: SteppedRig) -> EvictParams:
    return EvictParams(num_tokens=rig.allocator.size)


def used_host_pages(rig: SteppedRig) -> int:
    return (rig.hi.host_pool.size - rig.hi.host_pool.available_size()) // rig.page_size


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_write(cut: int) -> None:
    rig = stepped(storage=None)
    rig.run(pages_of(PAGES))
    rig.tick()
    split_at(rig, cut)
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 0, "it is being copied from"
    # Used again meanwhile, neither part is written a second time.
    request, _ = rig.start(pages_of(cut))
    rig.finish(request)
    rig.settle()
    assert used_host_pages(rig) == PAGES
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 2 * PAGES
    assert rig.run(pages_of(PAGES)) == Reused(host=2 * PAGES)
    rig.settle()


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_load(cut: int) -> None:
    rig = stepped(storage=None)
    rig.run(pages_of(PAGES))
    rig.settle()
    rig.hi.evict(everything(rig))
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey(pages_of(PAGES))))
    rig.hi.init_load_back(InitLoadBackParams(match.best_match_node, match.host_hit_length))
    split_at(rig, cut)
    assert rig.hi.evict_host(1000) == 0, "it is being copied from"
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 0, "it is being copied to"
    rig.settle()
    assert rig.hi.protected_size() == 0
    assert rig.hi.evict_host(1000) == 2 * PAGES
    assert rig.run(pages_of(PAGES)) == Reused(device=2 * PAGES)
    rig.settle()


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_backup(cut: int, folder: Path) -> None:
    rig = stepped()
    rig.run(pages_of(PAGES))
    rig.tick()
    rig.writes.run()
    rig.tick()
    assert rig.hi.is_busy() == {"backups": 1}
    split_at(rig, cut)
    assert rig.hi.evict(everything(rig)).num_tokens_evicted == 2 * PAGES
    assert rig.hi.evict_host(1000) == 0, "it is being read from"
    rig.run(pages_of(cut))
    rig.settle()
    stored = sum(len(node.key) for node in rig.hi.nodes() if node.storage_epoch == 0)
    assert stored == 2 * PAGES
    assert rig.hi.metrics.backup_outcomes.labels("landed")._value.get() == 1, "and once"
    assert rig.hi.evict_host(1000) == 2 * PAGES
    rig.flush()
    assert rig.run(pages_of(PAGES)) == Reused(storage=2 * PAGES)


@pytest.mark.parametrize("cut", CUTS)
def test_a_split_under_a_prefetch(cut: int, folder: Path) -> None:
    """The read continues a node of two pages; others bring pages of it meanwhile, or cut there."""
    writer, rig = stepped(), stepped()
    writer.run(pages_of(PAGES))
    writer.settle()
    rig.run(pages_of(2))
    rig.settle()
    rig.arrive("r", pages_of(PAGES))
    assert rig.hi.is_busy()["prefetches"] == 1
    rig.run([*range(2 * cut), 99, 99, 7])
    split_at(rig, min(cut, 2))
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(PAGES))
    known = max(cut, 2)
    assert reused == Reused(device=2 * known, storage=2 * (PAGES - known))
    rig.finish(request)
    rig.settle()


def test_what_a_prefetch_continues_leaves_meanwhile(folder: Path) -> None:
    writer, rig = stepped(), stepped()
    writer.run(pages_of(PAGES))
    writer.settle()
    rig.run(pages_of(2))
    rig.settle()
    rig.arrive("r", pages_of(PAGES))
    rig.hi.evict(everything(rig))
    rig.hi.evict_host(1000)
    rig.prefetches(None)
    rig.tick()
    assert rig.hi.check_prefetch_progress("r")
    request, reused = rig.admit("r", pages_of(PAGES))
    assert reused == Reused()
    assert rig.hi.metrics.prefetch_outcomes.labels("orphan")._value.get() == 1
    rig.finish(request)
    rig.settle()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
