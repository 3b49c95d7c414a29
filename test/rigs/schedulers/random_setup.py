"""Configurations of the random driver: chosen by a seed, with tiers too small for the work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from rigs.mixed.held_copies import HeldCopies
from rigs.models.grammar_rig import HandBackend
from rigs.models.letters import Letters
from rigs.schedulers.checkable_model import VOCAB_SIZE
from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.lagging_device import LaggingRuntime
from rigs.stores.object_store import FILE, IN_PLACE, PLAIN, STORE_KEY, ObjectStore
from sglang.srt.arg_groups import checks
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.host.host_layout import AUTO, HostLayout
from sglang.srt.mem_cache.host.host_pool_group import HostPoolGroup
from sglang.srt.mem_cache.host.page_copier import PageLoad
from sglang.srt.mem_cache.l2 import cache_controller
from sglang.srt.mem_cache.l2.host_backup import WRITE_POLICIES
from sglang.srt.mem_cache.l3 import (
    circuit_breaker,
    prefetch_cost,
    storage_backup,
    storage_reads,
    storage_writes,
    store_calls,
)
from sglang.srt.mem_cache.l3.buffered_backup import BufferedBackup
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree import pool_tier
from sglang.srt.speculative import verify_graphs

_EVICTION: Final = ("lru", "lfu", "fifo", "priority", "slru")
_LAYOUTS: Final = (AUTO, *(layout.value for layout in HostLayout))


def speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Arguments of a rig whose decode steps have that many tokens for each request."""
    if num_draft_tokens == 1:
        return {}
    return {"speculative_algorithm": "NEXTN", "speculative_num_steps": num_draft_tokens - 1}


def draw_group(rng: random.Random, page_size: int) -> int:
    """Tokens of a group, see `CheckableState`: mostly several, of which a page has one or more."""
    return rng.choice([0, *(size for size in (2, 4, 16, 64) if page_size % size == 0)])


_SESSION_TICKS: Final = 60


def text_args() -> dict[str, Any]:
    """Arguments of a rig whose requests have stop strings and grammars."""
    backend = partial(HandBackend, vocab_size=VOCAB_SIZE)
    return {"tokenizer": Letters(), "grammar_backend": backend}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The configuration of one run. Lengths are pages, unless the name says tokens."""

    page_size: int
    l1_pages: int
    tiers: int
    l2_ratio: float
    max_requests: int
    max_queued: int
    chunk_tokens: int
    max_prefill_tokens: int
    schedule_policy: str
    conservativeness: float
    eviction: str
    write_policy: str
    prefetch_policy: str
    layout: str
    overlap: bool
    stream_interval: int
    target_inter_token_latency: float | None
    """In ticks."""
    backend: str
    pass_prefix_keys: bool
    verify_checksum: bool
    threshold_pages: int
    slow_copies: float
    """Chance that a copy between L1 and L2 is slow."""
    is_sparse: bool
    """See `CheckableState`."""
    num_states: int
    """See `CheckableState`."""
    alignment: int
    """Tokens between positions for snapshots."""
    track_interval: int
    """Tokens between snapshots in decoding; 0: none are taken."""
    heads: int
    """Heads of a rank; 0: all ranks have the same head."""
    writes_like_gpu: bool
    """True if writes to L2 begin when the CPU knows the slots, and are issued in pieces."""
    most_lag_s: float
    """See `LaggingDevice`; 0: steps run when they are launched."""
    damages_l2: bool = False
    """True if pages of L2 change their bytes now and then."""
    num_draft_tokens: int = field(default=1, repr=False)
    """Tokens of a decode step for each request; above 1, all but one are drafts."""
    group: int = field(default=0, repr=False)
    """See `CheckableState`."""
    is_buffer: bool = field(default=False, repr=False)
    """True if L2 is a buffer before L3, which the driver attaches and detaches."""
    is_repeatable: bool = field(default=False, repr=False)
    """See `CheckableState`."""
    max_states_per_path: int = field(default=-1, repr=False)
    is_held: bool = field(default=False, repr=False)
    """True if copies, and steps that lag, run when the seed says so."""
    retries: int = field(default=0, repr=False)
    """Repetitions of a look-up in L3 that missed."""

    @classmethod
    def draw(cls, rng: random.Random) -> Setup:
        """Choose everything."""
        setup = cls._draw_dense(rng)
        has_states = rng.random() < 0.65
        is_sparse = rng.random() < 0.25
        rows, page = setup.max_requests, setup.page_size
        num_states = rng.choice((2, rows + 1, rows + 3, 3 * rows + 2, 40))
        alignment = page * rng.choice((1, 1, 2, 3))
        interval = alignment * rng.choice((0, 1, 2, 5))
        layout = setup.layout
        if has_states and layout == HostLayout.PAGE_FIRST_KV_SPLIT:
            layout = AUTO  # States have no such layout.
        return dataclasses.replace(
            setup,
            layout=layout,
            backend=FILE if rng.random() < 0.2 else setup.backend,
            is_sparse=is_sparse,
            num_states=num_states if has_states else 0,
            alignment=alignment if has_states else page,
            track_interval=interval if has_states else 0,
            heads=rng.choice((0, 1, 1, 2)),
            writes_like_gpu=rng.random() < 0.4,
            most_lag_s=rng.choice((0.0, 0.001, 0.004)) if setup.overlap else 0.0,
        )._with_damage_and_drafts()

    def _with_damage_and_drafts(self) -> Setup:
        """The setup, maybe with damage in L2, if each page there has a checksum in L3 too, and
        maybe with drafts."""
        rng = random.Random(repr(self))  # Later draws stay those of the seed.
        # Damage must not count as another page under the key; L3 may come to two tiers too.
        has_checksums = self.verify_checksum and self.heads < 2
        damages = rng.random() < 0.5 and self.tiers > 1 and has_checksums
        drafts = rng.choice((1, 1, 2, 4, 9))
        group = draw_group(rng, self.page_size) if self.num_states and drafts == 1 else 0
        is_buffer = self.tiers == 3 and rng.random() < 0.4
        return dataclasses.replace(
            self,
            damages_l2=damages,
            num_draft_tokens=drafts,
            group=group,
            is_buffer=is_buffer,
            write_policy=rng.choice(BufferedBackup.POLICIES) if is_buffer else self.write_policy,
            is_repeatable=bool(self.num_states) and drafts == 1 and rng.random() < 0.5,
            max_states_per_path=rng.choice((-1, 1, 2)) if self.num_states else -1,
            is_held=rng.random() < 0.4,
            retries=rng.choice((0, 0, 1, 3)),
        )

    @classmethod
    def _draw_dense(cls, rng: random.Random) -> Setup:
        page = rng.choice((1, 2, 4, 16, 64))
        few = rng.random() < 0.7
        l1_pages = rng.randint(9, 16) if few else rng.randint(20, 60)
        if page < 4:
            l1_pages *= 4
        chunk = rng.choice((-1, page, 2 * page, 5 * page))
        return cls(
            page_size=page,
            l1_pages=l1_pages,
            tiers=rng.choice((1, 2, 3, 3, 3, 3)),
            l2_ratio=rng.choice((0.5, 0.15, 1.5, 8.0)),
            max_requests=rng.choice((1, 2, 4, 8)),
            max_queued=rng.choice((8, *(1000,) * 7)),
            chunk_tokens=chunk,
            max_prefill_tokens=rng.choice((page, 3 * page, 16384)),
            schedule_policy=rng.choice(("fcfs", "lpm")),
            conservativeness=rng.choice((0.01, 0.3, 1.0)),
            eviction=rng.choice(_EVICTION),
            write_policy=rng.choice(WRITE_POLICIES),
            prefetch_policy=rng.choice(("best_effort", "wait_complete", "timeout", "timeout")),
            layout=rng.choice(_LAYOUTS),
            overlap=rng.random() < 0.5,
            stream_interval=rng.choice((1, 3)),
            target_inter_token_latency=rng.choice((None, None, 1.5, 4.0)),
            backend=rng.choice((PLAIN, IN_PLACE)),
            pass_prefix_keys=rng.random() < 0.3,
            verify_checksum=rng.random() < 0.8,
            threshold_pages=rng.choice((1, 1, 2)),
            slow_copies=rng.choice((0.0, 0.1, 0.5)),
            is_sparse=False,
            num_states=0,
            alignment=page,
            track_interval=0,
            heads=0,
            writes_like_gpu=False,
            most_lag_s=0.0,
        )

    @property
    def tick_s(self) -> float:
        """Seconds by which the rig's clock advances in each step. A prompt is read in parts for as
        long as the clock gives it, so that the clock must not outrun the store."""
        return 0.001 if self.tiers == 3 else 1.0

    @property
    def write_policies(self) -> tuple[str, ...]:
        """Write policies that an operator may choose."""
        return BufferedBackup.POLICIES if self.is_buffer else WRITE_POLICIES

    @property
    def state(self) -> CheckableState:
        """State that the model keeps, of all heads."""
        return CheckableState(
            is_sparse=self.is_sparse,
            num_states=self.num_states,
            alignment=self.alignment,
            group=self.group,
            is_repeatable=self.is_repeatable,
        )

    def rig_args(self) -> dict[str, Any]:
        """Arguments of `CheckableRig`."""
        latency = self.target_inter_token_latency
        args: dict[str, Any] = {
            "state": self.state,
            "heads": self.heads,
            "most_lag_s": self.most_lag_s,
            **text_args(),
            "tolerates_damage": self.damages_l2,
            "pool_tokens": self.l1_pages * self.page_size,
            "max_requests": self.max_requests,
            "overlap": self.overlap,
            "page_size": self.page_size,
            "max_queued_requests": self.max_queued,
            "chunked_prefill_size": self.chunk_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "schedule_policy": self.schedule_policy,
            "schedule_conservativeness": self.conservativeness,
            "radix_eviction_policy": self.eviction,
            "stream_interval": self.stream_interval,
            "target_inter_token_latency": latency and latency * self.tick_s,
            "mamba_max_states_per_path": self.max_states_per_path,
            "keep_session_share": 0.5,
            "keep_session_seconds": _SESSION_TICKS * self.tick_s,
        }
        if self.track_interval:
            args["mamba_track_interval"] = self.track_interval
        elif self.num_states:
            args["mamba_scheduler_strategy"] = "no_buffer"
        args |= speculation(self.num_draft_tokens)
        if self.tiers > 1:
            args |= {
                "enable_hierarchical_cache": True,
                # L2 has room for a state, if there are states.
                "hicache_ratio": max(self.l2_ratio, 1.01 / (self.num_states or 100)),
                "hicache_host_memory_mode": "buffer_only" if self.is_buffer else "cache",
                "hicache_write_policy": self.write_policy,
                "hicache_mem_layout": self.layout,
                "hicache_storage_prefetch_policy": self.prefetch_policy,
                "hicache_storage_prefetch_retry_max_attempts": self.retries,
                "hicache_storage_prefetch_retry_poll_interval": 1,
            }
        return args

    def slow_down(self, tree: RadixCache, rng: random.Random) -> None:
        """Delay some copies of `tree`, if it makes any, as drawn from `rng`."""
        if isinstance(tree, HiRadixCache) and self.slow_copies:
            _slow_down_copies(tree, rng, self.slow_copies)

    def extra_config(self, store: ObjectStore, attn_tp_size: int) -> str:
        """The configuration of L3 for `attn_tp_size` ranks with different heads. Each head is an
        object of its own where a rank has several."""
        config: dict[str, Any] = {
            STORE_KEY: store.name,
            "prefetch_threshold": self.threshold_pages * self.page_size,
            "prefetch_timeout_base": 0.05 if self.is_buffer else 0.01,
            "prefetch_timeout_max": 0.2 if self.is_buffer else 0.05,
            "hicache_storage_pass_prefix_keys": self.pass_prefix_keys,
            "verify_checksum": self.verify_checksum,
        }
        if self.heads > 1:
            config["tp_lcm_size"] = self.heads * attn_tp_size
        return json.dumps(config)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[HeldCopies | None]:
        """Let the engine write to L2 as this setup says, in all rigs of this process. Yields the
        work that it holds; None: it holds none."""
        with contextlib.ExitStack() as stack:
            held = None
            if self.writes_like_gpu:
                stack.enter_context(
                    patch.object(HostPoolGroup, "prefers_cpu_slots", lambda *_: True)
                )
                stack.enter_context(patch.object(cache_controller, "_PAGES_AT_ONCE", 2))
            if self.is_buffer:
                stack.enter_context(buffers_without_store())
            if self.damages_l2:
                stack.enter_context(envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0))
            if self.is_held:
                lagging = LaggingRuntime if self.most_lag_s else None
                held = stack.enter_context(HeldCopies(lagging))
            elif self.most_lag_s:
                stack.enter_context(LaggingRuntime.as_cpu())
            # Some batches of most runs are too large to verify.
            largest = max(1, self.max_requests * 3 // 4)
            most_tokens = largest * self.num_draft_tokens
            stack.enter_context(patch.object(verify_graphs, "MAX_TOKENS", most_tokens))
            yield held


def buffers_without_store() -> AbstractContextManager[object]:
    """Let servers start with a buffer and without the store, which the driver attaches."""
    return patch.object(checks, "_check_buffer", lambda args: iter(()))


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Scale the engine's timers to ticks of a millisecond, and its reserves to tiny pools."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (storage_writes, "_GATHER_S", 0.002),
            (store_calls, "_STUCK_AFTER_S", 0.03),
            (store_calls, "_SILENT_AFTER_S", 0.004),
            (store_calls, "_FIRST_GET_S", 0.004),
            (storage_reads, "_CHECK_PAUSE_S", 0.0),
            (storage_reads, "_LONGEST_CHECK_PAUSE_S", 0.05),
            (circuit_breaker, "_FIRST_PAUSE_S", 0.004),
            (circuit_breaker, "_LONGEST_PAUSE_S", 0.05),
            (circuit_breaker, "PERIOD_S", 0.05),
            (storage_backup, "_CHECK_EVERY", 5),
            (prefetch_cost, "_PROBE_EVERY", 4),
            (pool_tier, "LEAST_LEAVING", 8),
        ):
            stack.enter_context(patch.object(module, name, value))
        # The pools have kilobytes, and other tests may use the machine's memory.
        stack.enter_context(envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(0))
        yield


def _slow_down_copies(tree: HiRadixCache, rng: random.Random, chance: float) -> None:
    """Delay some copies between L1 and L2, before and between their layers."""

    def pause() -> None:
        if rng.random() < chance:
            time.sleep(rng.random() * 0.003)

    def backup(*args: Any) -> None:
        pause()
        host_backup(*args)

    pool = tree.host_pool
    host_load, host_backup = pool.begin_load, pool.backup_from_device_all_layer
    vars(pool)["begin_load"] = lambda *args: _SlowLoad(host_load(*args), pause)
    vars(pool)["backup_from_device_all_layer"] = backup


class _SlowLoad(PageLoad):
    def __init__(self, load: PageLoad, pause: Callable[[], None]) -> None:
        self._load = load
        self._pause = pause

    def issue(self, layer: int) -> None:
        self._pause()
        self._load.issue(layer)
