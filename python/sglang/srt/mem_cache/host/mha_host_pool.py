"""Host pool of keys and values per head, in any of the four layouts."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.mem_cache.device.state_pool import DevicePool
from sglang.srt.mem_cache.host.host_copy import PageView, page_view
from sglang.srt.mem_cache.host.host_layout import (
    HostLayout,
    PageByteOrder,
    page_byte_order,
)
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import (
    PageCopier,
    PageLoad,
    PoolPair,
    make_page_copier,
)


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
    _copier: tuple[MHADevicePool, PageCopier] | None = None

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
        return self._copier_of(device_pool).prefers_cpu_slots(io_backend)

    def begin_load(
        self,
        device_pool: MHADevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> PageLoad:
        copier = self._copier_of(device_pool)
        return copier.begin_load(host_indices, device_indices, io_backend)

    def _copier_of(self, device_pool: MHADevicePool) -> PageCopier:
        """What copies between this pool and `device_pool`, made when first asked for."""
        if self._copier is None or self._copier[0] is not device_pool:
            self._copier = (device_pool, make_page_copier(self._paired_with(device_pool)))
        return self._copier[1]

    def _paired_with(self, device_pool: MHADevicePool) -> PoolPair:
        layers = range(self.layer_num)
        return PoolPair(
            host=tuple(
                tuple(self._layer_pages(part, layer) for layer in layers)
                for part in (self._k, self._v)
            ),
            device=(tuple(device_pool.k_buffer), tuple(device_pool.v_buffer)),
            page_size=self.page_size,
            host_pages=self.page_num,
            device_pages=device_pool.size // self.page_size + 1,
        )

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
        return self.allocator.allocate(shape, self.dtype, self.device, pinned_by=self._pinned_by)

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
