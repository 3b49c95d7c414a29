"""The three tiers against a dict of pages, as machines of hypothesis: without and with states."""

from __future__ import annotations

import json
import tempfile
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rigs.caches.cache_rig import RIG_LAYOUTS, HiCacheSettings, RigRequest
from rigs.caches.event_listener import TierListeners, block_of, blocks_on_disk
from rigs.caches.state_rig import StateRequest
from rigs.caches.stepped_rig import SteppedRig, SteppedStateRig
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES
from sglang.srt.mem_cache.l3.attached_store import AttachedStore
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey

EVICTION = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
PREFETCH = ("best_effort", "wait_complete")
BELOW = ("L2", "L2 and L3", "buffer")
"""What is below L1; the last is a buffer and L3."""
MAX_PAGES = 6


class Tiers(RuleBasedStateMachine):
    """Prompts over an alphabet of two pages per depth, so that prefixes branch everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="hicache-")
        self.rig: SteppedRig | None = None
        self.running: list[RigRequest] = []
        self.waiting: dict[str, list[int]] = {}
        self.known: set[PageHash] = set()
        """The reference: every page that was ever computed."""
        self.listeners: TierListeners | None = None
        self.lost: set[int] = set()
        """Blocks that were removed from L3; holes are allowed from then on."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        l1_pages=st.integers(MAX_PAGES + 2, 20),
        l2_pages=st.integers(2, 24),
        write_policy=st.sampled_from(WRITE_POLICIES),
        prefetch_policy=st.sampled_from(PREFETCH),
        eviction=st.sampled_from(EVICTION),
        layout=st.sampled_from(RIG_LAYOUTS),
        below=st.sampled_from(BELOW),
    )
    def build(
        self, page_size: int, l1_pages: int, l2_pages: int, write_policy: str,
        prefetch_policy: str, eviction: str, layout: str, below: str,
    ) -> None:  # fmt: skip
        is_buffer = below == "buffer" and write_policy != "write_back"
        chosen = HiCacheSettings(
            hicache_ratio=l2_pages / l1_pages,
            hicache_host_memory_mode="buffer_only" if is_buffer else "cache",
            hicache_write_policy=write_policy,
            hicache_mem_layout=layout,
            hicache_storage_backend=None if below == "L2" else "file",
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": page_size}),
        )
        with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(self.folder.name):
            self.rig = self.make_rig(l1_pages, page_size, eviction, chosen)
        self.listeners = TierListeners(self.rig)

    def make_rig(
        self, l1_pages: int, page_size: int, eviction: str, chosen: HiCacheSettings
    ) -> SteppedRig:
        return SteppedRig(
            l1_pages=l1_pages, page_size=page_size, eviction_policy=eviction, settings=chosen,
            kv_events=True,
        )  # fmt: skip

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
        """A request takes the pages that have landed, but is not admitted yet."""
        assert self.rig is not None
        self.rig.hi.check_prefetch_progress(sorted(self.waiting)[which % len(self.waiting)])

    @precondition(lambda self: self.waiting and not self.running)
    @rule(which=st.integers(0, 5), finish=st.booleans())
    def admit(self, which: int, finish: bool) -> None:
        """Cut or await the prefetch, load, compute; L1 always has room for one running request."""
        assert self.rig is not None
        rid = sorted(self.waiting)[which % len(self.waiting)]
        ids = self.waiting.pop(rid)
        self.rig.until(lambda: self.rig is not None and self.rig.hi.check_prefetch_progress(rid))
        self._admit(rid, ids)
        if finish:
            self.finish(inserted=True)

    @precondition(lambda self: not self.running)
    @rule(shape=shapes, tail=st.integers(0, 3))
    def compute(self, shape: list[int], tail: int) -> None:
        """A request runs while copies of others fill L2: nothing lands if L1 has room."""
        assert self.rig is not None
        self._admit("computes", self.tokens(shape, tail))
        self.finish(inserted=True)

    def _admit(self, rid: str, ids: list[int]) -> None:
        assert self.rig is not None
        request, reused = self.rig.admit(rid, ids)
        pages = RadixKey(ids).page_hashes(self.page)
        assert set(pages[: reused.total // self.page]) <= self.known, (
            "reused what was never computed"
        )
        assert reused.total < len(ids)
        self.known.update(pages)
        self.running.append(request)

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
        """Only match, which splits nodes where the prompt branches off."""
        assert self.rig is not None
        self.rig.hi.match_prefix(MatchPrefixParams(RadixKey(self.tokens(shape, 0))))

    @rule(shape=shapes, quota=st.one_of(st.none(), st.integers(0, MAX_PAGES)))
    def load(self, shape: list[int], quota: int | None) -> None:
        """Queue a load whose request was aborted since."""
        assert self.rig is not None
        match = self.rig.hi.match_prefix(MatchPrefixParams(RadixKey(self.tokens(shape, 0))))
        if match.host_hit_length or match.mamba_host_hit_length:
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
        assert freed >= min(pages * self.page, could), "what counts as evictable can be evicted"

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

    @precondition(lambda self: self.rig is not None and self.rig.hi.store.attached)
    @rule(which=st.integers(0, 30))
    def lose_an_object(self, which: int) -> None:
        """The store evicts any object."""
        attached = self.attached()
        assert attached.client is not None
        root = attached.client._files.root  # type: ignore[attr-defined]
        files = sorted(path for path in root.glob("*/??/*") if path.is_file())
        if files:
            files[which % len(files)].unlink()
            self.lost.add(block_of(files[which % len(files)]))

    @precondition(lambda self: self.waiting == {} and not self.running)
    @rule()
    def flush(self) -> None:
        assert self.rig is not None
        self.rig.flush()

    def attached(self) -> AttachedStore:
        assert self.rig is not None
        found = self.rig.hi.store.attached
        assert found is not None
        return found

    # ---- what always holds -----------------------------------------------------------------

    @invariant()
    def page_ownership(self) -> None:
        if self.rig is not None:
            table = self.rig.rows.req_to_token.to(torch.int64)
            self.rig.hi.check_integrity(
                [
                    table[one.req_pool_idx, one.cache_protected_len : len(one.kv_committed_ids)]
                    for one in self.running
                ],
                self.own_states(),
            )

    @invariant()
    def events_tell_what_each_tier_has(self) -> None:
        if self.listeners is not None:
            self.listeners.hear()
            told = set(self.listeners.store.tokens)
            assert told <= blocks_on_disk(self.folder.name) | self.lost

    def own_states(self) -> list[torch.Tensor]:
        """The state slots that requests own."""
        return []

    def teardown(self) -> None:
        try:
            if self.rig is not None:
                self._end(self.rig)
        finally:
            self.folder.cleanup()

    def _end(self, rig: SteppedRig) -> None:
        """After any history, the rig comes to rest and the tree can free everything."""
        for request in self.running:
            rig.finish(request)
        for rid in self.waiting:
            rig.hi.release_aborted_request(rid)
        rig.settle()
        assert rig.hi.protected_size() == 0
        attached = rig.hi.store.attached
        if attached is not None and not self.lost:
            self._check_prefix_closed(rig, attached)
        rig.flush()
        assert self.listeners is not None
        self.listeners.hear()
        if not self.lost and not rig.tree.tree.components:
            # A page whose state was never written is stored, but of no use.
            assert set(self.listeners.store.tokens) == blocks_on_disk(self.folder.name)
        assert rig.allocator.available_size() == rig.allocator.size
        assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size

    def _check_prefix_closed(self, rig: SteppedRig, attached: AttachedStore) -> None:
        """Pages that the tree counts as stored are in L3, and so are all pages before them."""
        assert attached.client is not None
        for node in rig.hi.nodes():
            if node.storage_epoch == rig.hi.store.epoch:
                above = node.get_prefix_hash_values(self.page)
                keys = attached.pools.keys([*above, *node.page_hashes(self.page)])
                assert attached.client.batch_exists_v2(keys).kv_hit_pages == len(keys)


class StateTiers(Tiers):
    """The same for a model with recurrent states, with tiny pools of states on each tier."""

    rig_class: ClassVar[type[SteppedStateRig]] = SteppedStateRig

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        l1_pages=st.integers(MAX_PAGES + 2, 20),
        l2_pages=st.integers(2, 24),
        write_policy=st.sampled_from(WRITE_POLICIES),
        prefetch_policy=st.sampled_from(PREFETCH),
        eviction=st.sampled_from(EVICTION),
        layout=st.sampled_from([one for one in RIG_LAYOUTS if one != "page_first_kv_split"]),
        below=st.sampled_from(BELOW),
    )
    def build(
        self, page_size: int, l1_pages: int, l2_pages: int, write_policy: str,
        prefetch_policy: str, eviction: str, layout: str, below: str,
    ) -> None:  # fmt: skip
        super().build(
            page_size, l1_pages, l2_pages, write_policy, prefetch_policy, eviction, layout,
            below,
        )  # fmt: skip

    def make_rig(
        self, l1_pages: int, page_size: int, eviction: str, chosen: HiCacheSettings
    ) -> SteppedRig:
        return self.rig_class(
            l1_pages=l1_pages, page_size=page_size, eviction_policy=eviction, settings=chosen,
            num_states=max(4, l1_pages // 3, int(1 + 1 / chosen.hicache_ratio)), kv_events=True,
        )  # fmt: skip

    @property
    def states(self) -> SteppedStateRig:
        """The rig, with its own type."""
        assert isinstance(self.rig, SteppedStateRig)
        return self.rig

    @precondition(lambda self: not self.running)
    @rule(
        pages=st.integers(1, MAX_PAGES), parts_at=st.integers(0, 2 * MAX_PAGES), tail=st.booleans()
    )
    def run_whole(self, pages: int, parts_at: int, tail: bool) -> None:
        """A request from its arrival to its end; most begin alike."""
        rig = self.states
        shape = [int(at == parts_at) for at in range(pages)]
        ids = self.tokens(shape, int(tail))
        rid = f"whole-{rig._next_rid}"
        rig._next_rid += 1
        rig.arrive(rid, ids)
        self.waiting[rid] = ids
        self.admit(which=sorted(self.waiting).index(rid), finish=True)

    @precondition(lambda self: not self.waiting and not self.running)
    @rule(pages=st.integers(2, MAX_PAGES))
    def leave_and_come_back(self, pages: int) -> None:
        """A prompt is computed and reaches every tier; another continues it from the lowest."""
        rig = self.states
        self.run_whole(pages=pages, parts_at=pages, tail=False)
        rig.until(lambda: not rig.tree.is_busy())
        rig.hi.evict(EvictParams(num_tokens=rig.allocator.size))
        if rig.hi.store.attached is not None:
            rig.hi.evict_host(rig.hi.host_pool.size)
        self.run_whole(pages=pages, parts_at=pages, tail=True)

    @rule(count=st.integers(1, 4))
    def evict_states(self, count: int) -> None:
        rig = self.states
        before = rig.slots.available_size(), rig.allocator.available_size()
        can = min(count, rig.tree.mamba_evictable_size())
        result = rig.hi.evict(EvictParams(mamba_num=count))
        assert result.mamba_num_evicted >= can
        assert rig.slots.available_size() == before[0] + result.mamba_num_evicted
        assert rig.allocator.available_size() == before[1] + result.num_tokens_evicted

    @rule(count=st.integers(1, 4))
    def evict_host_states(self, count: int) -> None:
        host = self.states.states.host
        free = host.pool.available_size()
        assert host.pool.available_size() >= free + min(0, host.evict(count))

    @precondition(lambda self: self.running)
    @rule()
    def go_on(self) -> None:
        """Insert what a request has computed so far into the tree; the request continues."""
        self.states.hi.cache_unfinished_req(self.running[0])

    def own_states(self) -> list[torch.Tensor]:
        found = [one for one in self.running if isinstance(one, StateRequest)]
        return [slot for one in found for slot in one.states()]

    def _end(self, rig: SteppedRig) -> None:
        super()._end(rig)
        assert isinstance(rig, SteppedStateRig)
        assert rig.slots.available_size() == rig.num_states
        assert rig.states.host.pool.available_size() == rig.states.host.pool.size

    def _check_prefix_closed(self, rig: SteppedRig, attached: AttachedStore) -> None:
        super()._check_prefix_closed(rig, attached)
        assert attached.client is not None and isinstance(rig, SteppedStateRig)
        for node in rig.hi.nodes():
            is_stored = node.storage_epoch == rig.hi.store.epoch
            if is_stored and node.states[0].host_value is not None:
                above = node.get_prefix_hash_values(self.page)
                keys = attached.pools.keys([*above, *node.page_hashes(self.page)])
                trailing = PoolHitPolicy.TRAILING_PAGES
                state = PoolTransfer(rig.mamba.spec.name, keys=keys[-1:], hit_policy=trailing)
                hit = attached.client.batch_exists_v2(keys, pool_transfers=[state])
                assert hit.kv_hit_pages == len(keys)
