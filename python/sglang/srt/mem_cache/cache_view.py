"""Describes a cache as plain data for `GET /hicache`: no tokens, no text of prompts.

Threads: the scheduler's only. The cost grows with the operations in flight and with the prefixes
that are looked at (bounded), not with the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.tier_use import busiest_prefixes
from sglang.srt.utils.metrics import counts_by_label

_SHOWN_PREFIXES: Final = 12
_VERDICT_S: Final = 300.0
_THRASHING: Final = 0.5
"""Shares of the prompts' tokens that L2 brings and L1 evicts, above which L1 is too small; as in
the alert `DeviceCacheThrashes`."""
PLAIN_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "landed": "done",
        "miss": "not in the store",
        "short": "an earlier page was missing",
        "damaged": "damaged in the store",
        "late": "too slow",
        "overtaken": "cut: computing was faster",
        "no_state": "no recurrent state in the store",
        "revoked": "found too little to be worth reading",
        "unavailable": "the store is left alone after failures",
        "failed": "the store failed",
        "orphan": "the prefix before it is gone",
        "too_short": "too short to be worth reading",
        "duplicate": "the request is reading already",
        "joined": "waited for another request's read",
        "sample": "another request computes it",
        "queue_full": "too many under way",
        "slower_than_computing": "computing is faster",
        "no_host_memory": "no room in L2",
        "evicted": "left L2 before its turn",
    }
)
"""Texts for people in place of the labels of reads and writes of L3."""


def cache_view(cache: RadixCache) -> dict[str, Any]:
    """Tiers, prefixes and decisions of `cache`, and its L3.

    The `parts` of a tier add up to its `total` (None: unknown), in its `unit`. `in_flight` counts
    the tokens of copies and transfers to and from the tier that have not ended.
    """
    tiers, store, epoch = [_device(cache), *_device_states(cache)], None, 0
    if isinstance(cache, HiRadixCache):
        tiers += _lower_tiers(cache)
        store, epoch = _store(cache), cache.store.epoch
    return {
        "page_size": cache.page_size,
        "eviction_policy": cache.tree.eviction_policy,
        "tiers": tiers,
        "missed": counts_by_label(cache.metrics.missed),
        "tenants": cache.tree.tenants.latest(),
        "prefixes": busiest_prefixes(cache.tree, epoch, _SHOWN_PREFIXES),
        "decisions": cache.metrics.decisions.latest(),
        "store": store,
        "words": dict(PLAIN_WORDS),
    }


def verdicts(history: Sequence[Mapping[str, Any]], device_tokens: int) -> list[str]:
    """Faults of the tiers, each with its figures and its remedy.

    Args:
        history: Samples of `FlowHistory.latest`.
        device_tokens: Size of L1.
    """
    recent = [one for one in history if one["age_s"] <= _VERDICT_S]
    first, last = recent[0]["counts"], recent[-1]["counts"]
    moved = {name: count - first[name] for name, count in last.items()}
    sources = ("hit_device", "hit_host", "hit_storage", "computed")
    prompts = sum(moved.get(name, 0) for name in sources)
    loaded, evicted = moved.get("hit_host", 0), moved.get("evicted_device", 0)
    # A pool that has not been filled anew once may only be taking up another load.
    if evicted < device_tokens or min(loaded, evicted) <= _THRASHING * prompts:
        return []
    return [
        f"L1 is too small for the prompts in use: in the last {recent[0]['age_s']:.0f} s it "
        f"evicted {evicted:,} tokens, and {loaded / prompts:.0%} of the prompts' tokens had to be "
        "loaded again from L2. Raise --mem-fraction-static or --max-total-tokens, or let the "
        "router keep clients on their servers."
    ]


def _tier(
    name: str, where: str, unit: str, parts: dict[str, int] | None, in_flight: int = 0
) -> dict[str, Any]:
    total = None if parts is None else sum(parts.values())
    return {
        "name": name,
        "where": where,
        "unit": unit,
        "total": total,
        "parts": parts or {},
        "in_flight": in_flight,
    }


def _device(cache: RadixCache) -> dict[str, Any]:
    allocator = cache.tree.allocator
    free, locked = allocator.available_size(), cache.protected_size()
    evictable = cache.evictable_size()
    parts = {
        "requests": allocator.size - free - locked - evictable,
        "locked": locked,
        "evictable": evictable,
        "free": free,
    }
    in_flight = 0
    if isinstance(cache, HiRadixCache):
        copies = (*cache.host_backup.writing.values(), *cache.host_load.loading.values())
        in_flight = sum(len(copy.host_indices) for copy in copies)
    return _tier("L1", "device memory", "tokens", parts, in_flight)


def _device_states(cache: RadixCache) -> list[dict[str, Any]]:
    slots = cache.mamba_slots()
    if not slots:
        return []
    parts = {part: slots[f"{part}_mamba_slots"] for part in ("used", "evictable", "free")}
    return [_tier("L1 states", "device memory", "states", parts)]


def _lower_tiers(cache: HiRadixCache) -> list[dict[str, Any]]:
    use = cache.host_use()
    where = "host memory, a buffer" if cache.tree.host_is_buffer else "host memory"
    tiers = [_tier("L2", where, "tokens", use._asdict(), use.in_flight + use.locked)]
    for component in cache.tree.components:
        pool = component.host.pool
        free = pool.available_size()
        parts = {"used": pool.size - free, "free": free}
        tiers.append(_tier("L2 states", "host memory", "states", parts))
    store = cache.store
    if store.attached is not None:
        usage, backend = store.usage(), store.attached.backend
        where, parts_of_store = f"store ({backend})", None
        if usage is not None and usage.used_bytes is not None and usage.total_bytes is not None:
            free = max(0, usage.total_bytes - usage.used_bytes)
            parts_of_store = {"used": usage.used_bytes, "free": free}
            if backend == "file" and usage.num_objects is None:
                where += ", with all else on its disk"
        reads = sum(len(read.host_indices) for read in cache.storage_prefetch.table.operations)
        writes = sum(len(write.host_indices) for write in cache.storage_backup.under_way)
        tiers.append(_tier("L3", where, "bytes", parts_of_store, reads + writes))
    return tiers


def _store(cache: HiRadixCache) -> dict[str, Any] | None:
    store, attached = cache.store, cache.store.attached
    if attached is None:
        return None
    usage = store.usage()
    client, own = attached.client, store.namespace()
    return {
        "backend": attached.backend,
        "namespace": own.digest(),
        "pages_of": own.described(),
        "transport": None if client is None else client.describe_transport(),
        "prefetch_policy": store.prefetch_policy.value,
        "write_policy": cache.host_backup.write_policy,
        "is_available": store.available and attached.available and not attached.breaker.is_open,
        "is_left_alone": attached.breaker.is_open,
        "read_tokens_per_s": store.rates.reads,
        "prefill_tokens_per_s": store.rates.prefills,
        "stuck_tokens": cache.storage_prefetch.table.stuck_tokens(),
        "usage": None if usage is None else usage._asdict(),
        "servers": store.sharers(),
        "nodes": attached.usage.nodes.serving(),
        "reads": counts_by_label(cache.metrics.prefetch_outcomes),
        "writes": counts_by_label(cache.metrics.backup_outcomes),
    }
