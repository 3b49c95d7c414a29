"""Configurations of the random driver: chosen by a seed, with tiers too small for the work."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from sglang.srt.environ import envs
from sglang.srt.mem_cache.host.host_layout import AUTO, HostLayout
from sglang.srt.mem_cache.l3 import (
    circuit_breaker,
    fetch_choice,
    recent_timeouts,
    storage_io,
)
from sglang.srt.mem_cache.tiers import hiradix_cache
from sglang.srt.mem_cache.tiers.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tiers.host_tier_cache import WRITE_POLICIES
from sglang.test.object_store import IN_PLACE, PLAIN, STORE_KEY, ObjectStore

_EVICTION: Final = ("lru", "lfu", "fifo", "priority", "slru")
_LAYOUTS: Final = (AUTO, *(layout.value for layout in HostLayout))


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
    """Seconds; the rig's clock advances by one in each step."""
    backend: str
    pass_prefix_keys: bool
    verify_checksum: bool
    threshold_pages: int
    slow_copies: float
    """Chance that a copy between L1 and L2 is slow."""

    @classmethod
    def draw(cls, rng: random.Random) -> Setup:
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
            l2_ratio=rng.choice((0.5, 1.5, 3.0, 8.0)),
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
        )

    def server_args(self) -> dict[str, Any]:
        """The arguments for `SchedulerRig`."""
        args: dict[str, Any] = {
            "page_size": self.page_size,
            "max_queued_requests": self.max_queued,
            "chunked_prefill_size": self.chunk_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "schedule_policy": self.schedule_policy,
            "schedule_conservativeness": self.conservativeness,
            "radix_eviction_policy": self.eviction,
            "stream_interval": self.stream_interval,
            "target_inter_token_latency": self.target_inter_token_latency,
        }
        if self.tiers > 1:
            args |= {
                "enable_hierarchical_cache": True,
                "hicache_ratio": self.l2_ratio,
                "hicache_write_policy": self.write_policy,
                "hicache_mem_layout": self.layout,
                "hicache_storage_prefetch_policy": self.prefetch_policy,
            }
        return args

    def extra_config(self, store: ObjectStore) -> str:
        return json.dumps(
            {
                STORE_KEY: store.name,
                "prefetch_threshold": self.threshold_pages * self.page_size,
                "prefetch_timeout_base": 0.01,
                "prefetch_timeout_max": 0.05,
                "hicache_storage_pass_prefix_keys": self.pass_prefix_keys,
                "verify_checksum": self.verify_checksum,
            }
        )


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Scale the engine's timers to ticks of a millisecond, and its reserves to tiny pools."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (storage_io, "_GATHER_S", 0.002),
            (storage_io, "_STUCK_AFTER_S", 0.03),
            (storage_io, "_CHECK_PAUSE_S", 0.0),
            (storage_io, "_LONGEST_CHECK_PAUSE_S", 0.05),
            (circuit_breaker, "_FIRST_PAUSE_S", 0.004),
            (circuit_breaker, "_LONGEST_PAUSE_S", 0.05),
            (recent_timeouts, "PERIOD_S", 0.05),
            (hiradix_cache, "_CHECK_EVERY", 5),
            (fetch_choice, "_PROBE_EVERY", 4),
        ):
            stack.enter_context(patch.object(module, name, value))
        # The pools have kilobytes, and other tests may use the machine's memory.
        stack.enter_context(envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(0))
        yield


def slow_down_copies(tree: HiRadixCache, rng: random.Random, chance: float) -> None:
    """Delay some copies between L1 and L2, before and between their layers."""
    for name in ("load_to_device_per_layer", "backup_from_device_all_layer"):
        copy = getattr(tree.host_pool, name)

        def slow(*args: Any, copy: Callable[..., None] = copy) -> None:
            if rng.random() < chance:
                time.sleep(rng.random() * 0.003)
            copy(*args)

        setattr(tree.host_pool, name, slow)
