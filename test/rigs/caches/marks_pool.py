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
from sglang.srt.mem_cache.host.host_pool import HostKVCache

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
        spec: Result of `page_marks` or `prefix_marks`.
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


class MarksPoolHost(HostKVCache):
    """Marks in host memory, page by page or layer by layer. Each slot of a page has an equal share
    of the mark's bytes."""

    @classmethod
    def item_bytes(cls, device_pool: BaseDevicePool) -> int:
        return MARK_BYTES * device_pool.layer_num // device_pool.page_size

    @classmethod
    def shortest_part_bytes(cls, device_pool: BaseDevicePool) -> int:
        return cls.item_bytes(device_pool)

    def _device_parts(self, device_pool: BaseDevicePool) -> tuple[tuple[torch.Tensor, ...], ...]:
        assert isinstance(device_pool, MarksPool)
        share = MARK_BYTES // device_pool.page_size
        return (tuple(layer.view(torch.uint8).view(-1, share) for layer in device_pool.marks),)

    def _page_shape(self) -> tuple[int, ...]:
        return (self.layer_num,)


def marks_of(pool: MarksPool, slots: torch.Tensor) -> list[int]:
    """All layers' marks of whole pages, layer by layer."""
    marks: list[int] = np.asarray(pool.marks[:, pool.pages(slots)]).reshape(-1).tolist()
    return marks
