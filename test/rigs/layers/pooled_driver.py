"""A driver of GLM-5.3-Flash whose layers run by Triton kernels, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rigs.layers.replayed_graphs import add_replays
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend
from sglang.srt.layers.attention_kind import POOLED_DSA
from sglang.srt.layers.compressed.hyper_connection import HyperConnection
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.mla.pooled_indexer import PooledIndexer
from sglang.srt.mem_cache.device.state_spec import PoolName

PAGE = 16
_BY_KERNELS = HyperConnection, KimiDeltaAttention, PooledIndexer


def poison(driver: StepDriver) -> None:
    """NaN in all latent rows and keys of groups but the padding page's, and in open groups."""
    for name in (PoolName.KV, PoolName.INDEXER, PoolName.OPEN_GROUP):
        pool = driver.runner.pools[name]
        padding = 0 if name is PoolName.OPEN_GROUP else PAGE // pool.spec.stride
        for part in pool.parts:
            for buffer in part:
                buffer[padding:].fill_(torch.nan)


def pooled_driver(
    path: Path,
    *,
    by_kernels: bool,
    replays: pytest.MonkeyPatch | None = None,
    backend: type[LatentTritonBackend] = LatentTritonBackend,
) -> StepDriver:
    """A driver with pages of 16 tokens and poisoned pools.

    Args:
        by_kernels: By the kernels of GPUs; else in torch.
        replays: If given, short steps are replayed.
        backend: Its attention by kernels.
    """
    driver = StepDriver(path, page_size=PAGE, pool_tokens=1024, max_requests=4)
    poison(driver)
    if not by_kernels:
        return driver
    runner = driver.runner
    for module in runner.model.modules():
        if isinstance(module, _BY_KERNELS):
            module._kernels = KERNELS
    (layer, *_) = runner.model.attention_layers()
    runner.attn_backends[POOLED_DSA] = backend(
        AttentionConfig(
            num_heads=layer.num_heads,
            specs={spec.name: spec for spec in runner.state_specs},
            page_size=PAGE,
            dtype=torch.float32,
            device="cpu",
            tp_group=runner.tp_group,
        )
    )
    if replays is not None:
        add_replays(replays, driver)
    return driver
