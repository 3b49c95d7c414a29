"""References for L3 backends: bare loops over the same API, and memory copy.

A bare loop moves the same number of objects of the same size in the same batches, from and to
memory that is known beforehand: without keys, exists, hashes and outcomes. An object is the buffers
of a page and 32 empty bytes in place of the trailer. For layouts that scatter pages it is one
contiguous buffer, prepared beforehand.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PoolRows
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, seal


class Peer(ABC):
    """Puts and gets all pages of a pool under its own keys."""

    @abstractmethod
    def put(self) -> None:
        """Write every object."""

    @abstractmethod
    def get(self) -> None:
        """Read every object."""

    @abstractmethod
    def clear(self) -> None:
        """Remove the objects."""

    def close(self) -> None:
        """Release the store."""


class BareMooncake(Peer):
    """Multi-buffer calls of Mooncake's client in batches as large as the backend's."""

    def __init__(self, backend: MooncakeStore, host: MHATokenToKVPoolHost, pages: int) -> None:
        # A separate client, set up like the backend's.
        self._client = MooncakeClient(backend.config, backend.protocol, backend.ib_device)
        self._objects = objects_of(host, pages)
        for tensor in self._objects.memory:
            self._client.register(tensor)
        ptrs, sizes = self._objects.addresses()
        batch = PoolRows(host).batch_pages
        keys = [f"bare/{index:064x}" for index in range(pages)]
        self._batches = [
            (keys[at : at + batch], ptrs[at : at + batch], sizes[at : at + batch])
            for at in range(0, pages, batch)
        ]

    def put(self) -> None:
        for keys, ptrs, sizes in self._batches:
            codes = self._client.store.batch_put_from_multi_buffers(keys, ptrs, sizes)
            assert not any(codes), f"put: {codes}; the store may be too small"

    def get(self) -> None:
        for keys, ptrs, sizes in self._batches:
            codes = self._client.store.batch_get_into_multi_buffers(keys, ptrs, sizes)
            assert all(code > 0 for code in codes), f"get: {codes}"

    def clear(self) -> None:
        self._client.store.remove_by_regex("^bare/", True)

    def close(self) -> None:
        self._client.close()


class BareFiles(Peer):
    """One file per object: open, one vectored read or write, close. Not atomic."""

    def __init__(self, folder: Path, host: MHATokenToKVPoolHost, pages: int) -> None:
        folder.mkdir(parents=True)
        self._paths = [folder / f"{index:064x}" for index in range(pages)]
        self._objects = objects_of(host, pages)
        self._views = self._objects.views

    def put(self) -> None:
        for path, views in zip(self._paths, self._views, strict=True):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                done = os.writev(file, views)
            finally:
                os.close(file)
            assert done == sum(len(view) for view in views)

    def get(self) -> None:
        for path, views in zip(self._paths, self._views, strict=True):
            file = os.open(path, os.O_RDONLY)
            try:
                done = os.readv(file, views)
            finally:
                os.close(file)
            assert done == sum(len(view) for view in views)

    def clear(self) -> None:
        for path in self._paths:
            path.unlink()


class MemoryCopy:
    """Copies the same number of bytes between two blocks of memory, one page at a time."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self._source = np.ones((pages, page_bytes), dtype=np.uint8)
        self._target = np.zeros_like(self._source)

    def run(self) -> None:
        for source, target in zip(self._source, self._target, strict=True):
            np.copyto(target, source)

    def hash(self) -> None:
        """Compute the checksum of each page."""
        for page in self._source:
            seal([page.data], "key")


@dataclass(frozen=True, slots=True)
class Objects:
    """The buffers of each object."""

    memory: list[torch.Tensor]
    """The memory of all buffers."""
    views: list[list[memoryview]]
    """For each object its buffers, in order."""

    def addresses(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each object the addresses and sizes of its buffers, in bytes."""
        parts = [[np.frombuffer(view, dtype=np.uint8) for view in one] for one in self.views]
        ptrs = [[part.ctypes.data for part in one] for one in parts]
        return ptrs, [[part.nbytes for part in one] for one in parts]


def objects_of(host: MHATokenToKVPoolHost, pages: int) -> Objects:
    """Objects as the backends create them: page and trailer, in place if the layout allows it."""
    slots = torch.arange(pages * host.page_size)
    if host.is_zero_copy:
        trailers = torch.zeros((pages, TRAILER_BYTES), dtype=torch.uint8)
        rows = [row.numpy().data for row in trailers]
        views = [[*page, row] for page, row in zip(host.get_page_views(slots), rows, strict=True)]
        return Objects([*host.get_hybrid_pool_buffer(), trailers], views)
    staged = torch.zeros((pages, host.page_bytes + TRAILER_BYTES), dtype=torch.uint8)
    host.gather_pages(slots, staged[:, :-TRAILER_BYTES])
    return Objects([staged], [[row.numpy().data] for row in staged])
