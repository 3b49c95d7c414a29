"""Host pools whose pages have parts: keys and values, latent vectors, states."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch

from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.host.host_copy import PagePair, gather_views, page_view, scatter_views
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import (
    PageCopier,
    PageLoad,
    PoolPair,
    make_page_copier,
)

PoolT = TypeVar("PoolT", bound=BaseDevicePool)


class PartedPoolHost(HostKVCache[PoolT]):
    """Mirrors a device pool, part by part.

    A *part* is one buffer of the spec, or some columns of it, over all layers: keys, values, latent
    rows, states. A page's bytes are its parts, one after the other. Raises as `HostKVCache`.
    """

    kv_buffer: list[torch.Tensor]
    _parts: tuple[torch.Tensor, ...]
    """Layer by layer in `layer_first`, else page by page; each contiguous."""
    _copier: tuple[PoolT, PageCopier] | None = None

    @classmethod
    def slot_bytes(cls, device_pool: PoolT) -> int:
        return device_pool.spec.num_bytes

    @classmethod
    def shortest_part_bytes(cls, device_pool: PoolT) -> int:
        spec = device_pool.spec
        return min(buffer.num_bytes for buffer in spec.buffers) * len(spec.layers)

    def get_ksize_per_token(self) -> int:
        """Bytes of one slot in the first part, over all layers."""
        return self._parts[0].nbytes // self.size

    def init_kv_buffer(self) -> list[torch.Tensor]:
        buffers, self._parts = self._make_parts()
        return buffers

    @abstractmethod
    def _make_parts(self) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """The buffers, and the parts, which are views of them."""

    @abstractmethod
    def _paired_with(self, device_pool: PoolT) -> PoolPair:
        """The pages of this pool and of `device_pool`, layer by layer."""

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.allocator.allocate(shape, dtype, self.device, pinned_by=self._pinned_by)

    def backup_from_device_all_layer(
        self,
        device_pool: PoolT,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        self._copier_of(device_pool).backup(host_indices, device_indices, io_backend)

    def prefers_cpu_slots(self, device_pool: PoolT, io_backend: str) -> bool:
        return self._copier_of(device_pool).prefers_cpu_slots(io_backend)

    def begin_load(
        self,
        device_pool: PoolT,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> PageLoad:
        copier = self._copier_of(device_pool)
        return copier.begin_load(host_indices, device_indices, io_backend)

    def _copier_of(self, device_pool: PoolT) -> PageCopier:
        """The copier between this pool and `device_pool`, made on first use."""
        if self._copier is None or self._copier[0] is not device_pool:
            self._copier = (device_pool, make_page_copier(self._paired_with(device_pool)))
        return self._copier[1]

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        numbers = whole_pages(indices, self.page_size, self.page_num)
        gather_views(self._flat_pairs(out), numbers)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        numbers = whole_pages(indices, self.page_size, self.page_num)
        scatter_views(self._flat_pairs(pages), numbers)

    def _flat_pairs(self, flat: torch.Tensor) -> list[PagePair]:
        """The pool's parts, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        pairs: list[PagePair] = []
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

    def page_items(self) -> list[torch.Tensor]:
        """For each buffer of the spec a view of its bytes: uint8 `[page, *outer, length, bytes]`,
        where `length` is the first dimension of an item and `outer` are layers and tokens in the
        order of the layout. Each buffer must be one part here."""
        found = []
        for part, buffer in zip(self._parts, self.device_pool.spec.buffers, strict=True):
            raw, length = part.view(-1).view(torch.uint8), buffer.shape[0]
            if self.is_zero_copy:
                outer = self.layer_num * self.page_size
                found.append(raw.view(self.page_num, outer, length, -1))
                continue
            by_layer = raw.view(self.layer_num, self.page_num, self.page_size, length, -1)
            found.append(by_layer.transpose(0, 1))
        return found

    def _page_parts(self) -> list[tuple[memoryview, int, int]]:
        return [
            (
                part.view(-1).view(torch.uint8).numpy().data,
                part.nbytes // self.page_num,
                part.data_ptr(),
            )
            for part in self._parts
        ]
