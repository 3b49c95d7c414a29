"""L3 in a directory: one file for each object, on one machine or on a shared file system.

Several threads and processes may use one root at once. A rename makes a file appear whole or not
at all. The object's trailer detects files that a power failure tore.

Threads: the prefetch thread reads while the backup thread writes; they share only counters.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import stat
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.counters import StorageCounters
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, checksum_of, is_intact, seal
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StoragePool,
    StorageUnavailable,
    StorageUsage,
)
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "-_")
_MAX_NAME: Final = 200
"""Bytes of a file name; file systems take 255."""
_STALE_SECONDS: Final = 3600.0
_TEMPORARY: Final = ".tmp"
_NAMESPACE: Final = re.compile("[0-9a-f]{32}")
"""`CacheNamespace.digest`."""


class MalformedObject(Exception):
    """A file is not an object of the expected size: truncated, foreign or not a regular file."""


def escape(part: str) -> str:
    """A file name for any text: injective, without separators, never empty, hidden, `.` or `..`."""
    raw = part.encode("utf-8", "surrogatepass")
    name = "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in raw) or "%"
    if len(name) <= _MAX_NAME:
        return name
    # No escaped name contains `~`, so a long name never equals a short one.
    return "~" + hashlib.sha256(raw).hexdigest()


class ObjectFiles:
    """The files of one root: `root/<namespace>/<2 hex digits>/<rest of the key>`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Create the root. Raises OSError if that fails and there is no directory to read."""
        self.root = Path(root)
        self._sequence = itertools.count()
        self._temporary = self.root / _TEMPORARY
        self.root.mkdir(parents=True, exist_ok=True)

    def is_writable_by_others(self) -> bool:
        """True if the root belongs to another user than root, or is writable by all.

        This matters because a checksum detects damage, but not a foreign writer.
        """
        status = self.root.stat()
        return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & stat.S_IWOTH)

    def path(self, namespace: str, rest: str) -> Path:
        """The file of an object. Objects are spread over 256 folders."""
        spread = hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()[:2]
        return self.root / escape(namespace) / spread / escape(rest)

    def exists(self, path: Path) -> bool:
        """True if `path` is a regular file. Any error counts as absent."""
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def read(self, path: Path, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, in order, with the whole file.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedObject: It is not a regular file of exactly this size.
            OSError: It cannot be read.
        """
        # Foreign symbolic links are not followed, and foreign pipes do not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            size = sum(len(buffer) for buffer in buffers)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                raise MalformedObject(f"{path}: {status.st_size} bytes, expected {size}")
            offset = 0
            pending = list(buffers)
            while pending:
                done = os.preadv(fd, pending, offset)
                if not done:
                    raise MalformedObject(f"{path}: ended after {offset} of {size} bytes")
                offset += done
                _consume(pending, done)
        finally:
            os.close(fd)

    def write(self, path: Path, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` to the file, whole or not at all. Raises OSError."""
        name = f"{os.getpid()}-{next(self._sequence)}-{os.urandom(8).hex()}"
        temporary = self._temporary / name
        try:
            fd = self._create(temporary)
            try:
                pending = list(buffers)
                while pending:
                    _consume(pending, os.writev(fd, pending))
            finally:
                os.close(fd)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(temporary, path)
        except OSError:
            self.remove(temporary)
            raise

    def remove(self, path: Path) -> bool:
        """Remove a file. False if it is missing or cannot be removed."""
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    def clear(self, namespace: str) -> int:
        """Remove a namespace's files and its empty folders. Returns the number of files."""
        removed = 0
        folder = self.root / escape(namespace)
        for entry in list(_scan(folder)):
            for file in list(_scan(Path(entry.path))):
                removed += self.remove(Path(file.path))
            _remove_empty(Path(entry.path))
        _remove_empty(folder)
        return removed

    def namespaces(self) -> set[str]:
        """Namespaces of engines that have files."""
        return {entry.name for entry in _scan(self.root) if _NAMESPACE.fullmatch(entry.name)}

    def remove_stale_temporaries(self) -> int:
        """Remove temporary files that dead writers left at least an hour ago."""
        oldest = time.time() - _STALE_SECONDS  # noqa: TID251 (the clock of file times)
        removed = 0
        for entry in list(_scan(self._temporary)):
            try:
                is_stale = entry.stat(follow_symlinks=False).st_mtime < oldest
            except OSError:
                continue
            removed += is_stale and self.remove(Path(entry.path))
        return removed

    def _create(self, temporary: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            self._temporary.mkdir(parents=True, exist_ok=True)
            return os.open(temporary, flags, 0o600)


def _consume(pending: list[memoryview], done: int) -> None:
    """Drop the first `done` bytes of the buffers in place."""
    while pending and done >= len(pending[0]):
        done -= len(pending.pop(0))
    if done:
        pending[0] = pending[0][done:]


def _scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


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
        trailer = memoryview(bytearray(TRAILER_BYTES))
        if pool.is_zero_copy:
            outcome = self._read(key, pool.get_page_views(slots)[0], trailer)
        else:
            staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
            outcome = self._read(key, [staging[0].numpy().data], trailer)
            if outcome:
                pool.scatter_pages(slots, staging)
        if outcome:
            pool.keep_checksums(slots, [checksum_of(trailer, verify_checksum=self._verify)])
        return outcome

    def _set_page(self, key: str, pool: StoragePool, slots: torch.Tensor) -> CacheOutcome:
        if self.exists(key):
            self._counters.bump("set_present_pages")
            return CacheOutcome.LANDED
        (checksum,) = pool.known_checksums(slots)
        if pool.is_zero_copy:
            return self._write(key, pool.get_page_views(slots)[0], checksum)
        staging = torch.empty((1, pool.page_bytes), dtype=torch.uint8)
        pool.gather_pages(slots, staging)
        return self._write(key, [staging[0].numpy().data], checksum)

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
        return self._files.exists(self._path(key))

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

    def get_usage(self) -> StorageUsage:
        """Usage of the whole file system; other files count too. Folders of the root that have no
        name of an engine's namespace do not count as namespaces."""
        try:
            found = os.statvfs(self._files.root)
        except OSError as error:
            raise StorageUnavailable(f"{self._files.root}: {error.strerror}") from None
        free = found.f_bavail * found.f_frsize
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        own = self.storage_config.namespace if self.storage_config else ""
        others = self._files.namespaces() - {own}
        return StorageUsage(used, used + free, num_other_namespaces=len(others))

    # -- files -------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        """The file of a full key."""
        own = self.storage_config.namespace if self.storage_config else ""
        if own and key.startswith(f"{own}/"):
            return self._files.path(own, key[len(own) + 1 :])
        namespace, _, rest = key.partition("/")
        return self._files.path(namespace, rest)

    def _read(self, key: str, buffers: Sequence[memoryview], trailer: memoryview) -> CacheOutcome:
        """Read an object into `buffers`, and its last bytes into `trailer`."""
        path = self._path(key)
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

    def _write(
        self, key: str, buffers: Sequence[memoryview], checksum: bytes | None = None
    ) -> CacheOutcome:
        """Write an object; `checksum` is that of `buffers`, if it is known."""
        path = self._path(key)
        try:
            trailer = seal(buffers, key, with_checksum=self._verify, checksum=checksum)
            self._files.write(path, [*buffers, memoryview(trailer)])
        except OSError as error:
            # A failed write names no file, and a failed open names one that is gone by now.
            self._warn.warning(
                "file-write",
                "L3 object cannot be written in %s: %s (SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR)",
                self._files.root,
                error.strerror,
            )
            return CacheOutcome.FAILED
        return CacheOutcome.LANDED
