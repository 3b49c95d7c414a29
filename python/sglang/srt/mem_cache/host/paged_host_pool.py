"""Host pool of token slots: keys, values, latent rows."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host.host_layout import HostLayout, PageByteOrder, page_byte_order
from sglang.srt.mem_cache.host.page_copier import PoolPair
from sglang.srt.mem_cache.host.parted_host_pool import PartedPoolHost


class PagedPoolHost(PartedPoolHost[PagedDevicePool]):
    """Mirrors a `PagedDevicePool`. Raises as `PartedPoolHost`."""

    def _device_parts(self, device_pool: PagedDevicePool) -> tuple[tuple[torch.Tensor, ...], ...]:
        """For each part of a page its layers on the device, `[slots, *item]`: buffers or views."""
        return tuple(tuple(part) for part in device_pool.parts)

    def _make_parts(self) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        firsts = [layers[0] for layers in self._device_parts(self.device_pool)]
        wanted = [(self._part_shape(first.shape[1:]), first.dtype) for first in firsts]
        shape, dtype = wanted[0]
        if self.layout != HostLayout.PAGE_FIRST_KV_SPLIT and wanted == [wanted[0]] * 2:
            both = self._allocate((2, *shape), dtype)
            return [both], (both[0], both[1])
        parts = tuple(self._allocate(*one) for one in wanted)
        return list(parts), parts

    def _part_shape(self, item: tuple[int, ...]) -> tuple[int, ...]:
        match self.layout:
            case HostLayout.LAYER_FIRST:
                return (self.layer_num, self.size, *item)
            case HostLayout.PAGE_FIRST:
                return (self.size, self.layer_num, *item)
            case _:
                return (self.page_num, self.layer_num, self.page_size, *item)

    def _paired_with(self, device_pool: PagedDevicePool) -> PoolPair:
        layers = range(self.layer_num)
        return PoolPair(
            host=tuple(
                tuple(self._layer_pages(part, layer) for layer in layers) for part in self._parts
            ),
            device=self._device_parts(device_pool),
            page_size=self.page_size,
            host_pages=self.page_num,
            device_pages=device_pool.size // self.page_size + 1,
        )

    def _layer_pages(self, part: torch.Tensor, layer: int) -> torch.Tensor:
        match self.layout:
            case HostLayout.LAYER_FIRST:
                pages = part[layer]
            case HostLayout.PAGE_FIRST:
                pages = part.view(self.page_num, self.page_size, *part.shape[1:])[:, :, layer]
            case _:
                pages = part[:, layer]
        return pages.view(self.page_num, self.page_size, -1)

    def _page_shape(self) -> tuple[int, ...]:
        items = [layers[0].shape[1:] for layers in self._device_parts(self.device_pool)]
        if items != [items[0]] * len(items):
            raise ValueError("a page of unlike parts has only its flat form")
        parts = (len(items),) if len(items) > 1 else ()
        if page_byte_order(self.layout) == PageByteOrder.TOKEN_MAJOR:
            return (*parts, self.page_size, self.layer_num, *items[0])
        return (*parts, self.layer_num, self.page_size, *items[0])


class MHATokenToKVPoolHost(PagedPoolHost):
    """Mirrors an `MHATokenToKVPool`: a page is its keys, then its values."""

    @property
    def k_buffer(self) -> torch.Tensor:
        """Keys, in the layout's shape without its leading 2."""
        return self._parts[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        """Values, likewise."""
        return self._parts[1]
