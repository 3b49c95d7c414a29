"""Host pool of keys and values per head, in any of the four layouts."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch

from sglang.srt.mem_cache.device.state_pool import DevicePool
from sglang.srt.mem_cache.host.host_copy import CpuPageCopier, PagePair, PageView, page_view
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier
from sglang.srt.mem_cache.host.host_layout import (
    HostLayout,
    PageByteOrder,
    page_byte_order,
)
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.host_rows import part_rows

_PageCopier: TypeAlias = CpuPageCopier | CudaPageCopier


class MHADevicePool(DevicePool, Protocol):
    """What the host pool needs of its device pool beyond what every kind has."""

    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """Per layer `[size + page_size, head_num, head_dim]`, `store_dtype`, contiguous."""

    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """Per layer `[size + page_size, head_num, v_head_dim]`."""

    @property
    def head_num(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


class MHATokenToKVPoolHost(HostKVCache[MHADevicePool]):
    """Host pool of keys and values per head, in any of the four layouts."""

    kv_buffer: list[torch.Tensor]
    _copier: tuple[MHADevicePool, _PageCopier] | None = None

    @classmethod
    def slot_bytes(cls, device_pool: MHADevicePool) -> int:
        return _token_bytes(device_pool, device_pool.head_dim + device_pool.v_head_dim)

    @classmethod
    def shortest_part_bytes(cls, device_pool: MHADevicePool) -> int:
        return _token_bytes(device_pool, min(device_pool.head_dim, device_pool.v_head_dim))

    def get_ksize_per_token(self) -> int:
        """Bytes of one token's keys over all layers."""
        return _token_bytes(self.device_pool, self.device_pool.head_dim)

    def init_kv_buffer(self) -> list[torch.Tensor]:
        k_shape, v_shape = (
            self._part_shape(dim)
            for dim in (self.device_pool.head_dim, self.device_pool.v_head_dim)
        )
        if k_shape == v_shape and self.layout != HostLayout.PAGE_FIRST_KV_SPLIT:
            both = self._allocate((2, *k_shape))
            self._k, self._v = both[0], both[1]
            return [both]
        self._k, self._v = self._allocate(k_shape), self._allocate(v_shape)
        return [self._k, self._v]

    @property
    def k_buffer(self) -> torch.Tensor:
        """Keys, in the layout's shape without its leading 2."""
        return self._k

    @property
    def v_buffer(self) -> torch.Tensor:
        """Values, likewise."""
        return self._v

    def backup_from_device_all_layer(
        self,
        device_pool: MHADevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        self._copier_of(device_pool).backup(host_indices, device_indices, io_backend)

    def prefers_cpu_slots(self, device_pool: MHADevicePool, io_backend: str) -> bool:
        copier = self._copier_of(device_pool)
        return isinstance(copier, CudaPageCopier) and copier.prefers_cpu_slots(io_backend)

    def load_to_device_per_layer(
        self,
        device_pool: MHADevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        copier = self._copier_of(device_pool)
        copier.load_layer(host_indices, device_indices, layer_id, io_backend)

    def _copier_of(self, device_pool: MHADevicePool) -> _PageCopier:
        """What copies between this pool and `device_pool`, made when first asked for."""
        if self._copier is None or self._copier[0] is not device_pool:
            make = self._cuda_copier if device_pool.k_buffer[0].is_cuda else self._cpu_copier
            self._copier = (device_pool, make(device_pool))
        return self._copier[1]

    def _cuda_copier(self, device_pool: MHADevicePool) -> CudaPageCopier:
        parts = [
            part_rows([self._layer_pages(host, layer) for layer in range(self.layer_num)], dev)
            for host, dev in ((self._k, device_pool.k_buffer), (self._v, device_pool.v_buffer))
        ]
        device_pages = device_pool.size // self.page_size + 1
        device = device_pool.k_buffer[0].device
        return CudaPageCopier(parts, self.page_size, self.page_num, device_pages, device)

    def _cpu_copier(self, device_pool: MHADevicePool) -> CpuPageCopier:
        layers = [self._layer_pairs(device_pool, layer) for layer in range(self.layer_num)]
        device_pages = device_pool.size // self.page_size + 1
        return CpuPageCopier(layers, self.page_size, self.page_num, device_pages)

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        pages = whole_pages(indices, self.page_size, self.page_num).tolist()
        for pool_view, rows in self._flat_pairs(out):
            # Page by page: an index would copy them all twice.
            for row, page in zip(rows, pages, strict=True):
                row[...] = pool_view[page]

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        slots = whole_pages(indices, self.page_size, self.page_num).tolist()
        for pool_view, rows in self._flat_pairs(pages):
            for row, page in zip(rows, slots, strict=True):
                pool_view[page] = row

    def _part_shape(self, dim: int) -> tuple[int, ...]:
        heads, layers, size = self.device_pool.head_num, self.layer_num, self.page_size
        match self.layout:
            case HostLayout.LAYER_FIRST:
                return (layers, self.size, heads, dim)
            case HostLayout.PAGE_FIRST:
                return (self.size, layers, heads, dim)
            case _:
                return (self.page_num, layers, size, heads, dim)

    def _allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self.allocator.allocate(shape, self.dtype, self.device, pin=self.pin_memory)

    def _layer_pairs(self, device_pool: MHADevicePool, layer: int) -> list[PagePair]:
        """One layer's K and V, `[pages, page_size, bytes of a token]` each."""
        return [
            (
                page_view(self._layer_pages(host, layer)),
                page_view(self._device_pages(device[layer])),
            )
            for host, device in ((self._k, device_pool.k_buffer), (self._v, device_pool.v_buffer))
        ]

    def _device_pages(self, buffer: torch.Tensor) -> torch.Tensor:
        whole = len(buffer) // self.page_size
        return buffer[: whole * self.page_size].view(whole, self.page_size, -1)

    def _layer_pages(self, part: torch.Tensor, layer: int) -> torch.Tensor:
        match self.layout:
            case HostLayout.LAYER_FIRST:
                pages = part[layer]
            case HostLayout.PAGE_FIRST:
                pages = part.view(self.page_num, self.page_size, *part.shape[1:])[:, :, layer]
            case _:
                pages = part[:, layer]
        return pages.view(self.page_num, self.page_size, -1)

    def _flat_pairs(self, flat: torch.Tensor) -> list[tuple[PageView, PageView]]:
        """The pool's K and V, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        k_bytes = self.get_ksize_per_token() * self.page_size
        pairs: list[tuple[PageView, PageView]] = []
        for part, region in ((self._k, flat[:, :k_bytes]), (self._v, flat[:, k_bytes:])):
            if self.is_zero_copy:
                pairs.append((page_view(part.view(self.page_num, -1)), page_view(region)))
                continue
            by_layer = part.view(self.layer_num, self.page_num, -1).transpose(0, 1)
            layers = region.view(len(flat), self.layer_num, -1)
            pairs.append((page_view(by_layer), page_view(layers)))
        return pairs

    def _page_parts(self) -> list[tuple[memoryview, int, int]]:
        return [
            (
                part.view(-1).view(torch.uint8).numpy().data,
                part.nbytes // self.page_num,
                part.data_ptr(),
            )
            for part in (self._k, self._v)
        ]

    def _page_shape(self) -> tuple[int, ...]:
        pool = self.device_pool
        if pool.head_dim != pool.v_head_dim:
            raise ValueError("a page with unlike head_dim and v_head_dim has only its flat form")
        if page_byte_order(self.layout) == PageByteOrder.TOKEN_MAJOR:
            return (2, self.page_size, self.layer_num, pool.head_num, pool.head_dim)
        return (2, self.layer_num, self.page_size, pool.head_num, pool.head_dim)


def _token_bytes(pool: MHADevicePool, dim: int) -> int:
    """Bytes of a token over all layers, with `dim` elements a head."""
    return pool.head_num * dim * pool.layer_num * pool.store_dtype.itemsize
