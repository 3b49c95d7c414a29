"""Host pools by kind of state: keys and values, latent rows (MLA), indexer keys (DSA), states of
whole prefixes. Other token slots are mirrored by a plain `HostKVCache`."""

from __future__ import annotations

from typing import ClassVar

import torch

from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool
from sglang.srt.mem_cache.host.host_layout import HostLayout, PageByteOrder
from sglang.srt.mem_cache.host.host_page_list import HostPageList
from sglang.srt.mem_cache.host.host_pool import HostKVCache


class MHATokenToKVPoolHost(HostKVCache):
    """Mirrors an `MHATokenToKVPool`: a page is its keys, then its values."""

    def init_kv_buffer(self) -> list[torch.Tensor]:
        """One buffer for both, unless the layout is `page_first_kv_split` or they differ."""
        keys, values = (layers[0] for layers in self._device_parts(self.device_pool))
        is_split = self.layout == HostLayout.PAGE_FIRST_KV_SPLIT
        if is_split or (keys.shape, keys.dtype) != (values.shape, values.dtype):
            return super().init_kv_buffer()
        shape = (2, *self._part_shape(keys.shape[1:]))
        both = self.allocator.allocate(shape, keys.dtype, self.device, pinned_by=self._pinned_by)
        self._parts = (both[0], both[1])
        return [both]

    @property
    def k_buffer(self) -> torch.Tensor:
        """Keys, in the layout's shape without its leading 2."""
        return self._parts[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        """Values, likewise."""
        return self._parts[1]


class MLATokenToKVPoolHost(HostKVCache):
    """Mirrors an `MLATokenToKVPool`: a page is its latent rows.

    In `page_first_kv_split` it is their latent vectors, then the rotated parts, each in a buffer of
    their own: `(page, layer, slot, 1, kv_lora_rank)` and `(page, layer, slot, 1,
    qk_rope_head_dim)`.
    """

    @property
    def page_byte_order(self) -> str:
        return PageByteOrder.LAYER_MAJOR_SPLIT if self._splits_rows else super().page_byte_order

    @property
    def _splits_rows(self) -> bool:
        return self.layout == HostLayout.PAGE_FIRST_KV_SPLIT

    def _device_parts(self, device_pool: BaseDevicePool) -> tuple[tuple[torch.Tensor, ...], ...]:
        if not self._splits_rows:
            return super()._device_parts(device_pool)
        assert isinstance(device_pool, MLATokenToKVPool)
        halves = [device_pool.split_rows(rows) for rows in device_pool.kv_buffer]
        latent, rope = zip(*halves, strict=True)
        return latent, rope


class NSAIndexerPoolHost(HostKVCache):
    """Mirrors an `NSAIndexerPool`: a page is its indexer keys, one part in every layout. Slots are
    the primary pool's."""

    def __init__(
        self,
        device_pool: BaseDevicePool,
        anchor_host: HostPageList,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
    ) -> None:
        """See `HostKVCache`. The pool has as many pages as `anchor_host`, and mirrors the
        indexer-key pool of an `NSATokenToKVPool`.

        Raises:
            ValueError: The pages of the two pools are not equally long, or as `HostKVCache`.
        """
        if isinstance(device_pool, NSATokenToKVPool):
            device_pool = device_pool.index_pool
        if anchor_host.page_size != device_pool.page_size:
            raise ValueError(
                f"indexer pages of {device_pool.page_size} tokens do not share the slots of pages "
                f"of {anchor_host.page_size}"
            )
        super().__init__(
            device_pool,
            0.0,
            0.0,
            device_pool.page_size,
            layout,
            pin_memory,
            device,
            allocator_type,
            page_num=anchor_host.page_num,
        )


DSAIndexerPoolHost = NSAIndexerPoolHost
"""The same class by the later name of the attention, DSA."""


class StatePoolHost(HostKVCache):
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
        device_pool: BaseDevicePool,
        host_to_device_ratio: float,
        host_size: float,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        layout: str = "layer_first",
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
        )

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
