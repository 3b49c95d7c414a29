"""Host pool of states of whole prefixes: a page is one state, with all layers that keep it."""

from __future__ import annotations

from typing import ClassVar, Self

import torch

from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache


class StatePoolHost(HostKVCache[StatePool]):
    """Mirrors a `StatePool`, buffer by buffer.

    `layer_first` is `[layer, state, ...]`; `page_first` and `page_first_direct`, which differ in
    the order of tokens alone, are `[state, layer, ...]`. Arguments are those of `HostKVCache`; the
    page size is 1, and `page_first_kv_split` is refused: a state has no keys and values.
    """

    LAYOUTS: ClassVar[tuple[HostLayout, ...]] = (
        HostLayout.LAYER_FIRST,
        HostLayout.PAGE_FIRST,
        HostLayout.PAGE_FIRST_DIRECT,
    )

    def __init__(
        self,
        device_pool: StatePool,
        host_to_device_ratio: float,
        host_size: float,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        layout: str = "layer_first",
        *,
        page_num: int | None = None,
    ) -> None:
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
        cls, device_pool: StatePool, *, page_num: int, layout: str, allocator_type: str = "default"
    ) -> Self:
        return cls(
            device_pool, 0.0, 0.0, allocator_type=allocator_type, layout=layout, page_num=page_num
        )

    def _device_parts(self, device_pool: StatePool) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(tuple(buffer) for buffer in device_pool.buffers)

    def _part_shape(self, item: tuple[int, ...]) -> tuple[int, ...]:
        outer = (self.page_num, self.layer_num)
        return (*(outer if self.is_zero_copy else outer[::-1]), *item)

    @property
    def page_format(self) -> str:
        buffers = [
            f"{one.name} {one.dtype} {(self._over_all_heads(one.shape[0]), *one.shape[1:])}"
            for one in self.device_pool.spec.buffers
        ]
        return f"{super().page_format} {buffers}"

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A zeroed flat state, uint8: its buffers have dtypes of their own."""
        return torch.zeros(self.page_bytes, dtype=torch.uint8)

    def _page_shape(self) -> tuple[int, ...]:
        raise ValueError("a recurrent state has only its flat form")


class MambaPoolHost(StatePoolHost):
    """Mirrors a `MambaPool`: a buffer of `temporal`, and one of `conv`."""
