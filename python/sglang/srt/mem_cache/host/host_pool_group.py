"""The host pools of one model: an anchor whose slots prefixes are made of, and extra pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import DevicePool, HostKVCache
from sglang.srt.mem_cache.host.page_copier import PageLoad


@dataclass(slots=True)
class PoolEntry:
    """One pool of a group."""

    name: PoolName
    host_pool: HostKVCache
    device_pool: DevicePool
    layer_mapper: Callable[[int], int | None]
    """Model layer (0-based in the stack) to this pool's layer, None where it has no such layer."""
    is_primary_index_anchor: bool = False
    host_evict_fn: Callable[[int], Any] | None = None
    device_evict_fn: Callable[[int], Any] | None = None
    device_alloc_fn: Callable[[int], torch.Tensor | None] | None = None
    device_free_fn: Callable[[torch.Tensor], Any] | None = None


class HostPoolGroup:
    """Behaves as its anchor pool, and moves the extra pools that `pool_transfers` name along.

    Raises:
        ValueError: There is not exactly one anchor, or two entries share a name.
    """

    def __init__(self, entries: Sequence[PoolEntry]) -> None:
        anchors = [entry for entry in entries if entry.is_primary_index_anchor]
        if len(anchors) != 1:
            raise ValueError(f"a pool group needs one anchor, got {len(anchors)}")
        self.entries = {entry.name: entry for entry in entries}
        if len(self.entries) != len(entries):
            raise ValueError(f"pool names repeat: {[str(entry.name) for entry in entries]}")
        self.anchor_entry = anchors[0]
        self.anchor = self.anchor_entry.host_pool

    def get_pool(self, name: str) -> HostKVCache:
        """The host pool called `name`. Raises ValueError that lists the known."""
        return self._entry(name).host_pool

    def _entry(self, name: str) -> PoolEntry:
        entry = self.entries.get(PoolName(name))
        if entry is None:
            known = ", ".join(self.entries)
            raise ValueError(f"no host pool {name!r} in this group; it has: {known}")
        return entry

    # -- copies ------------------------------------------------------------------------------------

    def begin_load(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> PageLoad:
        """A load of the anchor's pages and of every transfer's, to be issued by layers of the
        model; copy thread."""
        anchor = self.anchor.begin_load(device_pool, host_indices, device_indices, io_backend)
        loads = [(self.anchor_entry.layer_mapper, anchor)]
        for transfer in pool_transfers or ():
            entry = self._entry(transfer.name)
            host, device = _both_indices(transfer)
            load = entry.host_pool.begin_load(entry.device_pool, host, device, io_backend)
            loads.append((entry.layer_mapper, load))
        return _GroupLoad(loads)

    def load_to_device_per_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> None:
        """Copy one layer of the anchor's pages and of every transfer's; copy thread."""
        load = self.begin_load(
            device_pool, host_indices, device_indices, io_backend, pool_transfers
        )
        load.issue(layer_id)

    def backup_from_device_all_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> None:
        """Copy all layers of the anchor's pages and of every transfer's; copy thread."""
        self.anchor.backup_from_device_all_layer(
            device_pool, host_indices, device_indices, io_backend
        )
        for transfer in pool_transfers or ():
            entry = self._entry(transfer.name)
            host, device = _both_indices(transfer)
            entry.host_pool.backup_from_device_all_layer(
                entry.device_pool, host, device, io_backend
            )

    def prefers_cpu_slots(self, device_pool: DevicePool, io_backend: str) -> bool:
        """Whether backups had better be given the anchor's `device_indices` on the CPU."""
        return self.anchor.prefers_cpu_slots(device_pool, io_backend)

    # -- slots: the anchor's -----------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self.anchor.alloc(need_size)

    def free(self, indices: torch.Tensor) -> int:
        return self.anchor.free(indices)

    def available_size(self) -> int:
        return self.anchor.available_size()

    def free_page_ids(self) -> torch.Tensor:
        return self.anchor.free_page_ids()

    def clear(self) -> None:
        """Free every page of every pool."""
        for entry in self.entries.values():
            entry.host_pool.clear()

    def check_integrity(self) -> None:
        """Assert every pool's invariants."""
        for entry in self.entries.values():
            entry.host_pool.check_integrity()

    # -- the anchor's description ------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.anchor.size

    @property
    def page_num(self) -> int:
        return self.anchor.page_num

    @property
    def page_size(self) -> int:
        return self.anchor.page_size

    @property
    def page_bytes(self) -> int:
        return self.anchor.page_bytes

    @property
    def layout(self) -> str:
        return self.anchor.layout

    @property
    def is_zero_copy(self) -> bool:
        return self.anchor.is_zero_copy

    @property
    def kv_buffer(self) -> list[torch.Tensor]:
        return self.anchor.kv_buffer

    @property
    def size_per_token(self) -> int:
        return self.anchor.size_per_token

    @property
    def allocator(self) -> HostTensorAllocator:
        return self.anchor.allocator

    @property
    def device(self) -> str:
        return self.anchor.device

    @property
    def device_pool(self) -> DevicePool:
        return self.anchor.device_pool

    @property
    def dtype(self) -> torch.dtype:
        return self.anchor.dtype

    @property
    def layer_num(self) -> int:
        return self.anchor.layer_num

    @property
    def start_layer(self) -> int:
        return self.anchor.start_layer

    @property
    def end_layer(self) -> int:
        return self.anchor.end_layer

    # -- the anchor's bytes ------------------------------------------------------------------------

    def get_ksize_per_token(self) -> int:
        return self.anchor.get_ksize_per_token()

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return self.anchor.get_hybrid_pool_buffer()

    def check_pages(self, indices: torch.Tensor) -> None:
        self.anchor.check_pages(indices)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return self.anchor.get_page_buffer_meta(indices)

    def get_page_views(self, indices: torch.Tensor) -> list[list[memoryview]]:
        return self.anchor.get_page_views(indices)

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        self.anchor.gather_pages(indices, out)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        self.anchor.scatter_pages(indices, pages)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.anchor.get_data_page(index, flat)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return self.anchor.get_dummy_flat_data_page()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.anchor.set_from_flat_data_page(index, data_page)


class _GroupLoad(PageLoad):
    def __init__(self, loads: list[tuple[Callable[[int], int | None], PageLoad]]) -> None:
        self._loads = loads

    def issue(self, layer: int) -> None:
        for layer_mapper, load in self._loads:
            own = layer_mapper(layer)
            if own is not None:
                load.issue(own)


def _both_indices(transfer: PoolTransfer) -> tuple[torch.Tensor, torch.Tensor]:
    if transfer.host_indices is None or transfer.device_indices is None:
        raise ValueError(
            f"pool transfer {transfer.name}: a copy needs host_indices and device_indices"
        )
    return transfer.host_indices, transfer.device_indices
