"""Keys of the indexer of sparse attention (DSA), which have the slots of the latent rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.device.base_device_pool import HasLayerId, PagedDevicePool
from sglang.srt.mem_cache.device.mla_pool import refuse_fp8
from sglang.srt.mem_cache.device.state_spec import PoolName, StateBuffer, StateSpec


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(StateSpec):
    """An indexer key per token: `index_k` `[index_head_dim]`, in the slots of the KV pool.

    Raises:
        ValueError: The dtype is fp8, or `StateSpec` raises it.
    """

    name: PoolName = PoolName.INDEXER
    indices_from_pool: PoolName | None = PoolName.KV

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_fp8(self, "indexer keys")

    @classmethod
    def of(cls, layers: Sequence[int], index_head_dim: int, dtype: torch.dtype) -> IndexerSpec:
        """The spec of keys of `index_head_dim` elements in `layers`."""
        return cls(
            layers=tuple(layers), buffers=(StateBuffer("index_k", (index_head_dim,), dtype),)
        )

    @property
    def index_head_dim(self) -> int:
        """Elements of a key."""
        return self.buffers[0].shape[0]


class NSAIndexerPool(PagedDevicePool):
    """Indexer keys of token slots.

    Attributes:
        index_k_buffer: For each layer `[size + page_size, index_head_dim]`.
    """

    host_pool = "sglang.srt.mem_cache.host.paged_host_pool.NSAIndexerPoolHost"

    def __init__(
        self, spec: IndexerSpec, size: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(spec, size, page_size, device)
        self.index_head_dim = spec.index_head_dim
        (self.index_k_buffer,) = self.parts

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer. Waits for a load that fills the layer."""
        return self.index_k_buffer[self.wait_for_layer(layer_id)]

    def set_index_k_buffer(
        self, layer: HasLayerId | int, loc: torch.Tensor, index_k: torch.Tensor
    ) -> None:
        """Store the keys of new tokens. Does not wait, since a load fills other slots.

        Args:
            layer: The attention layer, or its id.
            loc: int64 `[n]`: slots.
            index_k: `[n, index_head_dim]`, any float dtype.
        """
        place = self.place_to_write(layer)
        self.index_k_buffer[place].index_copy_(0, loc, index_k.to(self.dtype))
