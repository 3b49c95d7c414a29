"""A prefix cache with real pools and made-up KV, for tests of the tiers without a model.

`CacheRig.run` takes a prompt through the steps of a request as the scheduler does: match, prefetch,
load back, compute, insert. The KV that it "computes" depends on all tokens up to a position, so
that reusing a prefix reveals any wrong, stale or misplaced page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.session_hints import Session
from sglang.srt.mem_cache.tree.tree_node import TreeNode

RIG_DEVICE = detect_device()
"""A GPU if there is one."""
RIG_LAYOUTS = ("layer_first", "page_first", "page_first_direct") + (
    ("page_first_kv_split",) if RIG_DEVICE == "cpu" else ()
)
"""Layouts of L2 that the device supports."""

_LAYERS, _HEADS, _DIM = 3, 2, 4
_DEADLINE_S = 60.0


@dataclass(kw_only=True)
class HiCacheSettings:
    """The server arguments that `HiRadixCache` reads, with small defaults."""

    hicache_ratio: float = 4.0
    hicache_size: float = 0.0
    hicache_host_memory_fraction: float | None = None
    hicache_host_memory_mode: str = "cache"
    hicache_write_policy: str = "write_through"
    hicache_io_backend: str = "auto"
    hicache_mem_layout: str = "auto"
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str = "wait_complete"
    hicache_storage_prefetch_retry_max_attempts: int | None = None
    hicache_storage_prefetch_retry_poll_interval: int | None = None
    hicache_storage_backend_extra_config: str | None = None
    served_model_name: str | None = "rig"


SESSION_TTL: Final = 60.0
"""Seconds for which rigs keep a session's prefix."""


@dataclass(eq=False)
class RigRequest:
    """A `CacheableRequest`."""

    rid: str
    extra_key: str | None
    kv_committed_ids: list[int]
    prefix_indices: torch.Tensor
    last_node: TreeNode
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    priority: int = 0
    session: Session | None = None

    @property
    def kv_committed_len(self) -> int:
        return len(self.kv_committed_ids)


@dataclass(frozen=True)
class Reused:
    """Tokens of a prompt's prefix, by the tier that they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass
class CacheRig:
    """The tiers of one engine; L1 alone if `settings` is None."""

    l1_pages: int = 16
    page_size: int = 4
    settings: HiCacheSettings | None = None
    eviction_policy: str = "lru"
    weights_identity: str = "weights"
    dtype: torch.dtype = torch.float32
    group: RankGroup = field(default_factory=SingleRank)
    kv_events: bool = False
    announce_keyed: bool = False
    held_pages: HeldPages | None = None
    session_share: float = 0.0
    radix_cache_backend: str | None = None
    head_dim: int = _DIM
    pages_alone: bool = False
    tree: RadixCache = field(init=False)

    def __post_init__(self) -> None:
        mark_device_set(RIG_DEVICE)
        size = self.l1_pages * self.page_size
        self.pool = self.make_pool(size)
        self.allocator: TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator
        if self.page_size == 1:
            self.allocator = TokenToKVPoolAllocator(size, self.dtype, RIG_DEVICE, self.pool)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                size, self.page_size, self.dtype, RIG_DEVICE, self.pool
            )
        self.rows = ReqToTokenPool(32, 4096, RIG_DEVICE)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            eviction_policy=self.eviction_policy,
            weights_identity=self.weights_identity,
            model_pools=self.model_pools(),
            mamba_snapshot_alignment=self.snapshot_alignment(),
            pages_alone=self.pages_alone,
            tp_cache_group=self.group,
            enable_kv_cache_events=self.kv_events,
            announce_keyed=self.announce_keyed,
            held_pages=self.held_pages,
            session_share=self.session_share,
            session_ttl=SESSION_TTL,
        )
        self.tree = create_tree_cache(
            TreeCacheBuildContext(
                server_args=self.settings or HiCacheSettings(),
                params=params,
                enable_hierarchical_cache=self.settings is not None,
                radix_cache_backend=self.radix_cache_backend,
            )
        )
        self._next_rid = self._arrivals = 0
        self._load = -1
        """The newest load that no forward has waited for."""

    def make_pool(self, size: int) -> KVCache:
        """The pool whose slots requests own, `size` of them."""
        return MHATokenToKVPool(
            size, self.page_size, self.dtype, _HEADS, self.head_dim, _LAYERS, RIG_DEVICE
        )

    def model_pools(self) -> ModelPools | None:
        """Pools of the rig's model by kind of state; None: keys and values alone."""
        return None

    def snapshot_alignment(self) -> int | None:
        """Tokens between snapshots, for a model with recurrent states."""
        return None

    @property
    def hi(self) -> HiRadixCache:
        assert isinstance(self.tree, HiRadixCache)
        return self.tree

    def hi_settings(self) -> HiCacheSettings:
        """The settings of the lower tiers, for a second engine."""
        assert self.settings is not None
        return self.settings

    # ---- one request ------------------------------------------------------------------------

    def run(
        self, tokens: Sequence[int], extra_key: str | None = None, session: str | None = None
    ) -> Reused:
        """Run a whole request: check its reused prefix, and insert its pages into the tree."""
        request, reused = self.start(tokens, extra_key)
        request.session = None if session is None else Session(extra_key, extra_key, session)
        self.finish(request)
        return reused

    def start(
        self, tokens: Sequence[int], extra_key: str | None = None
    ) -> tuple[RigRequest, Reused]:
        """Match, prefetch, load and compute. The request then holds its slots."""
        ids = list(tokens)
        rid = f"r{self._next_rid}"
        self._next_rid += 1
        self.arrive(rid, ids, extra_key)
        self.until(lambda: self.may_admit(rid))
        return self.admit(rid, ids, extra_key)

    def may_admit(self, rid: str) -> bool:
        """True if request `rid` waits for no read any more. Issues the loads of its first parts."""
        if self.tree.check_prefetch_progress(rid):
            return True
        self._issue_loads()
        return False

    def _issue_loads(self) -> None:
        if (load := self.tree.ready_to_load_host_cache()) != -1:
            self._load = load

    def await_loads(self) -> None:
        """Let the next forward wait for all loads."""
        self._issue_loads()
        if isinstance(self.tree, HiRadixCache):
            self.tree.cache_controller.layer_done_counter.set_consumer(self._load)
        self._load = -1

    def arrive(
        self, rid: str, ids: list[int], extra_key: str | None = None, *, only_join: bool = False
    ) -> None:
        """Match on arrival and start the prefetch."""
        match = self.tree.match_prefix(MatchPrefixParams(RadixKey(ids[:-1], extra_key)))
        found = len(match.device_indices) + match.host_hit_length
        self.tree.note_waiting(rid, self._arrivals, match.last_host_node)
        self._arrivals += 1
        if isinstance(self.tree, HiRadixCache):
            self.tree.prefetch_from_storage(
                rid,
                match.last_host_node,
                ids[found:-1],
                extra_key=extra_key,
                only_join=only_join,
            )

    def admit(
        self, rid: str, ids: list[int], extra_key: str | None = None
    ) -> tuple[RigRequest, Reused]:
        """Load the prefix from the tiers, and compute the rest."""
        tree = self.tree
        match = tree.match_prefix(MatchPrefixParams(RadixKey(ids[:-1], extra_key)))
        prefix, node = match.device_indices, match.last_device_node
        tree.inc_lock_ref(node)
        loaded = prefix[:0]
        if match.host_hit_length:
            loaded, lower = tree.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length)
            )
            tree.inc_lock_ref(lower)
            tree.dec_lock_ref(node)
            node = lower
        tree.note_scheduled(rid)
        self.await_loads()
        storage = min(tree.pop_prefetch_loaded_tokens(rid), len(loaded))
        reused = Reused(len(prefix), len(loaded) - storage, storage)
        request = RigRequest(rid, extra_key, ids, torch.cat([prefix, loaded]), node)
        request.cache_protected_len = reused.total
        self._compute(request)
        return request, reused

    def finish(self, request: RigRequest, *, is_insert: bool = True) -> None:
        """Insert the request's pages into the tree, and free its row."""
        self.tree.cache_finished_req(request, is_insert)
        self.rows.free(request)

    def _compute(self, request: RigRequest) -> None:
        ids, known = request.kv_committed_ids, request.cache_protected_len
        needed = -(-(len(ids) - known) // self.page_size) * self.page_size
        # Pages under backup are locked, so that room may come with a later tick.
        self.until(lambda: self._make_room(needed))
        slots = self.allocator.alloc(needed)
        assert slots is not None, "the rig's L1 is too small for this prompt"
        assert self.rows.alloc([request]) is not None
        row = torch.cat([request.prefix_indices, slots[: len(ids) - known]])
        self.rows.write((request.req_pool_idx, slice(0, len(ids))), row)
        self.use_slots(row, known, expected_kv(ids, request.extra_key).to(RIG_DEVICE))

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        """Check what the first `known` slots of a request hold, and store the rest, layer by layer.

        Args:
            row: int64 `[n]`: a request's slots.
            wanted: float64 `[n]`: what they are made from (`expected_kv`).
        """
        for layer in range(_LAYERS):
            keys, values = self.pool.get_kv_buffer(layer)
            assert torch.equal(keys[row[:known]], self._as_rows(wanted[:known] + layer))
            assert torch.equal(values[row[:known]], self._as_rows(-wanted[:known] - layer))
            new = self._as_rows(wanted[known:] + layer)
            self.pool.set_kv_buffer(layer, row[known:], new, -new)

    def _as_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`[n, heads, dim]`: each number fills a slot."""
        rows = values.to(self.dtype)[:, None, None]
        return rows.expand(-1, _HEADS, self.head_dim).contiguous()

    def _make_room(self, tokens: int) -> bool:
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        return self.allocator.available_size() >= tokens

    # ---- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """One scheduler tick."""
        self.tree.check_hicache_events()

    def until(self, condition: Callable[[], bool]) -> None:
        """Tick until `condition` holds. Raises AssertionError after a while."""
        deadline = time.monotonic() + _DEADLINE_S
        pause = 0.0005
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened; busy: {self.tree.is_busy()}"
            self.tick()
            time.sleep(pause)
            pause = min(1.1 * pause, 0.01)

    def settle(self) -> None:
        """Tick until no operation is under way, and check page ownership."""
        self.until(lambda: not self.tree.is_busy())
        self.tree.check_integrity()

    def flush(self) -> None:
        """Empty L1 and L2, as an idle server does."""
        self.settle()
        self.tree.reset()
        self.allocator.clear()

    def close(self) -> None:
        self.tree.shutdown()


def expected_kv(ids: Sequence[int], extra_key: str | None) -> torch.Tensor:
    """float64 `[len(ids)]`: a number for each position that depends on all tokens up to it."""
    value = sum((extra_key or "").encode("utf-8", "surrogatepass"))
    values = []
    for token in ids:
        value = (value * 31 + token + 1) % 251
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)


class HeldStream:
    """Replaces a `CopyStream`: copies wait until `run`."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.at_once = False

    def submit(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        if self.at_once:
            self.run()

    def run(self, count: int | None = None) -> None:
        """Run the first `count` copies, or all."""
        chosen, self.waiting = self.waiting[:count], self.waiting[len(self.waiting[:count]) :]
        for work in chosen:
            work()
        device_runtime(RIG_DEVICE).synchronize()

    def close(self) -> None:
        self.run()


class HeldReads:
    """Counts the pages that are read from a tree's L3, and can hold reads back.

    A context manager, which releases held reads at its end.

    Args:
        tree: A tree with an attached L3.
        pages_per_call: Most pages of one get; None: the engine's number.
        calls: Gets that are allowed for now; None: any number.
    """

    def __init__(
        self, tree: HiRadixCache, *, pages_per_call: int | None = None, calls: int | None = None
    ) -> None:
        attached = tree.store.attached
        assert attached is not None and attached.client is not None
        self.pages = 0
        """Pages requested so far, without those of held reads."""
        self._get = attached.client.batch_get_v2
        self._permits = threading.Semaphore(calls or 0)
        self._is_open = calls is None
        attached.client.batch_get_v2 = self._held_get  # type: ignore[method-assign]
        if pages_per_call is not None:
            attached.pages_per_read = pages_per_call

    def __enter__(self) -> HeldReads:
        return self

    def __exit__(self, *error: object) -> None:
        self.open()

    def let(self, calls: int) -> None:
        """Allow `calls` more gets."""
        self._permits.release(calls)

    def open(self) -> None:
        """Allow all gets."""
        self._is_open = True
        self._permits.release()

    def _held_get(self, transfers: list[PoolTransfer], extra_info: Any = None) -> Any:
        assert self._is_open or self._permits.acquire(timeout=_DEADLINE_S)
        self.pages += len(transfers[0].keys or ())
        return self._get(transfers, extra_info)
