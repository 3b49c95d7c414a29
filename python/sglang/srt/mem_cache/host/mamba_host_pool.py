"""Host pool of recurrent states: a page is one state, of all layers that have such."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, Self

import torch

from sglang.srt.mem_cache.device.mamba_pool import MambaPool
from sglang.srt.mem_cache.device.state_spec import StateBuffer
from sglang.srt.mem_cache.host.host_copy import PageView, page_view
from sglang.srt.mem_cache.host.host_layout import HostLayout, parse_layout
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import (
    PageCopier,
    PageLoad,
    PoolPair,
    make_page_copier,
)

_LAYOUTS: Final = (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)


class MambaPoolHost(HostKVCache[MambaPool]):
    """Host pool of recurrent states: a buffer of `temporal`, and one of `conv`.

    `layer_first` is `[layer, state, ...]`; `page_first` and `page_first_direct`, which differ in
    the order of tokens alone, are `[state, layer, ...]`. Arguments are those of `HostKVCache`; the
    page size is 1.

    Raises:
        ValueError: As `HostKVCache`; or the layout separates keys from values.
    """

    _copier: tuple[MambaPool, PageCopier] | None = None

    def __init__(
        self,
        device_pool: MambaPool,
        host_to_device_ratio: float,
        host_size: float,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        layout: str = "layer_first",
        *,
        page_num: int | None = None,
    ) -> None:
        if parse_layout(layout) not in _LAYOUTS:
            raise ValueError(
                f"layout {layout}: recurrent states have no keys and values to keep apart; use "
                f"{', '.join(one.value for one in _LAYOUTS)}"
            )
        super().__init__(
            device_pool,
            host_to_device_ratio,
            host_size,
            1,
            layout,
            pin_memory,
            device,
            allocator_type,
            page_num=page_num,
        )

    @classmethod
    def make(
        cls, device_pool: MambaPool, *, page_num: int, layout: str, allocator_type: str = "default"
    ) -> Self:
        return cls(
            device_pool, 0.0, 0.0, allocator_type=allocator_type, layout=layout, page_num=page_num
        )

    @classmethod
    def slot_bytes(cls, device_pool: MambaPool) -> int:
        return device_pool.spec.num_bytes

    @classmethod
    def shortest_part_bytes(cls, device_pool: MambaPool) -> int:
        return min(_part_bytes(device_pool))

    def get_ksize_per_token(self) -> int:
        """Bytes of the temporal state over all layers."""
        return _part_bytes(self.device_pool)[0]

    def init_kv_buffer(self) -> list[torch.Tensor]:
        return [self._allocate(buffer) for buffer in self.device_pool.spec.buffers]

    def _allocate(self, buffer: StateBuffer) -> torch.Tensor:
        outer = (self.page_num, self.layer_num)
        outer = outer if self.is_zero_copy else outer[::-1]
        return self.allocator.allocate(
            (*outer, *buffer.shape), buffer.dtype, self.device, pinned_by=self._pinned_by
        )

    def backup_from_device_all_layer(
        self,
        device_pool: MambaPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str = "kernel",
    ) -> None:
        self._copier_of(device_pool).backup(host_indices, device_indices, io_backend)

    def begin_load(
        self,
        device_pool: MambaPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> PageLoad:
        copier = self._copier_of(device_pool)
        return copier.begin_load(host_indices, device_indices, io_backend)

    def _copier_of(self, device_pool: MambaPool) -> PageCopier:
        """What copies between this pool and `device_pool`, made when first asked for."""
        if self._copier is None or self._copier[0] is not device_pool:
            self._copier = (device_pool, make_page_copier(self._paired_with(device_pool)))
        return self._copier[1]

    def _paired_with(self, device_pool: MambaPool) -> PoolPair:
        return PoolPair(
            host=tuple(
                tuple(pages.view(self.page_num, 1, -1) for pages in self._by_layer(buffer))
                for buffer in self.kv_buffer
            ),
            device=(tuple(device_pool.temporal), tuple(device_pool.conv)),
            page_size=1,
            host_pages=self.page_num,
            device_pages=device_pool.size + 1,
        )

    def _by_layer(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """For each layer `[state, ...]`, views."""
        return buffer.unbind(1 if self.is_zero_copy else 0)

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        pages = whole_pages(indices, 1, self.page_num).tolist()
        for pool_view, rows in self._flat_pairs(out):
            for row, page in zip(rows, pages, strict=True):
                row[...] = pool_view[page]

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        slots = whole_pages(indices, 1, self.page_num).tolist()
        for pool_view, rows in self._flat_pairs(pages):
            for row, page in zip(rows, slots, strict=True):
                pool_view[page] = row

    def _flat_pairs(self, flat: torch.Tensor) -> list[tuple[PageView, PageView]]:
        """The pool's buffers, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        pairs: list[tuple[PageView, PageView]] = []
        begin = 0
        for buffer, size in zip(self.kv_buffer, _part_bytes(self.device_pool), strict=True):
            region, begin = flat[:, begin : begin + size], begin + size
            if self.is_zero_copy:
                pairs.append((page_view(buffer.view(self.page_num, -1)), page_view(region)))
                continue
            by_state = buffer.view(self.layer_num, self.page_num, -1).transpose(0, 1)
            pairs.append(
                (page_view(by_state), page_view(region.view(len(flat), self.layer_num, -1)))
            )
        return pairs

    @property
    def page_format(self) -> str:
        buffers = [f"{one.name} {one.dtype} {one.shape}" for one in self.device_pool.spec.buffers]
        return f"{super().page_format} {buffers}"

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A zeroed flat state, uint8: its buffers have dtypes of their own."""
        return torch.zeros(self.page_bytes, dtype=torch.uint8)

    def _page_parts(self) -> list[tuple[memoryview, int, int]]:
        return [
            (
                buffer.view(-1).view(torch.uint8).numpy().data,
                buffer.nbytes // self.page_num,
                buffer.data_ptr(),
            )
            for buffer in self.kv_buffer
        ]

    def _page_shape(self) -> tuple[int, ...]:
        raise ValueError("a recurrent state, of two buffers, has only its flat form")


def _part_bytes(pool: MambaPool) -> list[int]:
    """Bytes of one state over all layers: of its temporal buffer, and of its convolution's."""
    return [
        pool.layer_num * prod(buffer.shape) * buffer.dtype.itemsize for buffer in pool.spec.buffers
    ]
