"""L3 in a directory: one file for each object, on one machine or on a shared file system.

Several threads and processes may use one root at once; see `object_files` for the files and
`file_room` for their limits. The object's trailer detects files that a power failure tore.

Threads: the prefetch thread reads while the backup thread writes; they share only counters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.counters import StorageCounters
from sglang.srt.mem_cache.storage.file_room import SETTINGS, FileLimits, FileRoom
from sglang.srt.mem_cache.storage.object_files import MalformedObject, ObjectFiles
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, checksum_of, is_intact, seal
from sglang.srt.mem_cache.storage.types import (
    NOTE_BYTES,
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StoragePool,
    StorageUnavailable,
    StorageUsage,
)
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)


class HiCacheFile(HiCacheStorage):
    """Page objects as files under `file_path`, each with its trailer.

    No problem with the directory raises on the request path: a full disk gives `failed`, a foreign
    or torn file gives `damaged` and is removed, so that a later write can replace it.
    The plain calls accept and return page bytes without the trailer.

    Args:
        limits: The space that the objects of all servers in `file_path` may take; None: any.

    Raises:
        ValueError: `file_path` is not a directory and cannot be created.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        file_path: str = "/tmp/hicache",
        limits: FileLimits | None = None,
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
        self._room: FileRoom | None = None
        """None if there are no limits. Uses of objects are then not noted."""
        if limits is not None and limits.has_any:
            self._room = FileRoom(self._files, storage_config.namespace, limits)
            self.renews_prefixes = True

    # -- v2 ----------------------------------------------------------------------------------------

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        return {transfer.name: self._move(transfer, is_get=True) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        before = extra_info.prefix_keys if extra_info is not None else None
        if before and self._room is not None:
            self._renew_prefix(self._room, before)
        first = len(before or ())
        return {
            transfer.name: self._move(transfer, is_get=False, first=first) for transfer in transfers
        }

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        first = len((extra_info and extra_info.prefix_keys) or ())
        there = (self._exists(key, first + index) for index, key in enumerate(keys))
        return next((index for index, one in enumerate(there) if not one), len(keys))

    def _renew_prefix(self, room: FileRoom, pages: Sequence[str]) -> None:
        """Note that pages are used, because those behind them are: they are of no use without."""
        renewed = room.not_renewed(pages)
        keys = [page for _, page in renewed]
        for pool in (PoolName.KV, *(self.extra_mem_pools or ())):
            for (depth, _), key in zip(renewed, self.object_keys(keys, pool), strict=True):
                self._exists(key, depth)

    def _move(self, transfer: PoolTransfer, *, is_get: bool, first: int = 0) -> list[CacheOutcome]:
        """Move pages of one pool; `first` is the number of pages of the prompt before them."""
        pool, keys, indices = self.checked(transfer)
        outcomes: list[CacheOutcome] = []
        object_keys = self.object_keys(keys, transfer.name)
        move_one = self._get_page if is_get else self._set_page
        pages = zip(object_keys, indices.view(-1, pool.page_size), strict=True)
        for depth, (key, slots) in enumerate(pages, first):
            outcome = move_one(key, pool, slots, depth)
            outcomes.append(outcome)
            if not outcome and transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                # A page is useless without its ancestors.
                outcomes += [CacheOutcome.SHORT] * (len(keys) - len(outcomes))
                break
        self._counters.add("get" if is_get else "set", outcomes, pool.page_bytes)
        return outcomes

    def _get_page(
        self, key: str, pool: StoragePool, slots: torch.Tensor, depth: int
    ) -> CacheOutcome:
        trailer = memoryview(bytearray(TRAILER_BYTES))
        if pool.is_zero_copy:
            outcome = self._read(key, pool.get_page_views(slots)[0], trailer, depth)
        else:
            staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
            outcome = self._read(key, [staging[0].numpy().data], trailer, depth)
            if outcome:
                pool.scatter_pages(slots, staging)
        if outcome:
            pool.keep_checksums(slots, [checksum_of(trailer, verify_checksum=self._verify)])
        return outcome

    def _set_page(
        self, key: str, pool: StoragePool, slots: torch.Tensor, depth: int
    ) -> CacheOutcome:
        if self._exists(key, depth):
            self._counters.bump("set_present_pages")
            return CacheOutcome.LANDED
        (checksum,) = pool.known_checksums(slots)
        if pool.is_zero_copy:
            return self._write(key, pool.get_page_views(slots)[0], checksum, depth)
        staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
        pool.gather_pages(slots, staging)
        return self._write(key, [staging[0].numpy().data], checksum, depth)

    # -- plain -------------------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Read a value into `target_location`, a contiguous tensor of its exact size."""
        if target_location is None:
            raise ValueError("target_location: HiCacheFile reads into a tensor of the value's size")
        target: torch.Tensor = target_location
        raw = target.view(-1).view(torch.uint8).numpy().data
        trailer = memoryview(bytearray(TRAILER_BYTES))
        return target if self._read(key, [raw], trailer) else None

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
        return self._exists(key)

    # -- life --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the files of this namespace. Raises ValueError if the config has no namespace."""
        assert self.storage_config is not None
        if not self.storage_config.namespace:
            raise ValueError("clear: the storage config has no namespace to clear")
        removed = self._files.clear(self.storage_config.namespace)
        self._files.remove_stale_temporaries()
        if self._room is not None:
            self._room.sum_up_again()
        logger.info("file storage backend: removed %d objects", removed)

    def close(self) -> None:
        if self._room is not None:
            self._room.close()

    def get_stats(self) -> dict[str, Any]:
        return self._counters.snapshot()

    def get_usage(self) -> StorageUsage:
        """Usage of the whole file system, where other files count too; with limits that of the
        objects. Folders of the root that have no name of an engine's namespace do not count as
        namespaces."""
        own = self.storage_config.namespace if self.storage_config else ""
        others = len(self._files.namespaces() - {own})
        if self._room is not None:
            used, total, count, removed = self._room.usage() or (None, None, None, None)
            return StorageUsage(used, total, count, removed, others)
        try:
            found = os.statvfs(self._files.root)
        except OSError as error:
            raise StorageUnavailable(f"{self._files.root}: {error.strerror}") from None
        free = found.f_bavail * found.f_frsize
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        return StorageUsage(used, used + free, num_other_namespaces=others)

    def get_notes(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._get_note(name) for name in names]

    def _get_note(self, name: str) -> bytes | None:
        value = bytearray(NOTE_BYTES)
        try:
            self._files.read(self._note_path(name), [memoryview(value)])
        except (OSError, MalformedObject):
            return None
        return bytes(value)

    def set_note(self, name: str, value: bytes) -> None:
        try:
            self._files.write(self._note_path(name), [memoryview(value)])
        except OSError as error:
            raise StorageUnavailable(f"{self._files.root}: {error.strerror}") from None

    def _note_path(self, name: str) -> Path:
        return self._files.note(self.storage_config.namespace if self.storage_config else "", name)

    # -- files -------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        """The file of a full key."""
        own = self.storage_config.namespace if self.storage_config else ""
        if own and key.startswith(f"{own}/"):
            return self._files.path(own, key[len(own) + 1 :])
        namespace, _, rest = key.partition("/")
        return self._files.path(namespace, rest)

    def _exists(self, key: str, depth: int = 0) -> bool:
        """True if an object exists, whose use is noted; `depth` is that of `FileRoom`."""
        path = self._path(key)
        modified = self._files.modified(path)
        if modified is not None and self._room is not None:
            self._room.renew(path, modified, depth)
        return modified is not None

    def _read(
        self, key: str, buffers: Sequence[memoryview], trailer: memoryview, depth: int = 0
    ) -> CacheOutcome:
        """Read an object into `buffers`, and its last bytes into `trailer`."""
        path = self._path(key)
        try:
            modified = self._files.read(path, [*buffers, trailer])
        except FileNotFoundError:
            return CacheOutcome.MISS
        except MalformedObject as error:
            self._warn.warning("file-malformed", "L3 object is damaged: %s", error)
        except OSError as error:
            self._warn.warning("file-read", "L3 object %s cannot be read: %s", path, error)
            return CacheOutcome.FAILED
        else:
            if is_intact(trailer, buffers, key, verify_checksum=self._verify):
                if self._room is not None:
                    self._room.renew(path, modified, depth)
                return CacheOutcome.LANDED
            self._warn.warning("file-damaged", "L3 object is damaged: %s", path)
        self._files.remove(path)
        return CacheOutcome.DAMAGED

    def _write(
        self,
        key: str,
        buffers: Sequence[memoryview],
        checksum: bytes | None = None,
        depth: int = 0,
    ) -> CacheOutcome:
        """Write an object; `checksum` is that of `buffers`, if it is known."""
        path, room = self._path(key), self._room
        if room is not None and not room.admits(sum(map(len, buffers)) + TRAILER_BYTES):
            self._counters.bump("set_no_room_pages")
            self._warn.warning(
                "file-room",
                "L3 object is not written: %s has no room for it within %s",
                self._files.root,
                SETTINGS,
            )
            return CacheOutcome.FAILED
        try:
            trailer = seal(buffers, key, with_checksum=self._verify, checksum=checksum)
            stamp = None if room is None else room.stamp(depth)
            self._files.write(path, [*buffers, memoryview(trailer)], stamp)
        except OSError as error:
            # A failed write names no file, and a failed open names one that is gone by now.
            self._warn.warning(
                "file-write",
                "L3 object cannot be written in %s: %s (SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR; "
                "%s limit its objects)",
                self._files.root,
                error.strerror,
                SETTINGS,
            )
            return CacheOutcome.FAILED
        if room is not None:
            room.wrote(sum(map(len, buffers)) + TRAILER_BYTES)
        return CacheOutcome.LANDED
