"""Host pool of keys and values per head, in any of the four layouts."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.mem_cache.host_copy import PageIndex, copy_pages
from sglang.srt.mem_cache.host_copy_cuda import CudaPageCopier, check_equally_many
from sglang.srt.mem_cache.host_layout import (
    HostLayout,
    IoBackend,
    PageByteOrder,
    page_byte_order,
)
from sglang.srt.mem_cache.host_page_list import whole_pages
from sglang.srt.mem_cache.host_pool import DevicePool, HostKVCache
from sglang.srt.mem_cache.host_rows import part_rows


class MHATokenToKVPoolHost(HostKVCache):
    """Host pool of keys and values per head, in any of the four layouts."""

    kv_buffer: list[torch.Tensor]
    _cuda: tuple[DevicePool, CudaPageCopier] | None = None

    def get_size_per_token(self) -> int:
        pool = self.device_pool
        elements = pool.head_num * (pool.head_dim + pool.v_head_dim) * pool.layer_num
        return elements * pool.store_dtype.itemsize

    def get_ksize_per_token(self) -> int:
        """Bytes of one token's keys over all layers."""
        pool = self.device_pool
        return pool.head_num * pool.head_dim * pool.layer_num * pool.store_dtype.itemsize

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
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        if device_pool.k_buffer[0].is_cuda:
            self._cuda_copier(device_pool).backup(host_indices, device_indices, io_backend)
            return
        host, dev = self._page_indices(device_pool, host_indices, device_indices, io_backend)
        for layer in range(self.layer_num):
            for to, source in self._layer_pairs(device_pool, layer):
                copy_pages(to, host, source, dev)

    def load_to_device_per_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        if device_pool.k_buffer[0].is_cuda:
            copier = self._cuda_copier(device_pool)
            copier.load_layer(host_indices, device_indices, layer_id, io_backend)
            return
        host, dev = self._page_indices(device_pool, host_indices, device_indices, io_backend)
        for source, to in self._layer_pairs(device_pool, layer_id):
            copy_pages(to, dev, source, host)

    def _cuda_copier(self, device_pool: DevicePool) -> CudaPageCopier:
        if self._cuda is None or self._cuda[0] is not device_pool:
            parts = [
                part_rows([self._layer_pages(host, layer) for layer in range(self.layer_num)], dev)
                for host, dev in ((self._k, device_pool.k_buffer), (self._v, device_pool.v_buffer))
            ]
            device_pages = device_pool.size // self.page_size + 1
            device = device_pool.k_buffer[0].device
            copier = CudaPageCopier(parts, self.page_size, self.page_num, device_pages, device)
            self._cuda = (device_pool, copier)
        return self._cuda[1]

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        index = PageIndex(whole_pages(indices, self.page_size, self.page_num))
        rows = PageIndex(np.arange(index.count))
        for pool_view, flat_view in self._flat_pairs(out):
            copy_pages(flat_view, rows, pool_view, index)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        index = PageIndex(whole_pages(indices, self.page_size, self.page_num))
        rows = PageIndex(np.arange(index.count))
        for pool_view, flat_view in self._flat_pairs(pages):
            copy_pages(pool_view, index, flat_view, rows)

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

    def _page_indices(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> tuple[PageIndex, PageIndex]:
        if io_backend != IoBackend.DIRECT:
            raise ValueError(f"io_backend {io_backend}: this host pool copies with direct only")
        check_equally_many(host_indices, device_indices)
        device_slots = device_pool.size + self.page_size
        return (
            PageIndex(whole_pages(host_indices, self.page_size, self.page_num)),
            PageIndex(
                whole_pages(device_indices.cpu(), self.page_size, device_slots // self.page_size),
                device_pool.k_buffer[0].device,
            ),
        )

    def _layer_pairs(
        self, device_pool: DevicePool, layer: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host, device) page views `[pages, page_size, heads * dim]` of one layer's K and V."""
        return [
            (self._layer_pages(host, layer), self._device_pages(device[layer]))
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

    def _flat_pairs(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Matching page views of the pool and of flat pages (uint8 `[n, page_bytes]`, rows)."""
        k_bytes = self.get_ksize_per_token() * self.page_size
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part, region in ((self._k, flat[:, :k_bytes]), (self._v, flat[:, k_bytes:])):
            rows = region.view(self.dtype).unsqueeze(1)
            if self.is_zero_copy:
                pairs.append((part.view(self.page_num, 1, -1), rows))
                continue
            layers = rows.view(len(flat), 1, self.layer_num, -1)
            for layer in range(self.layer_num):
                pool_view = self._layer_pages(part, layer).view(self.page_num, 1, -1)
                pairs.append((pool_view, layers[:, :, layer]))
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
