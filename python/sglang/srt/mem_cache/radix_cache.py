"""The prefix cache of one tier (L1): the operations of requests on the tree.

The hierarchical cache (`HiRadixCache`) is this one with flows to the tiers below.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheableRequest,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    Lookup,
    MatchPrefixParams,
    MatchResult,
    not_supported,
)
from sglang.srt.mem_cache.device.state_pool import StatePool, state_pool
from sglang.srt.mem_cache.tree.hicache_metrics import CacheMetrics, Decision, StateMetrics
from sglang.srt.mem_cache.tree.kv_events import KVEventLog
from sglang.srt.mem_cache.tree.pool_tier import DeviceTier, PoolTier
from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
from sglang.srt.mem_cache.tree.radix_key import RadixKey as RadixKey
from sglang.srt.mem_cache.tree.session_hints import Session, SessionHints
from sglang.srt.mem_cache.tree.state_component import StateComponent
from sglang.srt.mem_cache.tree.tenants import TenantUse
from sglang.srt.mem_cache.tree.tree_node import TreeNode as TreeNode
from sglang.srt.utils.parts import Parts, do_all

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent


class RadixCache(BasePrefixCache):
    """Prefix cache over a tree.

    If `params.disable`, no pages are kept across requests: nothing is matched or inserted.

    Args:
        tree: An empty tree; None: a new one.
        evict_from: Frees slots of a pool in L1: at least so many if possible, and returns how many.
        metrics: Metrics of the tiers; None: those of L1.

    Attributes:
        disable: True if the cache keeps no pages across requests.
        metrics: Metrics of the tiers.
        state_metrics: Metrics of recurrent states; None: the model has none.
    """

    def __init__(
        self,
        params: CacheInitParams,
        tree: PrefixTree | None = None,
        evict_from: Callable[[DeviceTier, int], int] = DeviceTier.evict,
        metrics: CacheMetrics | None = None,
    ) -> None:
        self.metrics = metrics or CacheMetrics(params.metrics_registry or CollectorRegistry())
        self.disable = params.disable
        self.page_size = params.page_size
        self.held_pages = params.held_pages
        self.req_to_token_pool = params.req_to_token_pool
        self.tree = make_tree(params) if tree is None else tree
        self._mamba_pool = mamba_pool_of(params)
        self.state_metrics = next((one.metrics for one in self.tree.components), None)
        if self.state_metrics is None and self._mamba_pool is not None:
            self.state_metrics = StateMetrics(params.metrics_registry)
        self._evict_from = evict_from
        self._on_tick: list[Callable[[], None]] = []
        self.tree.device.evicted = self.metrics.evicted.labels("device")
        self.tree.tenants.decisions = self.metrics.decisions

    @property
    def root_node(self) -> TreeNode:
        return self.tree.root

    def reset(self) -> None:
        """Forget all nodes. The caller clears the allocator."""
        self.tree.reset()

    def take_events(self) -> list[KVCacheEvent]:
        """Pages that came to a tier and left it since the last call, in order; empty unless
        `enable_kv_cache_events` is set. Hashes are those of pages, made smaller by
        `hash_str_to_int64`; equal tokens under different extra keys have different hashes."""
        return [] if self.tree.events is None else self.tree.events.take()

    # ---- matching and inserting ------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix of `params.key`, in whole pages. The one match function:
        scheduling, prefetch and load-back all use it.

        If the match is the whole key, the scheduler computes the key's last token again and stores
        nothing. A cache of state that this would corrupt, such as a recurrent state, leaves the
        last page out of the match (`StateSpec.is_repeatable`).
        """
        components = self.tree.components
        if params.cow_mamba and not components:
            raise not_supported(params, "cow_mamba")
        key, finds_states = params.key, bool(components) and params.needs_state
        if components and not finds_states:
            # The state of the whole key never comes without a page.
            key = key[: max(0, len(key) - 1)]
        known = path = [] if self.disable else self.tree.walk(key)
        if finds_states:
            path = self.tree.usable(known, len(params.key))
        on_device = [node for node in path if node.value is not None]
        last_device = on_device[-1] if on_device else self.tree.root
        last = path[-1] if path else self.tree.root
        match = MatchResult(
            device_indices=self.tree.values_of(on_device),
            last_device_node=last_device,
            last_host_node=last,
            best_match_node=last,
            host_hit_length=sum([len(node.key.ids) for node in path[len(on_device) :]]),
        )
        for component in components if finds_states else ():
            match = component.complete_match(match, known, params)
        return match

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the whole pages of `key` with their device slots; a partial last page is ignored.

        The tree takes the slots of pages that it does not have on the device. The caller keeps (and
        frees) the slots of the first `prefix_len` tokens. The tree takes `mamba_value` too, unless
        `mamba_exist`.

        Raises:
            ValueError: `key` or `value` is missing, or they differ in length; a field of a kind of
                state is set that this cache does not keep; or a field is missing that the cache
                needs.
        """
        is_foreign = params.mamba_value is not None and not self.tree.components
        if is_foreign or params.prev_prefix_len or params.swa_evicted_seqlen:
            raise not_supported(params, "mamba_value", "prev_prefix_len", "swa_evicted_seqlen")
        if params.key is None or params.value is None or len(params.key) != len(params.value):
            raise ValueError("insert needs `key` and a `value` of the same length")
        for component in self.tree.components:
            component.check_insert(params)
        if self.disable:
            return InsertResult(prefix_len=0)
        key = params.key.page_aligned(self.page_size)
        prefix_len, path = self.tree.insert(key, params.value, params.priority)
        was_there = [one.on_insert(path[-1], params) for one in self.tree.components]
        if not params.chunked:
            for node in path:
                node.hit_count += 1
        self._on_insert(path)
        return InsertResult(prefix_len=prefix_len, total_len=len(key), mamba_exist=any(was_there))

    def _on_insert(self, path: list[TreeNode]) -> None:
        """The nodes of `path`, root's child first, were put on the device or used again. For caches
        with lower tiers."""

    # ---- requests --------------------------------------------------------------------------

    def cache_finished_req(self, req: CacheableRequest, is_insert: bool = True) -> None:
        """Take over the whole pages that `req` computed, free the rest of its slots, unlock."""
        kept = req.cache_protected_len
        if is_insert and not self.disable and not req.last_node.is_condemned:
            whole = self._insertable(req)
            if whole > kept:
                slots, known, path = self._insert_committed(req, whole)
                # Pages that another request inserted meanwhile: these are doubles.
                self.tree.device.free(slots[kept:known])
                kept = whole
            else:
                path = self.tree.path_to(req.last_node)
                for component in self.tree.components:
                    component.take_behind(req)
            for node in path:
                node.hit_count += 1
            if req.session is not None and path:
                self.tree.refresh(self.tree.sessions.keep(req.session, path[-1]))
            self._on_insert(path)
        self.tree.device.free(self._slots_of(req, kept))
        for component in self.tree.components:
            component.release(req)
        self.dec_lock_ref(req.last_node)
        req.last_node = self.tree.root
        req.cache_protected_len = 0

    def cache_unfinished_req(self, req: CacheableRequest, chunked: bool = False) -> None:
        """Take over the pages that `req` has computed so far; the request goes on. Updates its row
        of the `ReqToTokenPool`, `prefix_indices`, `last_node` and `cache_protected_len`.

        Args:
            chunked: True if more of its prompt follows. A request's use counts when it ends.
        """
        if self.disable or req.last_node.is_condemned:
            req.prefix_indices = self._slots_of(req, 0)
            return
        begin, whole = req.cache_protected_len, self._insertable(req)
        if whole <= begin:
            # The request has no page that the tree would take: it used only the locked pages.
            path = self.tree.path_to(req.last_node)
            for node in path:
                node.priority = max(node.priority, req.priority)
            if self.tree.components:
                req.prefix_indices = self._slots_of(req, 0)
                for component in self.tree.components:
                    component.take_behind(req)
            self._on_insert(path)
            return
        slots, known, path = self._insert_committed(req, whole)
        if known > begin:
            # Pages that another request inserted meanwhile: these are doubles.
            self.tree.device.free(slots[begin:known])
            theirs = self.tree.values_of(path)[begin:known]
            self.req_to_token_pool.write((req.req_pool_idx, slice(begin, known)), theirs)
            slots = torch.cat([slots[:begin], theirs, slots[known:]])
        self._on_insert(path)  # It may split nodes: `path` then lacks their upper parts.
        last = path[-1]
        self.inc_lock_ref(last)
        self.dec_lock_ref(req.last_node)
        req.last_node = last
        req.cache_protected_len = whole
        req.prefix_indices = slots

    def _insert_committed(
        self, req: CacheableRequest, whole: int
    ) -> tuple[torch.Tensor, int, list[TreeNode]]:
        """Give the tree the first `whole` tokens of `req`, and its states.

        Returns:
            Slots of all tokens whose KV has been computed, int64; and what `PrefixTree.insert`
            returns.
        """
        session = None if self.tree.events is None else req.session
        name = None if session is None else session.name
        slots = self._slots_of(req, 0)
        key = RadixKey(req.kv_committed_ids[:whole], req.extra_key)
        known, path = self.tree.insert(key, slots, req.priority, name)
        for component in self.tree.components:
            end = component.snapshot_end(req)
            if end == whole:
                component.take_from(req, path[-1])
            elif end is not None:
                component.take_from(req, self.tree.walk(key[:end])[-1])
                path = self.tree.walk(key)
        return slots, known, path

    def _insertable(self, req: CacheableRequest) -> int:
        """Number of tokens of `req` that the tree can use."""
        length = req.kv_committed_len // self.page_size * self.page_size
        for component in self.tree.components:
            length = component.insertable(req, length)
        return length

    def _slots_of(self, req: CacheableRequest, begin: int) -> torch.Tensor:
        """int64: slots of the tokens whose KV has been computed, from token `begin` on."""
        assert req.req_pool_idx is not None, f"request {req.rid} has no row of slots"
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, begin : req.kv_committed_len]
        return row.to(torch.int64)

    def begin_tick(self, now: float) -> None:
        """Note the time of the tick, seconds that are equal on all ranks: hints of sessions end."""
        if ended := self.tree.sessions.expire(now):
            self.tree.refresh(ended)
        self.tree.note_uses()
        for begin in self._on_tick:
            begin()

    def renew_session(self, session: Session) -> None:
        """Keep the prefix of `session` for a whole time to live from now on."""
        self.tree.sessions.renew(session)

    def close_session(self, session: Session) -> None:
        """Keep the prefix of `session` no longer."""
        self.tree.refresh(self.tree.sessions.close(session))

    # ---- requests that wait ----------------------------------------------------------------

    def note_waiting(self, rid: str, arrival_number: int, node: TreeNode) -> None:
        """Record that request `rid` waits and will use the prefix that ends with `node`. Such pages
        are evicted last. Requests are expected to be served in the order of their numbers."""
        self.tree.look_ahead.add(rid, arrival_number, node)

    def note_scheduled(self, rid: str) -> None:
        """Record that request `rid` has locked its prefix: it waits no more, and no pages are read
        for it."""
        if unmarked := self.tree.look_ahead.remove(rid):
            self.tree.refresh(unmarked)

    def release_aborted_request(self, rid: str) -> None:
        """Forget a waiting request that will not run, and its prefetch."""
        if unmarked := self.tree.look_ahead.remove(rid):
            self.tree.refresh(unmarked)

    # ---- locks, eviction, sizes ------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Keep `node` and its ancestors on the device until the matching `dec_lock_ref`."""
        return IncLockRefResult(delta=self.tree.lock(node))

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> DecLockRefResult:
        """Undo one `inc_lock_ref`."""
        return DecLockRefResult(delta=self.tree.unlock(node))

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` device slots if there are enough unlocked pages, and
        `mamba_num` states. Pages that are useless without an evicted state are evicted too."""
        if params.swa_num_tokens or (params.mamba_num and not self.tree.components):
            raise not_supported(params, "swa_num_tokens", "mamba_num")
        wanted = {component.device: params.mamba_num for component in self.tree.components}
        wanted[self.tree.device] = params.num_tokens
        before = {tier: tier.pool.available_size() for tier in wanted}

        def evict() -> int:
            for tier, num in wanted.items():
                # An eviction from one pool may free slots of another.
                missing = num - (tier.pool.available_size() - before[tier])
                if missing > 0:
                    self._evict_from(tier, missing)
            return self.tree.device.pool.available_size() - before[self.tree.device]

        why = "room for running requests" if params.by is None else "room for a prompt"
        self.tree.tenants.evict(self.tree.device, Decision.EVICTED_DEVICE, why, params.by, evict)
        freed = [tier.pool.available_size() - size for tier, size in before.items()]
        return EvictResult(num_tokens_evicted=freed[-1], mamba_num_evicted=sum(freed[:-1]))

    def supports_mamba(self) -> bool:
        """True if the cache keeps recurrent states."""
        return bool(self.tree.components)

    @property
    def mamba_snapshot_alignment(self) -> int | None:
        """Snapshots are taken at multiples of so many tokens; None: the cache keeps no
        recurrent states."""
        return next((component.alignment for component in self.tree.components), None)

    def pin_state(self, node: TreeNode) -> int:
        """Keep the recurrent state at the end of `node`, whose pages are locked, on the device.

        Returns:
            Slot of the state, which may still be being loaded; 0: there is no state, and none is
            pinned.
        """
        slots = [slot for state in node.states if (slot := state.value) is not None]
        if not slots or len(slots) < len(node.states):
            return 0
        for component in self.tree.components:
            component.device.lock(node)
        return int(slots[0])

    def unpin_state(self, node: TreeNode) -> None:
        """Undo one `pin_state` that returned a slot."""
        for component in self.tree.components:
            component.device.unlock(node)

    def mamba_evictable_size(self) -> int:
        """States on the device that can be evicted."""
        return sum(component.device.evictable for component in self.tree.components)

    def mamba_slots(self) -> dict[str, int]:
        """Number of slots of recurrent states on the device: all, free, evictable and used ones;
        empty if the model has none."""
        pool = self._mamba_pool
        if pool is None:
            return {}
        free, evictable = pool.available_size(), self.mamba_evictable_size()
        return {
            "max_mamba_cache_size": pool.size,
            "free_mamba_slots": free,
            "evictable_mamba_slots": evictable,
            "used_mamba_slots": pool.size - free - evictable,
        }

    def count_lookup(self, lookup: Lookup) -> None:
        """Count a looked-up prompt for the metrics, before its own pages enter the tree."""
        if self.state_metrics is not None:
            self.state_metrics.cut.inc(lookup.cut)
        key, by_tier = lookup.key, (lookup.device, lookup.host, lookup.storage)
        self.tree.tenants.count(key.extra_key, lookup.prompt_tokens, by_tier)
        known = sum(by_tier) + lookup.cut
        # The last token is always computed.
        is_whole = known >= len(key) - 1 or self.disable
        reach = known if is_whole else self.tree.departed.reach(key, known)
        self.metrics.count_missed(
            evicted=reach - known,
            no_state=lookup.cut,
            logprobs=lookup.prompt_tokens - len(key),
            new=len(key) - reach,
        )

    def read_metrics(self) -> None:
        """Update the gauges, before the metrics are read."""
        self.tree.tenants.read_metrics()
        if self.state_metrics is not None and (slots := self.mamba_slots()):
            self.state_metrics.set_device(slots)

    def evictable_size(self) -> int:
        """Device tokens in the tree that no lock protects."""
        return self.tree.device.evictable

    def protected_size(self) -> int:
        """Device tokens in the tree under a lock."""
        return self.tree.device.protected

    def total_size(self) -> int:
        """Device tokens in the tree."""
        return self.tree.device.evictable + self.tree.device.protected

    def nodes(self) -> Iterable[TreeNode]:
        """Every node but the root, parents before children."""
        return self.tree.nodes()

    def all_values_flatten(self) -> torch.Tensor:
        """int64: all device slots in the tree."""
        return self.tree.values_of(list(self.nodes()))

    def pretty_print(self) -> None:
        """Print the tree, one node per line, indented by depth."""
        depth = {self.root_node.id: -1}
        for node in self.nodes():
            assert node.parent is not None
            depth[node.id] = depth[node.parent.id] + 1
            print("  " * depth[node.id] + repr(node))  # noqa: T201
        print(f"device tokens: {self.total_size()}")  # noqa: T201

    def check_integrity(
        self,
        request_slots: Iterable[torch.Tensor] = (),
        request_states: Iterable[torch.Tensor] = (),
    ) -> None:
        """`integrity_parts`, all at once."""
        do_all(self.integrity_parts(request_slots, request_states))

    def integrity_parts(
        self,
        request_slots: Iterable[torch.Tensor] = (),
        request_states: Iterable[torch.Tensor] = (),
    ) -> Parts:
        """Assert every invariant of nodes, locks and page ownership, in parts. Nothing may change
        between two parts.

        Args:
            request_slots: For each request that holds slots, the int64 slots that it owns itself
                (those after its `cache_protected_len`).
            request_states: For each request the int64 slots of the states that it owns.

        Raises:
            AssertionError: Names the page and the tier without an owner, or with two.
        """
        owned: list[tuple[PoolTier, str, torch.Tensor]] = [
            (self.tree.device, f"request {index}", slots)
            for index, slots in enumerate(request_slots)
        ]
        states = list(enumerate(request_states))
        for component in self.tree.components:
            owned += [(component.device, f"request {index}", slots) for index, slots in states]
        yield from self.tree.check([*owned, *self._owned_by_operations()])

    def _owned_by_operations(self) -> Iterable[tuple[PoolTier, str, torch.Tensor]]:
        """Slots that operations of lower tiers own and no node has: the tier, the owner, and int64
        slots."""
        return ()


def make_tree(params: CacheInitParams) -> PrefixTree:
    """The empty tree of a cache built from `params`."""
    components = []
    pool = mamba_pool_of(params)
    if pool is not None and not params.disable:
        alignment = params.mamba_snapshot_alignment or params.page_size
        metrics = StateMetrics(params.metrics_registry)
        most, pages_alone = params.mamba_max_states_per_path, params.pages_alone
        components.append(StateComponent(pool, alignment, metrics, most, pages_alone=pages_alone))
    tree = PrefixTree(
        params.token_to_kv_pool_allocator,
        params.page_size,
        params.eviction_policy,
        components,
        KVEventLog(params.page_size, announce_keyed=params.announce_keyed)
        if params.enable_kv_cache_events
        else None,
        SessionHints(params.session_share, params.session_ttl, params.metrics_registry),
        TenantUse(params.metrics_registry, params.tenant_key, params.bytes_per_token),
    )
    if params.held_pages is not None:
        tree.add_listener(params.held_pages)
    return tree


def mamba_pool_of(params: CacheInitParams) -> StatePool | None:
    """The pool of the model's recurrent states on the device; None: the model has none."""
    return state_pool(() if params.model_pools is None else params.model_pools.pools)
