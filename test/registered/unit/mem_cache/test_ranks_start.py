"""Several ranks start their lower tiers alike, and change L3 alike, or none of them does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.caches.memory_ranks import run_on_ranks
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, StorageUnreachable
from sglang.srt.mem_cache.host import host_memory
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SLOT = 3 * 2 * 2 * 4 * 4
"""Bytes of a token: layers, keys and values, heads, elements, fp32."""


def outcome_of(work: Callable[[RankGroup], Any]) -> Callable[[RankGroup], str]:
    """Error of a rank's start as text; "" if it succeeds."""

    def run(group: RankGroup) -> str:
        try:
            rig = work(group)
        except ValueError as error:
            return str(error)
        rig.close()
        return ""

    return run


def start(group: RankGroup, **settings: Any) -> CacheRig:
    return CacheRig(l1_pages=8, group=group, settings=HiCacheSettings(**settings))


# -- L2 ------------------------------------------------------------------------------------------


@dataclass
class UnevenRig(CacheRig):
    """Each rank has another L1, so that ratios give it another L2."""

    def make_pool(self, size: int) -> KVCache:
        return super().make_pool(size + 4 * self.page_size * self.group.rank)


def test_host_pools_have_the_size_of_the_smallest() -> None:
    def work(group: RankGroup) -> tuple[int, int]:
        rig = UnevenRig(l1_pages=8, group=group, settings=HiCacheSettings(hicache_ratio=2.0))
        sizes = rig.pool.size, rig.hi.host_pool.size
        rig.close()
        return sizes

    assert run_on_ranks(3, work) == [(32, 64), (48, 64), (64, 64)]


def test_a_rank_that_cannot_allocate_ends_the_start_of_all_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate = HostTensorAllocator.allocate
    left: list[int] = []

    def work(group: RankGroup) -> CacheRig:
        rig = start(group)
        left.append(group.rank)
        return rig

    def refuses(self: HostTensorAllocator, *args: Any, **kwargs: Any) -> torch.Tensor:
        if refused.pop("once", False):
            raise MemoryError("no more pages")
        return allocate(self, *args, **kwargs)

    refused = {"once": True}
    monkeypatch.setattr(HostTensorAllocator, "allocate", refuses)
    told = run_on_ranks(3, outcome_of(work))
    assert told[0] == told[1] == told[2] and not left
    found = re.fullmatch(
        rf"rank [0-2] of 3: host pool kv: no memory for {4 * 32 * SLOT} bytes, with \d+ bytes "
        "available: no more pages; lower --hicache-size or --hicache-ratio",
        told[0],
    )
    assert found, told[0]


def test_ranks_of_one_machine_need_its_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank alone would fit. No rank takes memory before all ranks have looked."""
    needed = 4 * 32 * SLOT
    reserve = 1_000_000_000
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: reserve + 2 * needed - 1)
    monkeypatch.setenv("HICACHE_HOST_MEMORY_RESERVE_BYTES", str(reserve))
    told = run_on_ranks(2, outcome_of(start))
    assert told[0] == told[1]
    both = f"the host cache (pool kv {needed} bytes, of 2 ranks)"
    assert f"rank 0 of 2: {both}" in told[0] and f"rank 1 of 2: {both}" in told[0]
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: reserve + 2 * needed)
    assert run_on_ranks(2, outcome_of(start)) == ["", ""]


def test_what_cannot_work_anywhere_is_told_by_every_rank() -> None:
    told = run_on_ranks(2, outcome_of(lambda group: start(group, hicache_mem_layout="page_last")))
    assert told[0] == told[1]
    assert "rank 0 of 2: --hicache-mem-layout" in told[0] and "rank 1 of 2: --hicache" in told[0]


# -- L3 ------------------------------------------------------------------------------------------


class Picky(HiCacheFile):
    """A file backend that some ranks cannot reach."""

    unreachable: frozenset[int] = frozenset()

    def __init__(self, storage_config: Any) -> None:
        if storage_config.tp_rank in self.unreachable:
            raise StorageUnreachable("nobody answers at store:1; start it")
        super().__init__(storage_config, (storage_config.extra_config or {})["root"])


def picky(root: Path) -> str:
    return json.dumps(
        {
            "backend_name": "picky",
            "module_path": __name__,
            "class_name": "Picky",
            "root": str(root),
            "prefetch_threshold": 4,
        }
    )


TOLD = "rank 1 of 2: nobody answers at store:1; start it"


def test_a_store_that_one_rank_cannot_reach_ends_the_start_of_all(
    storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Picky, "unreachable", frozenset({1}))
    settings = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": picky(storage_dir),
    }
    assert run_on_ranks(2, outcome_of(lambda group: start(group, **settings))) == [TOLD] * 2


def test_an_attachment_at_run_time_is_made_on_all_ranks_or_on_none(
    storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: RankGroup) -> tuple[Any, Any]:
        rig = start(group)
        try:
            first = rig.hi.attach_storage_backend("dynamic", picky(storage_dir))
            assert rig.hi.storage_state()["hicache_storage_backend"] is None
            assert not rig.tree.is_busy()
            group.broadcast(b"" if group.rank == 0 else None)
            monkeypatch.setattr(Picky, "unreachable", frozenset())
            return first, rig.hi.attach_storage_backend("dynamic", picky(storage_dir))
        finally:
            rig.close()

    monkeypatch.setattr(Picky, "unreachable", frozenset({1}))
    results = run_on_ranks(2, work)
    assert results == [((False, TOLD), (True, "attached dynamic"))] * 2
