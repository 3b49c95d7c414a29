"""A store that misbehaves in all allowed ways, chosen by a seed.

It is slow, hangs and continues later, fails in every way, returns only part of the pages, and
loses, damages, truncates or swaps objects. The contract of `HiCacheStorage` allows all of that, and
the engine must still give right answers. `breaks_contract` adds answers that the interface does not
allow.

`ObjectStore` has the objects and moods, and outlives engines. Three backends use it. The first
implements only `get`, `set` and `exists`, so that the engine's code moves and checks bytes. The
second moves pages in place, torn and late, as a store with its own transport does. The third is the
engine's own file store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rigs.stores.object_store import STORE_KEY, Call, ObjectFolder, ObjectStore
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PageResult,
    PoolTransfer,
    PoolTransferResult,
    StoragePool,
)
from sglang.srt.mem_cache.storage.file_store import HiCacheFile
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, checksum_of, is_intact, seal


class PlainStore(HiCacheStorage):
    """The smallest possible backend: a value for each key."""

    def __init__(self, storage_config: HiCacheStorageConfig, **_: Any) -> None:
        self.storage_config = storage_config
        self.store = ObjectStore.named((storage_config.extra_config or {})[STORE_KEY])
        # The engine waits for this call, so it must not hang.
        self.store.begin("connect", is_awaited=True)

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        call = self.store.begin("get", of=self)
        value = call.fetch(key)
        if call.lies():
            return call.rng.choice([b"value", torch.zeros(3, 3), torch.empty(0), 7])  # type: ignore[return-value]
        target: torch.Tensor | None = target_location
        if value is None:
            if target is not None:
                target.fill_(call.rng.randrange(256))
            return None
        tensor = torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)
        if target is None or len(tensor) != len(target) or call.rng.random() < 0.3:
            return tensor
        return target.copy_(tensor)

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        assert isinstance(value, torch.Tensor)
        call = self.store.begin("set", of=self)
        kept = call.keep(key, value.numpy().tobytes())
        if call.lies():
            return call.rng.choice([None, "yes", 2, torch.ones(2)])  # type: ignore[return-value]
        return kept

    def exists(self, key: str) -> bool:
        return self.store.read(key) is not None

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        call = self.store.begin("exists", of=self)
        if call.lies():
            return call.rng.choice([-1, len(keys) + 1, None, "all", 0.5])  # type: ignore[return-value]
        return super().batch_exists(keys, extra_info)

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        answers = super().prompts_exist(prompts, extra_infos, pool_transfers)
        call = self.store.begin("prompts_exist", of=self)
        if call.lies():
            return call.rng.choice([answers[1:], [*answers, *answers], None, [None] * len(answers)])  # type: ignore[list-item]
        return answers

    def probe(self) -> bool:
        return is_back(self.store, self)

    def clear(self) -> None:
        assert self.storage_config is not None
        self.store.begin("clear", is_awaited=True)
        self.store.clear(self.storage_config.namespace)

    def close(self) -> None:
        if self.store.breaks_contract:
            self.store.begin("close", is_awaited=True)


class InPlaceStore(PlainStore):
    """Reads into and writes from the pages of L2 in place, in parts."""

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[PageResult]]:
        call = self.store.begin("get", of=self)
        results = {str(one.name): self._move(call, one, is_get=True) for one in transfers}
        return _answer(call, results)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[PageResult]]:
        call = self.store.begin("set", of=self)
        results = {str(one.name): self._move(call, one, is_get=False) for one in transfers}
        return _answer(call, results)

    def _move(self, call: Call, transfer: PoolTransfer, *, is_get: bool) -> list[PageResult]:
        pool, keys, indices = self.checked(transfer)
        object_keys = self.object_keys(keys, transfer.name)
        # Reads may have holes, since the engine uses the pages before the first. Writes have none.
        may_have_holes = is_get and call.rng.random() < 0.5
        move_page = self._get_page if is_get else self._set_page
        results: list[PageResult] = []
        for key, slots in zip(object_keys, indices.view(-1, pool.page_size), strict=True):
            if results and not results[-1] and not may_have_holes:
                results.append(CacheOutcome.SHORT)
                continue
            if len(results) % 2:
                call.pause()
            outcome = move_page(call, key, pool, slots)
            results.append(outcome if call.rng.random() < 0.5 else bool(outcome))
        return results

    def _get_page(
        self, call: Call, key: str, pool: StoragePool, slots: torch.Tensor
    ) -> CacheOutcome:
        assert self.storage_config is not None
        value = call.fetch(key)
        if value is None:
            if call.rng.random() < 0.3:
                _scatter(pool, slots, bytes([call.rng.randrange(256)]) * pool.page_bytes)
            return CacheOutcome.MISS
        page, trailer = value[: pool.page_bytes], value[pool.page_bytes :]
        if call.rng.random() < 0.2:
            # A thread that reads the page too early finds only half of it.
            half = len(page) // 2
            _scatter(pool, slots, page[:half] + bytes(pool.page_bytes - half))
            call.pause()
        _scatter(pool, slots, page.ljust(pool.page_bytes, b"\0"))
        verify = self.storage_config.verify_checksum
        if is_intact(trailer, (page,), key, verify_checksum=verify):
            pool.keep_checksums(slots, [checksum_of(trailer, verify_checksum=verify)])
            return CacheOutcome.LANDED
        self.store.happened["found damaged"] += 1
        if len(trailer) != TRAILER_BYTES or call.rng.random() < 0.5:
            self.store.remove(key)
        return CacheOutcome.DAMAGED

    def _set_page(
        self, call: Call, key: str, pool: StoragePool, slots: torch.Tensor
    ) -> CacheOutcome:
        assert self.storage_config is not None
        if self.store.read(key) is not None:
            return CacheOutcome.LANDED
        page = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
        pool.gather_pages(slots, page)
        raw = page.numpy().tobytes()
        (checksum,) = pool.known_checksums(slots)
        verify = self.storage_config.verify_checksum
        trailer = seal((raw,), key, with_checksum=verify, checksum=checksum)
        return CacheOutcome.LANDED if call.keep(key, raw + trailer) else CacheOutcome.FAILED


class FileStore(HiCacheFile):
    """The engine's own store of files, with the faults of an `ObjectFolder`."""

    def __init__(self, storage_config: HiCacheStorageConfig, **_: Any) -> None:
        store = ObjectStore.named((storage_config.extra_config or {})[STORE_KEY])
        assert isinstance(store, ObjectFolder)
        self.store = store
        self.store.begin("connect", is_awaited=True)
        super().__init__(storage_config, str(store.folder))

    def batch_get_v2(  # type: ignore[override]  # also lies
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[PageResult]]:
        return self._call("get", transfers, super().batch_get_v2)

    def batch_set_v2(  # type: ignore[override]
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[PageResult]]:
        return self._call("set", transfers, super().batch_set_v2)

    def _call(
        self,
        kind: str,
        transfers: list[PoolTransfer],
        move: Callable[[list[PoolTransfer]], Mapping[str, Sequence[PageResult]]],
    ) -> dict[str, list[PageResult]]:
        call = self.store.begin(kind, of=self)
        results: dict[str, list[PageResult]] = {}
        for one in transfers:
            for key in self.object_keys(one.keys or [], one.name):
                call.disturb(self._path(key))
            results[str(one.name)] = (
                [CacheOutcome.FAILED] * len(one.keys or ())
                if call.refuses()
                else list(move([one])[one.name])
            )
            call.pause()
        return _answer(call, results)

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        self.store.begin("prompts_exist", of=self)
        return super().prompts_exist(prompts, extra_infos, pool_transfers)

    def probe(self) -> bool:
        return is_back(self.store, self)


def is_back(store: ObjectStore, client: HiCacheStorage) -> bool:
    """True if a store answers a probe of `client`."""
    try:
        call = store.begin("probe", of=client)
    except Exception:  # noqa: BLE001 - a probe never raises
        return False
    return call.rng.random() < 0.8


def _scatter(pool: StoragePool, slots: torch.Tensor, page: bytes) -> None:
    pool.scatter_pages(slots, torch.frombuffer(bytearray(page), dtype=torch.uint8).view(1, -1))


def _answer(call: Call, results: dict[str, list[PageResult]]) -> dict[str, list[PageResult]]:
    """`results`, or a broken answer if the backend breaks its contract."""
    if not call.lies():
        return results
    broken: list[Any] = [None, {}, [], {"other": []}]
    for name, pages in results.items():
        # Preferably drop a page that did not land, so that later results move to its place.
        bad = [at for at, page in enumerate(pages) if not page]
        without = pages.copy()
        del without[bad[0] if bad else call.rng.randrange(len(pages))]
        broken += [
            {name: without},
            {name: [*pages, True]},
            {name: None},
            {name: ["no"] * len(pages)},
        ]
    return call.rng.choice(broken)
