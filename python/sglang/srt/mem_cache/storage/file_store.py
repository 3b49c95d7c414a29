"""L3 in a directory: one file for each object, on one machine or on a shared file system.

Threads: the prefetch thread reads while the backup thread writes; they share only counters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.counters import StorageCounters
from sglang.srt.mem_cache.storage.file_objects import MalformedObject, ObjectFiles
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, is_intact, seal
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StoragePool,
)
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)


class HiCacheFile(HiCacheStorage):
    """Page objects as files under `file_path`, each with its trailer.

    No problem with the directory raises on the request path: a full disk gives `failed`, a foreign
    or torn file gives `damaged` and is removed, so that a later write can replace it.
    The plain calls accept and return page bytes without the trailer.

    Raises:
        ValueError: `file_path` is not a directory and cannot be created.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, file_path: str = "/tmp/hicache"
    ) -> None:
        self.storage_config = storage_config
        self._verify = storage_config.verify_checksum
        self._counters = StorageCounters()
        self._warn = RateLimitedLogger(logger)
        try:
            self._files = ObjectFiles(file_path)
        except OSError as error:
            raise ValueError(
                f"file storage backend: cannot use {file_path}: {error.strerror}; set "
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR to a directory that can be written"
            ) from error
        if self._files.is_writable_by_others():
            logger.warning(
                "file storage backend: other users may write in %s, and their objects are served "
                "too: set SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR to a directory of your own",
                file_path,
            )
        self._files.remove_stale_temporaries()

    # -- v2 ----------------------------------------------------------------------------------------

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        return {transfer.name: self._move(transfer, is_get=True) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        return {transfer.name: self._move(transfer, is_get=False) for transfer in transfers}

    def _move(self, transfer: PoolTransfer, *, is_get: bool) -> list[CacheOutcome]:
        pool, keys, indices = self.checked(transfer)
        outcomes: list[CacheOutcome] = []
        object_keys = self.object_keys(keys, transfer.name)
        move_one = self._get_page if is_get else self._set_page
        for key, slots in zip(object_keys, indices.view(-1, pool.page_size), strict=True):
            outcome = move_one(key, pool, slots)
            outcomes.append(outcome)
            if not outcome and transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                # A page is useless without its ancestors.
                outcomes += [CacheOutcome.SHORT] * (len(keys) - len(outcomes))
                break
        self._counters.add("get" if is_get else "set", outcomes, pool.page_bytes)
        return outcomes

    def _get_page(self, key: str, pool: StoragePool, slots: torch.Tensor) -> CacheOutcome:
        if pool.is_zero_copy:
            return self._read(key, pool.get_page_views(slots)[0])
        staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
        outcome = self._read(key, [staging[0].numpy().data])
        if outcome:
            pool.scatter_pages(slots, staging)
        return outcome

    def _set_page(self, key: str, pool: StoragePool, slots: torch.Tensor) -> CacheOutcome:
        if self.exists(key):
            self._counters.bump("set_present_pages")
            return CacheOutcome.LANDED
        if pool.is_zero_copy:
            return self._write(key, pool.get_page_views(slots)[0])
        staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
        pool.gather_pages(slots, staging)
        return self._write(key, [staging[0].numpy().data])

    # -- plain -------------------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Read a value into `target_location`, a contiguous tensor of its exact size."""
        if target_location is None:
            raise ValueError("target_location: HiCacheFile reads into a tensor of the value's size")
        target: torch.Tensor = target_location
        raw = target.view(-1).view(torch.uint8).numpy().data
        return target if self._read(key, [raw]) else None

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        source: torch.Tensor | None = value if value is not None else target_location
        if source is None:
            raise ValueError("value: HiCacheFile stores a tensor")
        if self.exists(key):
            return True
        raw = source.contiguous().view(-1).view(torch.uint8).numpy().data
        return bool(self._write(key, [raw]))

    def exists(self, key: str) -> bool:
        return self._files.exists(self._files.path(*self._split(key)))

    # -- life --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the files of this namespace. Raises ValueError if the config has no namespace."""
        assert self.storage_config is not None
        if not self.storage_config.namespace:
            raise ValueError("clear: the storage config has no namespace to clear")
        removed = self._files.clear(self.storage_config.namespace)
        self._files.remove_stale_temporaries()
        logger.info("file storage backend: removed %d objects", removed)

    def get_stats(self) -> dict[str, Any]:
        return self._counters.snapshot()

    # -- files -------------------------------------------------------------------------------------

    def _split(self, key: str) -> tuple[str, str]:
        """Split a full key into the namespace and the rest."""
        own = self.storage_config.namespace if self.storage_config else ""
        if own and key.startswith(f"{own}/"):
            return own, key[len(own) + 1 :]
        namespace, _, rest = key.partition("/")
        return namespace, rest

    def _read(self, key: str, buffers: Sequence[memoryview]) -> CacheOutcome:
        path = self._files.path(*self._split(key))
        trailer = memoryview(bytearray(TRAILER_BYTES))
        try:
            self._files.read(path, [*buffers, trailer])
        except FileNotFoundError:
            return CacheOutcome.MISS
        except MalformedObject as error:
            self._warn.warning("file-malformed", "L3 object is damaged: %s", error)
        except OSError as error:
            self._warn.warning("file-read", "L3 object %s cannot be read: %s", path, error)
            return CacheOutcome.FAILED
        else:
            if is_intact(trailer, buffers, key, verify_checksum=self._verify):
                return CacheOutcome.LANDED
            self._warn.warning("file-damaged", "L3 object is damaged: %s", path)
        self._files.remove(path)
        return CacheOutcome.DAMAGED

    def _write(self, key: str, buffers: Sequence[memoryview]) -> CacheOutcome:
        path = self._files.path(*self._split(key))
        try:
            trailer = seal(buffers, key, with_checksum=self._verify)
            self._files.write(path, [*buffers, memoryview(trailer)])
        except OSError as error:
            # The error of a write names no file, and that of an open one that is gone.
            self._warn.warning(
                "file-write",
                "L3 object cannot be written in %s: %s (SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR)",
                self._files.root,
                error.strerror,
            )
            return CacheOutcome.FAILED
        return CacheOutcome.LANDED
