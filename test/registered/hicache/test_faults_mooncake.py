"""Rows C1, C2 and C3 with a real Mooncake Store: made-up KV reveals every wrong byte.

The engine is a `CacheRig`: real pools, tree, controller and threads without a model. The rig
compares every reused prefix with the expected KV of its tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")

PAGE = 4
PROMPT = range(64)
PAGES = len(PROMPT) // PAGE


class HoleAfterExists(MooncakeStore):
    """Removes page 5 right after it was reported as present."""

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        results = super().prompts_exist(prompts, extra_infos, pool_transfers)
        for keys, result in zip(prompts, results, strict=True):
            if result.kv_hit_pages > 5:
                self._client.store.remove(self.object_keys(keys, "kv")[5], True)
        return results


class HeldGets(MooncakeStore):
    """Holds each get back before it touches memory, like a congested link."""

    goes_on: ClassVar[threading.Event]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Any:
        assert type(self).goes_on.wait(60)
        return super().batch_get_v2(transfers, extra_info)


@pytest.fixture
def make_rig(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CacheRig]]:
    """Engines on the cluster; each test has its own namespace."""
    for name, value in cluster.engine_env().items():
        monkeypatch.setenv(name, value)
    rigs: list[CacheRig] = []
    weights = f"weights-{time.monotonic_ns()}"

    def make(backend: type[MooncakeStore] = MooncakeStore, **settings: Any) -> CacheRig:
        extra: dict[str, Any] = {"prefetch_threshold": PAGE}
        name = "mooncake"
        if backend is not MooncakeStore:
            name = "dynamic"
            extra |= {"backend_name": "faulty", "class_name": backend.__name__}
            extra["module_path"] = backend.__module__
        rig = CacheRig(
            l1_pages=32,
            page_size=PAGE,
            weights_identity=weights,
            settings=HiCacheSettings(
                hicache_storage_backend=name,
                hicache_storage_backend_extra_config=json.dumps(extra),
                **settings,
            ),
        )
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


def stored(rig: CacheRig) -> tuple[Any, list[str]]:
    """Write the pages of `PROMPT`. Returns the raw client and the object keys."""
    assert rig.run([*PROMPT, 1]) == Reused()
    rig.settle()
    attached = rig.hi.store.attached
    assert attached is not None
    store = attached.client
    assert isinstance(store, MooncakeStore)
    hashes = [page for node in rig.hi.nodes() for page in node.page_hashes(PAGE)]
    keys = store.object_keys(attached.pools.keys(hashes), "kv")
    assert len(keys) == PAGES
    return store._client.store, keys


def test_what_was_written_is_read_by_another_engine(make_rig: Callable[..., CacheRig]) -> None:
    stored(make_rig())
    reader = make_rig(hicache_mem_layout="page_first_kv_split")
    assert reader.run([*PROMPT, 1]) == Reused(storage=len(PROMPT))
    reader.settle()


def test_c1_nothing_is_published_before_it_has_landed(
    make_rig: Callable[..., CacheRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(make_rig())
    monkeypatch.setattr(HeldGets, "goes_on", threading.Event(), raising=False)
    reader = make_rig(HeldGets, hicache_storage_prefetch_policy="best_effort")
    prompt = [*PROMPT, 1]
    reader.arrive("first", prompt)
    # Cut while the get is held: the hit is known, but nothing has landed, so nothing may be used.
    reader.until(lambda: reader.hi.storage_prefetch.table.operations[0].hit_pages == PAGES)
    assert reader.tree.check_prefetch_progress("first")
    request, reused = reader.admit("first", prompt)
    assert reused == Reused()
    HeldGets.goes_on.set()
    reader.finish(request)
    reader.settle()


def test_c2_a_page_removed_between_exists_and_get_shortens_the_prefix(
    make_rig: Callable[..., CacheRig],
) -> None:
    stored(make_rig())
    reader = make_rig(HoleAfterExists)
    assert reader.run([*PROMPT, 1]) == Reused(storage=5 * PAGE)
    reader.settle()


def flip(store: Any, keys: list[str]) -> None:
    raw = bytearray(store.get(keys[3]))
    raw[7] ^= 1
    put(store, keys[3], bytes(raw))


def truncate(store: Any, keys: list[str]) -> None:
    put(store, keys[3], store.get(keys[3])[:-1])


def swap(store: Any, keys: list[str]) -> None:
    third, fourth = store.get(keys[3]), store.get(keys[4])
    put(store, keys[3], fourth)
    put(store, keys[4], third)


def put(store: Any, key: str, raw: bytes) -> None:
    assert store.remove(key, True) == 0
    assert store.put(key, raw) == 0


@pytest.mark.parametrize("damage", [flip, truncate, swap])
def test_c3_damage_is_detected_counted_and_recomputed(
    make_rig: Callable[..., CacheRig], damage: Callable[[Any, list[str]], None]
) -> None:
    store, keys = stored(make_rig())
    damage(store, keys)
    reader = make_rig()
    assert reader.run([*PROMPT, 1]) == Reused(storage=3 * PAGE)
    reader.settle()
    counted = reader.hi.metrics.pages.labels("get", "damaged")
    assert counted._value.get() >= 1
    # The page was computed and written again, which healed the store.
    other = make_rig()
    assert other.run([*PROMPT, 1]).storage >= (PAGES - 1) * PAGE
    other.settle()
