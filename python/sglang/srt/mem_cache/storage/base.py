"""The interface of an L3 storage backend, with the v2 calls implemented over the older ones.

The engine calls only `prompts_exist`, `batch_get_v2`, `batch_set_v2`, `probe`, `clear`, `close` and
`describe_transport`. A third-party backend may implement just `get`, `set` and `exists`, whose
values are flat uint8 tensors (page bytes, then the trailer of `page_trailer`). Or it implements the
v1 calls, which know the primary pool alone: it then serves models that have no other. The engine
refuses answers of a wrong type or length (`answers.py`), and then treats the store as failing.

Threads: the prefetch thread calls gets and exists, the backup thread calls sets, at the same time.
At run time, other threads create, clear and close a backend, while no other call runs. Import it
from `sglang.srt.mem_cache.hicache_storage`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.storage import answers
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, checksum_of, is_intact, seal
from sglang.srt.mem_cache.storage.plain_pool import as_storage_pool
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PageResult,
    PlainHostPool,
    PoolResults,
    PoolTransferResult,
    StoragePool,
    StorageUnavailable,
    StorageUsage,
)


class HiCacheStorage(ABC):
    """Immutable page objects under string keys, shared by engines. Any object may vanish."""

    storage_config: HiCacheStorageConfig | None = None
    """Set by the constructor; if not, `StorageBackendFactory` sets it."""
    mem_pool_host: StoragePool | None = None
    """The primary pool."""
    extra_mem_pools: dict[str, StoragePool] | None = None
    renews_prefixes: bool = False
    """True if sets get the keys of the pages before theirs, in any order, to keep them as long as
    the new pages."""

    # -- pools --------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: PlainHostPool) -> None:
        """Register the primary pool, before the first transfer.

        Any pool with `get_page_buffer_meta` will do; see `PlainPool`.
        """
        self.mem_pool_host = as_storage_pool(mem_pool_host, self.mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: PlainHostPool, host_pool_name: str) -> None:
        """Register a pool by name, before the first transfer that names it.

        Raises:
            ValueError: The backend knows the primary pool alone, and this is another pool.
        """
        if host_pool_name == PoolName.KV:
            self.register_mem_pool_host(host_pool)
        else:
            self._check_knows_extra_pools(host_pool_name)
            others = self.extra_mem_pools or {}
            pool = as_storage_pool(host_pool, others.get(host_pool_name))
            self.extra_mem_pools = {**others, host_pool_name: pool}

    def pool(self, name: str) -> StoragePool:
        """The pool registered as `name`. Raises ValueError if there is none."""
        found = (
            self.mem_pool_host if name == PoolName.KV else (self.extra_mem_pools or {}).get(name)
        )
        if found is None:
            raise ValueError(
                f"host pool {str(name)!r} was not registered with {type(self).__name__}"
            )
        return found

    # -- v2: the calls of the engine ------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The number of leading pages of `keys` that all pools have. Raises StorageUnavailable."""

        def exists(pool: str, asked: Sequence[str]) -> list[bool]:
            object_keys = self.object_keys(asked, pool)
            if pool == PoolName.KV:
                answer = self.batch_exists(object_keys, extra_info)
                run = answers.page_count(self, "batch_exists", answer, len(object_keys))
                return [index < run for index in range(len(object_keys))]
            return [answers.flag(self, "exists", self.exists(key)) for key in object_keys]

        return combine_hits(keys, pool_transfers, exists, PoolName.KV)

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        """`batch_exists_v2` of several prompts. Override it if one call can serve them all.

        Args:
            prompts: Keys of the pages of each prompt.
            extra_infos: One for each prompt.
            pool_transfers: The pools beside the primary one with their hit policies, the same for
                all prompts. Given if the model has such pools.
        """
        transfers = list(pool_transfers) if pool_transfers else None
        return [
            self.batch_exists_v2(keys, transfers, extra_info)
            for keys, extra_info in zip(prompts, extra_infos, strict=True)
        ]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolResults:
        """Read pages into `host_indices` of each transfer's pool; one result for each key.

        Missing and damaged pages are results, not errors. A page whose result is false has
        undefined bytes. Raises StorageUnavailable if the whole store failed.
        """
        return self._each_pool(transfers, extra_info, self.batch_get_v1, self._plain_get)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolResults:
        """Write absent pages from `host_indices`; one result for each key.

        A page that the store already has counts as written. Raises StorageUnavailable if the
        whole store failed.
        """
        return self._each_pool(transfers, extra_info, self.batch_set_v1, self._plain_set)

    def _each_pool(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        move_primary: Callable[..., Sequence[PageResult]],
        move_other: Callable[..., Sequence[PageResult]],
    ) -> PoolResults:
        results: dict[str, Sequence[PageResult]] = {}
        for transfer in transfers:
            _, keys, indices = self.checked(transfer)
            object_keys = self.object_keys(keys, transfer.name)
            if transfer.name == PoolName.KV:
                results[transfer.name] = move_primary(object_keys, indices, extra_info)
            else:
                results[transfer.name] = move_other(transfer.name, object_keys, indices)
        return results

    # -- v1: the primary pool only; keys are full object keys -------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Sequence[PageResult]:
        """Read the primary pool's pages."""
        return self._plain_get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> Sequence[PageResult]:
        """Write the primary pool's pages."""
        return self._plain_set(PoolName.KV, keys, host_indices)

    # -- plain calls: one value for each key ----------------------------------------------------

    @abstractmethod
    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """The value of `key`, or None. May use `target_location`, a flat uint8 tensor, for it."""

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """`get` for each key."""
        return [
            self.get(key, target, size)
            for key, target, size in _rows(keys, target_locations, target_sizes)
        ]

    @abstractmethod
    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store `value`, a flat uint8 tensor, under `key`. True also if `key` already exists."""

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """`set` for each key until one fails. True if all succeeded."""
        return all(
            self.set(key, value, target, size)
            for key, value, target, size in _rows(keys, values, target_locations, target_sizes)
        )

    @abstractmethod
    def exists(self, key: str) -> bool:
        """True if `key` has a value."""

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """The number of `keys` that exist before the first missing one."""
        for index, key in enumerate(keys):
            if not answers.flag(self, "exists", self.exists(key)):
                return index
        return len(keys)

    # -- life ------------------------------------------------------------------------------------

    def probe(self) -> bool:
        """True if a store that failed works again. Bounded in time; never raises."""
        return True

    def clear(self) -> None:
        """Remove the objects of this namespace. Raises ValueError if the backend cannot do that."""
        raise ValueError(f"storage backend {type(self).__name__} cannot clear its objects")

    def close(self) -> None:
        """Release the backend's resources. Idempotent."""
        return

    def get_stats(self) -> dict[str, Any]:
        """Counters since the start: `pages`, `bytes` and so on."""
        return {}

    def get_usage(self) -> StorageUsage | None:
        """How full the store is; None: the backend cannot tell. Called every ten seconds at most,
        in a thread of its own, also while other calls run. Raises StorageUnavailable."""
        return None

    def get_notes(self, names: Sequence[str]) -> Sequence[bytes | None] | None:
        """The notes of this namespace: values of `NOTE_BYTES` that servers leave for each other,
        and replace. They are no pages.

        Called twice a minute at most, in a thread of its own, also while other calls run.

        Returns:
            A value for each name, None where there is none; or None: the backend has no notes.

        Raises:
            StorageUnavailable: The store failed.
        """
        return None

    def set_note(self, name: str, value: bytes) -> None:
        """Write or replace a note. The rest as for `get_notes`, which does not return None."""
        raise StorageUnavailable(f"{type(self).__name__} has no notes")

    def describe_transport(self) -> dict[str, Any] | None:
        """How bytes move to the store, for the server info; None: there is nothing to say. Called
        on the scheduler's thread: does not block."""
        return None

    # -- shared ----------------------------------------------------------------------------------

    def object_keys(self, keys: Sequence[str], pool: str) -> list[str]:
        """The full keys of pages' objects of one pool. Raises ValueError without a config."""
        if self.storage_config is None:
            raise ValueError(f"{type(self).__name__}.storage_config is not set")
        # All keys have the same suffix.
        suffix = self.storage_config.object_key("", pool)
        return [key + suffix for key in keys]

    def checked(self, transfer: PoolTransfer) -> tuple[StoragePool, list[str], torch.Tensor]:
        """Pool, keys and host slots of a transfer.

        Raises ValueError if the pool is not registered, the numbers do not match, or a slot is
        outside the pool: nothing unchecked reaches the store.
        """
        pool, keys, indices = self.pool(transfer.name), transfer.keys, transfer.host_indices
        if keys is None or indices is None:
            raise ValueError(
                f"pool transfer {transfer.name}: keys and host_indices are both needed"
            )
        if len(indices) != len(keys) * pool.page_size:
            raise ValueError(
                f"pool transfer {transfer.name}: {len(keys)} keys of {pool.page_size} tokens need "
                f"{len(keys) * pool.page_size} host_indices, got {len(indices)}"
            )
        pool.check_pages(indices)
        return pool, keys, indices

    def _check_knows_extra_pools(self, name: str) -> None:
        """Raise ValueError if the class implements calls that know the primary pool alone."""
        mine = type(self)
        of_primary = [
            f"batch_{kind}_v1"
            for kind in ("get", "set")
            if getattr(mine, f"batch_{kind}_v1") is not getattr(HiCacheStorage, f"batch_{kind}_v1")
            and getattr(mine, f"batch_{kind}_v2") is getattr(HiCacheStorage, f"batch_{kind}_v2")
        ]
        if "pool_transfers" not in inspect.signature(mine.prompts_exist).parameters:
            of_primary.append("prompts_exist")
        if of_primary:
            raise ValueError(
                f"storage backend {mine.__name__} knows one pool, and this model has pool "
                f"{str(name)!r} as well: {', '.join(of_primary)} has no pools; implement the v2 "
                "calls, or use another --hicache-storage-backend"
            )

    def _plain_get(
        self, pool_name: str, keys: list[str], host_indices: torch.Tensor
    ) -> list[CacheOutcome]:
        pool = self.pool(pool_name)
        assert self.storage_config is not None
        verify = self.storage_config.verify_checksum
        size = pool.page_bytes + TRAILER_BYTES
        targets = list(torch.empty((len(keys), size), dtype=torch.uint8))
        outcomes: list[CacheOutcome] = []
        pages = host_indices.view(len(keys), pool.page_size)
        values = answers.values(self, "batch_get", self.batch_get(keys, targets), len(keys))
        for key, slots, value in zip(keys, pages, values, strict=True):
            if value is None:
                outcomes.append(CacheOutcome.MISS)
                continue
            flat = value.contiguous().view(torch.uint8).reshape(-1)
            raw = flat.numpy().data
            page, trailer = raw[: pool.page_bytes], raw[pool.page_bytes :]
            if not is_intact(trailer, (page,), key, verify_checksum=verify):
                outcomes.append(CacheOutcome.DAMAGED)
                continue
            pool.scatter_pages(slots, flat[: pool.page_bytes].view(1, -1))
            pool.keep_checksums(slots, [checksum_of(trailer, verify_checksum=verify)])
            outcomes.append(CacheOutcome.LANDED)
        return outcomes

    def _plain_set(
        self, pool_name: str, keys: list[str], host_indices: torch.Tensor
    ) -> list[CacheOutcome]:
        pool = self.pool(pool_name)
        assert self.storage_config is not None
        outcomes: list[CacheOutcome] = []
        pages = host_indices.view(len(keys), pool.page_size)
        for key, slots in zip(keys, pages, strict=True):
            # Another DP group or server may have written the page.
            if answers.flag(self, "exists", self.exists(key)):
                outcomes.append(CacheOutcome.LANDED)
                continue
            value = torch.empty(pool.page_bytes + TRAILER_BYTES, dtype=torch.uint8)
            pool.gather_pages(slots, value[: pool.page_bytes].view(1, -1))
            raw = value.numpy().data
            (checksum,) = pool.known_checksums(slots)
            raw[pool.page_bytes :] = seal(
                (raw[: pool.page_bytes],),
                key,
                with_checksum=self.storage_config.verify_checksum,
                checksum=checksum,
            )
            done = answers.flag(self, "set", self.set(key, value))
            outcomes.append(CacheOutcome.LANDED if done else CacheOutcome.FAILED)
        return outcomes


def _rows(keys: list[str], *columns: Sequence[Any] | None) -> Iterator[tuple[Any, ...]]:
    """Each key with its item of every column; None from a column that is None."""
    given = ([None] * len(keys) if column is None else column for column in columns)
    return zip(keys, *given, strict=True)


# -- hits of several pools: pure, any thread ------------------------------------------------------


def leading_run(present: Sequence[object]) -> int:
    """The number of leading true values in `present`."""
    for index, one in enumerate(present):
        if not one:
            return index
    return len(present)


def combine_hits(
    keys: Sequence[str],
    pool_transfers: Sequence[PoolTransfer] | None,
    exists: Callable[[str, Sequence[str]], Sequence[bool]],
    primary: str,
) -> PoolTransferResult:
    """Find the longest prefix that the primary pool and every extra pool can serve.

    Args:
        keys: Keys of consecutive pages, one for each page.
        pool_transfers: Extra pools. A transfer with its own keys has objects only for those.
        exists: Queries the store: `(pool, keys) -> one bool for each key`. Called once per pool.
        primary: Name of the pool whose pages form the prefix.
    """
    primary_pages = leading_run(exists(primary, keys))
    result = PoolTransferResult(primary_pages, primary_pages=primary_pages)
    boundaries = set(range(primary_pages + 1))
    for transfer in pool_transfers or ():
        own = _boundaries(keys[:primary_pages], transfer, exists)
        result.update_extra_pool_hit_pages({transfer.name: max(own)})
        boundaries &= own
    result.update_kv_hit_pages(max(boundaries))
    return result


def _boundaries(
    keys: Sequence[str],
    transfer: PoolTransfer,
    exists: Callable[[str, Sequence[str]], Sequence[bool]],
) -> set[int]:
    """Prefix lengths in pages, including 0, at which this pool alone would allow a hit."""
    own = set(keys if transfer.keys is None else transfer.keys)
    asked = [(index + 1, key) for index, key in enumerate(keys) if key in own]
    if not asked:
        return {0}
    present = exists(transfer.name, [key for _, key in asked])
    if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        return {0} | {length for (length, _), there in zip(asked, present, strict=True) if there}
    have = {key for (_, key), there in zip(asked, present, strict=True) if there}
    return set(range(leading_run([key in have for key in keys]) + 1))
