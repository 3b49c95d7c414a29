"""A cache rig whose model keeps latent rows and indexer keys, in the same slots."""

from __future__ import annotations

from typing import Final

import torch

from rigs.caches.cache_rig import RIG_DEVICE, CacheRig
from sglang.srt.mem_cache.device.memory_pool import KVCache
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools

LATENT_LAYERS: Final = (0, 1, 2)
INDEXER_LAYERS: Final = (1, 2)
NUM_LAYERS: Final = 4
"""Layers of the model; the last one has no state."""
_RANK, _ROPE, _INDEX_DIM = 6, 2, 4


class MLARig(CacheRig):
    """A `CacheRig` that computes a latent row and an indexer key for each token from all tokens up
    to it, and checks those that it reuses."""

    def make_pool(self, size: int) -> KVCache:
        self.indexer = NSAIndexerPool(
            IndexerSpec.of(INDEXER_LAYERS, _INDEX_DIM, torch.bfloat16),
            size,
            self.page_size,
            RIG_DEVICE,
        )
        self.latent = MLATokenToKVPool(
            size, self.page_size, self.dtype, _RANK, _ROPE, len(LATENT_LAYERS), RIG_DEVICE
        )
        return self.latent

    def model_pools(self) -> ModelPools:
        return ModelPools.of([self.latent, self.indexer], NUM_LAYERS)

    def spoil(self) -> None:
        """Overwrite every indexer key on the device."""
        for buffer in self.indexer.index_k_buffer:
            buffer.fill_(-1)

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        old, new = row[:known], row[known:]
        for layer in LATENT_LAYERS:
            values = (wanted + layer)[:, None].to(self.dtype)
            latent, rope = self.latent.get_mla_kv_buffer(layer, old)
            assert torch.equal(latent[:, 0], values[:known].expand(-1, _RANK)), layer
            assert torch.equal(rope[:, 0], -values[:known].expand(-1, _ROPE)), layer
            self.latent.set_mla_kv_buffer(
                layer,
                new,
                values[known:].expand(-1, _RANK).contiguous(),
                -values[known:].expand(-1, _ROPE),
            )
        for layer in INDEXER_LAYERS:
            # At most 253, so that bfloat16 represents them exactly.
            keys = (wanted + layer)[:, None].expand(-1, _INDEX_DIM)
            reused = self.indexer.get_index_k_buffer(layer)[old]
            assert torch.equal(reused.to(torch.float64), keys[:known]), layer
            self.indexer.set_index_k_buffer(layer, new, keys[known:])
