"""Cache rigs of one of several ranks: a model's heads, and its states, split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rigs.caches.cache_rig import RIG_DEVICE, CacheRig
from rigs.caches.memory_ranks import PlaceInGroup
from rigs.caches.state_rig import StateRig, distinct_numbers
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.memory_pool import KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.device.state_pool import MambaSpec
from sglang.srt.mem_cache.device.state_spec import KVSpec, RankShare, RankSplit

_LAYERS, _DIM = 3, 4
_HEAD_STEP = 1000
"""Difference between the values of neighbouring heads, so that swapped heads are detected."""


@dataclass
class ShardedRig(CacheRig):
    """A `CacheRig` with the heads that its rank has of `total_heads`."""

    total_heads: int = 4

    def make_pool(self, size: int) -> KVCache:
        share = self._place().kv_state_share(self.total_heads)
        self.heads = torch.arange(share.begin, share.end, device=RIG_DEVICE)
        layers = tuple(range(_LAYERS))
        spec = KVSpec.of_heads(layers, len(self.heads), _DIM, self.dtype, share=share)
        return MHATokenToKVPool.from_spec(spec, size, self.page_size, RIG_DEVICE)

    def _place(self) -> TensorPlacement:
        return TensorPlacement(
            dtype=self.dtype,
            device=RIG_DEVICE,
            tp_group=PlaceInGroup(self.group.attn_tp_rank, self.group.attn_tp_size),
        )

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        for layer in range(_LAYERS):
            rows = (wanted + layer)[:, None] + _HEAD_STEP * self.heads
            rows = rows.to(self.dtype)[:, :, None].expand(-1, -1, _DIM).contiguous()
            keys, values = self.pool.get_kv_buffer(layer)
            assert torch.equal(keys[row[:known]], rows[:known]), layer
            assert torch.equal(values[row[:known]], -rows[:known]), layer
            self.pool.set_kv_buffer(layer, row[known:], rows[known:], -rows[known:])


_KEY_HEADS, _KEY_DIM, _VALUE_DIM, _KERNEL = 4, 3, 2, 4
_REPEATS = 2
"""Value heads per key head."""
_CHANNEL_STEP = 300


@dataclass
class ShardedStateRig(ShardedRig, StateRig):
    """A `StateRig` whose rank has a part of the heads of keys and values, and of states."""

    def __post_init__(self) -> None:
        keys = self._place().share(_KEY_HEADS, "key heads")
        values = keys.times(_REPEATS)
        runs = [keys.times(_KEY_DIM), keys.times(_KEY_DIM), values.times(_VALUE_DIM)]
        first = [0, runs[0].total, 2 * runs[0].total]
        self._state_heads = torch.arange(values.begin, values.end, device=RIG_DEVICE)[:, None, None]
        self._channels = torch.cat(
            [at + torch.arange(run.begin, run.end) for at, run in zip(first, runs, strict=True)]
        )[:, None].to(RIG_DEVICE)
        self.spec = MambaSpec.of_shapes(
            (1, 3),
            (values.size, _KEY_DIM, _VALUE_DIM),
            (len(self._channels), _KERNEL - 1),
            ssm_dtype=torch.float32,
            conv_dtype=torch.float32,
            share=RankShare(RankSplit.HEADS, values.begin, values.end, values.total),
        )
        super().__post_init__()

    def state_rows(self, value: float, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        elements = distinct_numbers((_KEY_DIM, _VALUE_DIM))
        inputs = distinct_numbers((_KERNEL - 1,))
        return (
            (value + layer + 1) * elements + _HEAD_STEP * self._state_heads,
            (value - layer + 2) * inputs - _CHANNEL_STEP * self._channels,
        )
