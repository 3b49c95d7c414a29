"""A cache rig of one of several ranks: the keys and values of a model's heads, split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool
from sglang.test.cache_rig import RIG_DEVICE, CacheRig

_LAYERS, _DIM = 3, 4
_HEAD_STEP = 1000
"""Heads differ by it, so that a head in the place of another is found out."""


@dataclass
class ShardedRig(CacheRig):
    """A `CacheRig` with the heads that its rank has of `total_heads`."""

    total_heads: int = 4

    def make_pool(self, size: int) -> KVCache:
        place = TensorPlacement(
            dtype=self.dtype,
            device=RIG_DEVICE,
            tp_rank=self.group.attn_tp_rank,
            tp_size=self.group.attn_tp_size,
        )
        share = place.kv_state_share(self.total_heads)
        self.heads = torch.arange(share.begin, share.end, device=RIG_DEVICE)
        return MHATokenToKVPool(
            size,
            self.page_size,
            self.dtype,
            len(self.heads),
            _DIM,
            _LAYERS,
            RIG_DEVICE,
            share=share,
        )

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        for layer in range(_LAYERS):
            rows = (wanted + layer)[:, None] + _HEAD_STEP * self.heads
            rows = rows.to(self.dtype)[:, :, None].expand(-1, -1, _DIM).contiguous()
            keys, values = self.pool.get_kv_buffer(layer)
            assert torch.equal(keys[row[:known]], rows[:known]), layer
            assert torch.equal(values[row[:known]], -rows[:known]), layer
            self.pool.set_kv_buffer(layer, row[known:], rows[known:], -rows[known:])
