"""Replays a trace on the real radix tree and the real allocators, without a model.

The device pool is the engine's class with one layer, one head and one dimension, so that a working
set of millions of tokens fits into memory; no KV is computed. The other steps are the scheduler's:
match, load back, evict, insert, release. Requests are served one after the other; a replay of a
trace caches no answers.

One thread, and the copy threads of the hierarchical cache. A replay waits for them after each
request, so that it always gives the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from sglang.benchmark.workload import TokenMaker, TraceRequest, TraceScale
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, make_allocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.tree.radix_key import RadixKey, TokenArray

NO_ANSWER: TokenArray = np.empty(0, np.uint32)
_VOCABULARY = np.arange(1, 1 << 16, dtype=np.uint32)


class Arrangement(StrEnum):
    """The division of the memory into tiers."""

    ONE_TIER = "one_tier"
    """L1 only."""
    WRITE_THROUGH = "write_through"
    """L1 and L2; every new page is written to L2, so that L2 duplicates L1."""
    WRITE_BACK = "write_back"
    """L1 and L2; a page is written to L2 when L1 evicts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Pages of each tier."""

    l1_pages: int
    l2_pages: int

    @classmethod
    def divide(
        cls, total_pages: int, arrangement: Arrangement, *, ratio: float, longest_pages: int
    ) -> CacheSizes:
        """Divide `total_pages` so that L2 is `ratio` times L1 and the longest request fits L1.

        Raises:
            ValueError: The pages cannot hold the longest request (and one page of L2).
        """
        two_tiers = arrangement is not Arrangement.ONE_TIER
        if total_pages < longest_pages + two_tiers:
            raise ValueError(
                f"{total_pages} pages: the longest request has {longest_pages}; take larger tiers"
            )
        if not two_tiers:
            return cls(l1_pages=total_pages, l2_pages=0)
        l1_pages = max(longest_pages, min(total_pages - 1, round(total_pages / (1 + ratio))))
        return cls(l1_pages=l1_pages, l2_pages=total_pages - l1_pages)


@dataclass(slots=True, kw_only=True)
class _HiCacheSettings:
    """The server arguments that `HiRadixCache` reads."""

    hicache_ratio: float
    hicache_write_policy: str
    hicache_size: float = 0.0
    hicache_host_memory_mode: str = "cache"
    hicache_host_memory_fraction: float | None = None
    hicache_io_backend: str = "auto"
    hicache_mem_layout: str = "auto"
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str = "timeout"
    hicache_storage_prefetch_retry_max_attempts: int | None = None
    hicache_storage_prefetch_retry_poll_interval: int | None = None
    hicache_storage_backend_extra_config: str | None = None
    served_model_name: str | None = "simulation"


@dataclass(slots=True)
class ReplayResult:
    """The tokens of a replay, by their source."""

    page_tokens: int = 0
    """Tokens in whole pages of the prompts: the most that an ideal cache could have."""
    device_tokens: int = 0
    host_tokens: int = 0
    seconds: float = 0.0

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens


class SimulatedCache:
    """L1 of one engine, and L2 if the arrangement has one.

    Call `close` at the end; it also checks page ownership.

    Args:
        sizes: Pages of the tiers.
        page_size: Tokens.
        policy: Order of eviction.
        arrangement: Arrangement of the tiers.
        rows: Rows of running requests; None: `serve` needs none.
        states: Recurrent states of the model in L1; None: it has none.
        alignment: Tokens between possible snapshots of recurrent states.
        max_per_path: See `StateComponent`.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        *,
        page_size: int,
        policy: str,
        arrangement: Arrangement,
        rows: ReqToTokenPool | None = None,
        states: MambaPool | None = None,
        alignment: int | None = None,
        max_per_path: int = -1,
    ) -> None:
        self._page_size = page_size
        pool = MHATokenToKVPool(
            sizes.l1_pages * page_size, page_size, torch.bfloat16, 1, 1, 1, "cpu"
        )
        self._allocator: BaseTokenToKVPoolAllocator = make_allocator(pool)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows or ReqToTokenPool(1, 1, "cpu"),
            token_to_kv_pool_allocator=self._allocator,
            page_size=page_size,
            eviction_policy=policy,
            model_pools=None if states is None else ModelPools.of([pool, states]),
            mamba_snapshot_alignment=alignment,
            mamba_max_states_per_path=max_per_path,
        )
        # Half a page more, so that rounding down gives exactly these pages.
        settings = _HiCacheSettings(
            hicache_ratio=(sizes.l2_pages + 0.5) / sizes.l1_pages,
            hicache_write_policy=arrangement.value,
        )
        self._tree = create_tree_cache(
            TreeCacheBuildContext(
                server_args=settings,
                params=params,
                enable_hierarchical_cache=arrangement is not Arrangement.ONE_TIER,
            )
        )
        if isinstance(self._tree, HiRadixCache):
            assert self._tree.host_pool.size == sizes.l2_pages * page_size

    def arrive(self, rid: str, number: int, ids: TokenArray) -> int:
        """Add a prompt to the queue as the `number`-th; `serve` it later with this `rid`.

        Returns:
            The tokens of the prompt that L1 and L2 have.
        """
        match = self._tree.match_prefix(MatchPrefixParams(RadixKey(ids)))
        self._tree.note_waiting(rid, number, match.last_host_node)
        return len(match.device_indices) + match.host_hit_length

    def serve(self, ids: TokenArray, priority: int = 0, rid: str = "") -> tuple[int, int]:
        """Serve one prompt. Returns its tokens that were in L1, and in L2."""
        return self.serve_with_answer(ids, NO_ANSWER, priority, rid)

    def serve_with_answer(
        self, prompt: TokenArray, answer: TokenArray, priority: int = 0, rid: str = ""
    ) -> tuple[int, int]:
        """Serve one prompt, and cache all tokens of `answer` behind it. Returns the prompt's tokens
        that were in L1, and in L2."""
        tree = self._tree
        match = tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
        tree.note_scheduled(rid)
        held, device = match.last_device_node, len(match.device_indices)
        tree.inc_lock_ref(held)
        loaded = match.device_indices[:0]
        if match.host_hit_length:
            loaded, lower = tree.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length)
            )
            tree.inc_lock_ref(lower)
            tree.dec_lock_ref(held)
            held = lower
            if isinstance(tree, HiRadixCache):
                counter = tree.cache_controller.layer_done_counter
                counter.set_consumer(tree.ready_to_load_host_cache())
        known = torch.cat([match.device_indices, loaded])
        key = RadixKey(prompt).page_aligned(self._page_size)
        slots = torch.cat([known, self._compute(len(key) - len(known))])
        tree.insert(InsertParams(key=key, value=slots, priority=priority))
        tree.dec_lock_ref(held)
        if len(answer):
            key = RadixKey(np.concatenate([prompt, answer])).page_aligned(self._page_size)
            slots = torch.cat([slots, self._compute(len(key) - len(slots))])
            tree.insert(InsertParams(key=key, value=slots, priority=priority))
        self._settle()
        return device, len(loaded)

    def close(self) -> None:
        """Check page ownership of all tiers, and end the copy threads."""
        try:
            self._tree.check_integrity()
        finally:
            self._tree.shutdown()

    def _compute(self, tokens: int) -> torch.Tensor:
        """Slots for `tokens` new tokens in whole pages."""
        # write_back can evict a parent only after the copy of its child has landed, perhaps not
        # before `evict` returns. The loop calls `evict` again, as the scheduler's next tick does.
        while (missing := tokens - self._allocator.available_size()) > 0:
            if not self._tree.evict(EvictParams(num_tokens=missing)).num_tokens_evicted:
                break
        slots = self._allocator.alloc(tokens)
        assert slots is not None, f"L1 has no room for {tokens} tokens"
        return slots

    def _settle(self) -> None:
        tree = self._tree
        if not isinstance(tree, HiRadixCache):
            return
        tree.check_hicache_events()
        controller = tree.cache_controller
        while tree.is_busy():
            for ack in (*controller.ack_write_queue, *controller.ack_load_queue):
                ack.finish_event.synchronize()
            tree.check_hicache_events()


class TracePrompts:
    """Token arrays of a trace's prompts. Each block is created once; 4 bytes per distinct token."""

    def __init__(self, trace: Sequence[TraceRequest], scale: TraceScale, page_size: int) -> None:
        self.page_size = page_size
        self.longest_pages = (
            max((scale.prompt_tokens(one) for one in trace), default=0) // page_size
        )
        """Whole pages of the longest prompt."""
        self._trace = trace
        self._scale = scale
        self._maker = TokenMaker(_VOCABULARY, scale.block_tokens)
        self._blocks: dict[int, TokenArray] = {}

    def __len__(self) -> int:
        return len(self._trace)

    def __iter__(self) -> Iterator[tuple[TokenArray, int]]:
        """(tokens, priority) of each request in order."""
        for request in self._trace:
            blocks = [self._block(one) for one in request.hash_ids]
            yield np.concatenate(blocks)[: self._scale.prompt_tokens(request)], request.priority

    def _block(self, block_id: int) -> TokenArray:
        found = self._blocks.get(block_id)
        if found is None:
            found = self._blocks[block_id] = self._maker.block(block_id)
        return found


def replay(cache: SimulatedCache, prompts: TracePrompts) -> Iterator[ReplayResult]:
    """Serve the prompts one after the other; yield the sums after each."""
    result = ReplayResult()
    started = time.perf_counter()
    for ids, priority in prompts:
        device, host = cache.serve(ids, priority)
        result.page_tokens += len(ids) // prompts.page_size * prompts.page_size
        result.device_tokens += device
        result.host_tokens += host
        result.seconds = time.perf_counter() - started
        yield result
