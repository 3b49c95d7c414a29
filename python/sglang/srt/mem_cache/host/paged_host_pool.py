"""Host pool of token slots: a part of every page for each buffer of the device pool's spec."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host.host_copy import PageView, page_view
from sglang.srt.mem_cache.host.host_layout import (
    HostLayout,
    PageByteOrder,
    check_layout_of_kind,
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


class PagedPoolHost(HostKVCache[PagedDevicePool]):
    """Mirrors a `PagedDevicePool`, buffer by buffer.

    A *part* is one buffer of the spec, over all layers: keys, values, latent rows. A page's bytes
    are its parts, one after the other.

    Raises:
        ValueError: This kind of state has no such layout, or as `HostKVCache`.
    """

    LAYOUTS: ClassVar[tuple[HostLayout, ...]] = tuple(HostLayout)
    """Those that the kind of state has."""

    kv_buffer: list[torch.Tensor]
    _parts: tuple[torch.Tensor, ...]
    _copier: tuple[PagedDevicePool, PageCopier] | None = None

    @classmethod
    def slot_bytes(cls, device_pool: PagedDevicePool) -> int:
        return device_pool.spec.num_bytes

    @classmethod
    def shortest_part_bytes(cls, device_pool: PagedDevicePool) -> int:
        return min(_part_bytes(device_pool))

    def get_ksize_per_token(self) -> int:
        """Bytes of one token in the first part, over all layers."""
        return _part_bytes(self.device_pool)[0]

    def init_kv_buffer(self) -> list[torch.Tensor]:
        check_layout_of_kind(self.layout, self.LAYOUTS, type(self).__name__)
        wanted = [
            (self._part_shape(buffer.shape), layers[0].dtype)
            for buffer, layers in zip(
                self.device_pool.spec.buffers, self.device_pool.parts, strict=True
            )
        ]
        shape, dtype = wanted[0]
        if self.layout != HostLayout.PAGE_FIRST_KV_SPLIT and wanted == [wanted[0]] * 2:
            both = self._allocate((2, *shape), dtype)
            self._parts = (both[0], both[1])
            return [both]
        self._parts = tuple(self._allocate(*one) for one in wanted)
        return list(self._parts)

    def backup_from_device_all_layer(
        self,
        device_pool: PagedDevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        self._copier_of(device_pool).backup(host_indices, device_indices, io_backend)

    def prefers_cpu_slots(self, device_pool: PagedDevicePool, io_backend: str) -> bool:
        return self._copier_of(device_pool).prefers_cpu_slots(io_backend)

    def begin_load(
        self,
        device_pool: PagedDevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> PageLoad:
        copier = self._copier_of(device_pool)
        return copier.begin_load(host_indices, device_indices, io_backend)

    def _copier_of(self, device_pool: PagedDevicePool) -> PageCopier:
        """What copies between this pool and `device_pool`, made when first asked for."""
        if self._copier is None or self._copier[0] is not device_pool:
            self._copier = (device_pool, make_page_copier(self._paired_with(device_pool)))
        return self._copier[1]

    def _paired_with(self, device_pool: PagedDevicePool) -> PoolPair:
        layers = range(self.layer_num)
        return PoolPair(
            host=tuple(
                tuple(self._layer_pages(part, layer) for layer in layers) for part in self._parts
            ),
            device=tuple(tuple(part) for part in device_pool.parts),
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

    def _part_shape(self, item: tuple[int, ...]) -> tuple[int, ...]:
        match self.layout:
            case HostLayout.LAYER_FIRST:
                return (self.layer_num, self.size, *item)
            case HostLayout.PAGE_FIRST:
                return (self.size, self.layer_num, *item)
            case _:
                return (self.page_num, self.layer_num, self.page_size, *item)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.allocator.allocate(shape, dtype, self.device, pinned_by=self._pinned_by)

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
        """The pool's parts, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        pairs: list[tuple[PageView, PageView]] = []
        begin = 0
        for part in self._parts:
            end = begin + part.nbytes // self.page_num
            region, begin = flat[:, begin:end], end
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
            for part in self._parts
        ]

    def _page_shape(self) -> tuple[int, ...]:
        items = [buffer.shape for buffer in self.device_pool.spec.buffers]
        if items != [items[0]] * len(items):
            raise ValueError("a page of unlike parts has only its flat form")
        parts = (len(items),) if len(items) > 1 else ()
        if page_byte_order(self.layout) == PageByteOrder.TOKEN_MAJOR:
            return (*parts, self.page_size, self.layer_num, *items[0])
        return (*parts, self.layer_num, self.page_size, *items[0])


def _part_bytes(pool: PagedDevicePool) -> list[int]:
    """For each part the bytes of one token over all layers."""
    return [buffer.num_bytes * pool.layer_num for buffer in pool.spec.buffers]
