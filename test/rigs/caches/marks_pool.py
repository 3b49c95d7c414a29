"""An artificial second kind of state: a few bytes per page, in some layers of the model.

`MarksPool` is its device pool, `MarksPoolHost` its host pool in any layout. A *mark* is a number of
`MARK_BYTES` bytes for a page and layer. It stands for an indexer, which shares the primary pool's
slots, or for recurrent states, where `page_size` is 1 and slots are its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import PageLoad

MARK_BYTES: Final = 8


_MARK: Final = (StateBuffer("mark", (1,), torch.int64),)


def page_marks(*layers: int) -> StateSpec:
    """Spec of marks in these layers, one for each page of the primary pool."""
    return StateSpec(
        name=PoolName.INDEXER, layers=layers, buffers=_MARK, indices_from_pool=PoolName.KV
    )


def prefix_marks(*layers: int) -> StateSpec:
    """Spec of marks in these layers, one for each prefix."""
    return StateSpec(
        name=PoolName.MAMBA,
        layers=layers,
        buffers=_MARK,
        item=ItemKind.STATE,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


class MarksPool(BaseDevicePool):
    """Marks on the device, which is a CPU.

    Args:
        spec: From `page_marks` or `prefix_marks`.
        size: Slots besides the padding page.
        page_size: Slots of a page.
    """

    host_pool = "rigs.caches.marks_pool.MarksPoolHost"

    def __init__(self, spec: StateSpec, size: int, page_size: int) -> None:
        super().__init__(spec, size, "cpu", page_size)
        self.marks = torch.zeros(self.layer_num, size // page_size + 1, dtype=torch.int64)
        """`[layer, page]`."""

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        layers = list(self.marks)
        return (
            [layer.data_ptr() for layer in layers],
            [layer.nbytes for layer in layers],
            [MARK_BYTES] * len(layers),
        )

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Page numbers of the slots of whole pages."""
        return slots[:: self.page_size] // self.page_size


class _MarksLoad(PageLoad):
    def __init__(
        self, marks: torch.Tensor, to: torch.Tensor, by_page: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._marks = marks
        self._to = to
        self._by_page = by_page
        self._source = source

    def issue(self, layer: int) -> None:
        self._marks[layer, self._to] = self._by_page[self._source, layer]


class MarksPoolHost(HostKVCache[MarksPool]):
    """Marks in host memory, page by page or layer by layer."""

    @classmethod
    def slot_bytes(cls, device_pool: MarksPool) -> int:
        return MARK_BYTES * device_pool.layer_num // device_pool.page_size

    @classmethod
    def shortest_part_bytes(cls, device_pool: MarksPool) -> int:
        return cls.slot_bytes(device_pool)

    def get_ksize_per_token(self) -> int:
        return self.size_per_token

    def init_kv_buffer(self) -> list[torch.Tensor]:
        pages_first = (self.page_num, self.layer_num)
        shape = pages_first if self.is_zero_copy else pages_first[::-1]
        buffer = self.allocator.allocate(shape, torch.int64, self.device, pinned_by=self._pinned_by)
        self._by_page = buffer if self.is_zero_copy else buffer.t()
        """`[page, layer]`, a view."""
        return [buffer]

    def begin_load(
        self,
        device_pool: MarksPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> PageLoad:
        to = device_pool.pages(device_indices)
        return _MarksLoad(device_pool.marks, to, self._by_page, self._pages_of(host_indices))

    def backup_from_device_all_layer(
        self,
        device_pool: MarksPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        source = device_pool.marks[:, device_pool.pages(device_indices)]
        self._by_page[self._pages_of(host_indices)] = source.t()

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        rows = self._by_page[self._pages_of(indices)].contiguous()
        out.copy_(rows.view(torch.uint8))

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        self._by_page[self._pages_of(indices)] = pages.contiguous().view(torch.int64)

    def _pages_of(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(whole_pages(indices, self.page_size, self.page_num))

    def _page_parts(self) -> list[tuple[memoryview, int, int]]:
        raw = self.kv_buffer[0].view(-1).view(torch.uint8).numpy()
        return [(raw.data, self.page_bytes, self.kv_buffer[0].data_ptr())]

    def _page_shape(self) -> tuple[int, ...]:
        return (self.layer_num,)


def marks_of(pool: MarksPool, slots: torch.Tensor) -> list[int]:
    """All layers' marks of whole pages, layer by layer."""
    marks: list[int] = np.asarray(pool.marks[:, pool.pages(slots)]).reshape(-1).tolist()
    return marks
