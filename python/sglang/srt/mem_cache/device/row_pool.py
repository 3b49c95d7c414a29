"""Rows that attention reads as keys and as values: one head whose keys equal its values.

An item may stand for several tokens, whose row a layer has compressed. Callers give items, which
are slots divided by the stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.device.base_device_pool import FP8_DTYPES, LayerOrId, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.device.state_spec import PoolName, StateBuffer, StateSpec


@dataclass(frozen=True, kw_only=True)
class RowSpec(StateSpec):
    """A row for each item: `rows` `[width]`, the same on all ranks.

    Raises:
        ValueError: The dtype is fp8, or `StateSpec` raises it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype in FP8_DTYPES:
            dtype = str(self.dtype).removeprefix("torch.")
            raise ValueError(
                f"state '{self.name}': rows are not kept in {dtype}; use --kv-cache-dtype auto or "
                "bfloat16"
            )

    @classmethod
    def of(
        cls,
        layers: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        *,
        stride: int = 1,
        name: PoolName = PoolName.KV,
        indices_from_pool: PoolName | None = None,
    ) -> RowSpec:
        """The spec of rows of `width` elements, one for each `stride` tokens; see `StateSpec`."""
        return cls(
            name=name,
            layers=layers,
            buffers=(StateBuffer("rows", (width,), dtype),),
            stride=stride,
            indices_from_pool=indices_from_pool,
        )


class RowPool(KVCache):
    """Rows of items, in the slots of requests.

    Attributes:
        row_buffer: For each layer `[(size + page_size) // stride, width]`.
    """

    host_pool = "sglang.srt.mem_cache.host.host_pool.HostKVCache"

    def _set_up(self, spec: RowSpec, size: int, page_size: int, device: torch.device | str) -> None:
        PagedDevicePool.__init__(self, spec, size, page_size, device)
        (self.row_buffer,) = self.parts

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Rows of a layer. Waits for a load that fills the layer."""
        return self.row_buffer[self.wait_for_layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The same rows as `get_key_buffer`."""
        return self.get_key_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.get_key_buffer(layer_id)
        return rows, rows

    def kv_buffer_to_write(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a layer, twice. Does not wait."""
        rows = self.row_buffer[self.place_to_write(layer_id)]
        return rows, rows

    def set_kv_buffer(
        self, layer: LayerOrId, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Store new rows.

        Args:
            loc: int64 `[n]`: items.
            cache_k: `[n, width]`, any float dtype.
            cache_v: The same rows. It is not read.
        """
        rows = self.row_buffer[self.place_to_write(layer)]
        rows.index_copy_(0, loc, cache_k.to(rows.dtype))
