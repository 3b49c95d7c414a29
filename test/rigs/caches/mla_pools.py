"""Small pools of latent rows and indexer keys with known bytes, for tests of L2 and L3."""

from __future__ import annotations

from typing import Final

import torch

from rigs.stores.host_pools import PAGE, PoolKind, fill_with_random_bits
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import MLATokenToKVPoolHost, NSAIndexerPoolHost


def make_mla_pool(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_pages: int = 16,
    page_size: int = PAGE,
) -> MLATokenToKVPool:
    """3 layers of rows of 10 + 2 elements (fp8: 12 + 2, 20 bytes), in random bits."""
    rank = 12 if dtype is FP8 else 10
    pool = MLATokenToKVPool(num_pages * page_size, page_size, dtype, rank, 2, 3, "cpu")
    fill_with_random_bits(pool, seed)
    return pool


def make_indexer_pool(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_pages: int = 16,
    page_size: int = PAGE,
) -> NSAIndexerPool:
    """2 layers of keys of 6 elements (fp8: 8, 12 bytes), in random bits."""
    spec = IndexerSpec.of((0, 2), 8 if dtype is FP8 else 6, dtype)
    pool = NSAIndexerPool(spec, num_pages * page_size, page_size, "cpu")
    fill_with_random_bits(pool, seed)
    return pool


def latent_rows(dtype: torch.dtype) -> PoolKind:
    """Latent rows of `dtype`."""
    return PoolKind(
        PoolName.KV, lambda seed: make_mla_pool(seed, dtype=dtype), MLATokenToKVPoolHost
    )


def indexer_keys(dtype: torch.dtype) -> PoolKind:
    """Indexer keys of `dtype`."""
    return PoolKind(
        PoolName.INDEXER, lambda seed: make_indexer_pool(seed, dtype=dtype), NSAIndexerPoolHost
    )


LATENT_ROWS: Final = latent_rows(torch.bfloat16)
INDEXER_KEYS: Final = indexer_keys(torch.bfloat16)
