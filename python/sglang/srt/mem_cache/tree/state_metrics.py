"""Prometheus metrics of recurrent states, for models that keep such states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from sglang.srt.utils.metrics import Counter, Gauge

_PLACES: Final = {
    "used": "that requests run on or keep for the cache, or that copies use",
    "evictable": "of the prefix cache that nothing uses",
    "free": "without an owner",
}


class StateMetrics:
    """Counters and gauges of states. A slot holds one state of all layers.

    Threads: the scheduler's only.

    Attributes:
        evicted: Evicted states by tier. A state that leaves a tier with its pages counts too, a
            flush does not.
        cut: Prompt tokens that were computed because a state was missing.
        snapshots: Snapshots by step (`prefill` or `decode`) and outcome (`taken` or `no_slot`).
    """

    def __init__(self, registry: CollectorRegistry | None) -> None:
        registry = registry or CollectorRegistry()
        self._registry = registry
        self._usage = Gauge(
            "sglang:mamba_usage", "Share of the device slots of states in use", registry=registry
        )
        self._slots = {
            place: Gauge(
                f"sglang:num_{place}_mamba_slots",
                f"Device slots of recurrent states {text}",
                registry=registry,
            )
            for place, text in _PLACES.items()
        }
        self.evicted = Counter(
            "sglang:evicted_mamba_slots",
            "Recurrent states that left a tier, by tier",
            ["tier"],
            registry=registry,
        )
        self.cut = Counter(
            "sglang:mamba_cut_tokens",
            "Prompt tokens whose pages a tier had, computed since no state follows them",
            registry=registry,
        )
        self.snapshots = Counter(
            "sglang:mamba_snapshots",
            "Snapshots of recurrent states that steps left, or for which no slot could be freed",
            ["step", "outcome"],
            registry=registry,
        )
        self._host: tuple[Gauge, Gauge] | None = None

    def set_device(self, slots: Mapping[str, int]) -> None:
        """Set the gauges of L1, before the metrics are read, to the present `mamba_slots` of the
        cache."""
        self._usage.set(slots["used_mamba_slots"] / slots["max_mamba_cache_size"])
        for place, gauge in self._slots.items():
            gauge.set(slots[f"{place}_mamba_slots"])

    def set_host(self, *, total: int, free: int) -> None:
        """The same for L2."""
        if self._host is None:
            self._host = (
                Gauge(
                    "sglang:hicache_host_used_mamba_slots",
                    "Host (L2) slots of recurrent states in use",
                    registry=self._registry,
                ),
                Gauge(
                    "sglang:hicache_host_total_mamba_slots",
                    "Host (L2) capacity in recurrent states",
                    registry=self._registry,
                ),
            )
        host_used, host_total = self._host
        host_used.set(total - free)
        host_total.set(total)
