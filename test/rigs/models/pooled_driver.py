"""A driver of GLM-5.3-Flash whose layers run by Triton kernels, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend
from sglang.srt.layers.attention_kind import POOLED_DSA
from sglang.srt.layers.compressed.hyper_connection import HyperConnection
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.mla.pooled_indexer import PooledIndexer
from sglang.srt.mem_cache.device.state_spec import PoolName

_BY_KERNELS = HyperConnection, KimiDeltaAttention, PooledIndexer


def poison(driver: StepDriver) -> None:
    """NaN in all latent rows, keys and open groups but the padding's, which no request owns."""
    for name in (PoolName.KV, PoolName.INDEXER, PoolName.OPEN_GROUP):
        for part in driver.runner.pools[name].parts:
            for buffer in part:
                # The first page is padding; a reader past the end reads finite numbers there.
                first = (
                    0
                    if name is PoolName.OPEN_GROUP
                    else max(
                        1, 16 * len(buffer) // len(driver.runner.pools[PoolName.KV].parts[0][0])
                    )
                )
                buffer[first:].fill_(torch.nan)


def pooled_driver(path: Path, *, by_kernels: bool, **options: Any) -> StepDriver:
    """A driver with pages of 16 tokens, in torch or by the kernels of GPUs."""
    driver = StepDriver(path, page_size=16, **options)
    poison(driver)
    if not by_kernels:
        return driver
    runner = driver.runner
    for module in runner.model.modules():
        if isinstance(module, _BY_KERNELS):
            module._kernels = KERNELS
    (layer, *_) = runner.model.attention_layers()
    runner.attn_backends[POOLED_DSA] = LatentTritonBackend(
        AttentionConfig(
            num_heads=layer.num_heads,
            specs={spec.name: spec for spec in runner.state_specs},
            page_size=16,
            dtype=torch.float32,
            device="cpu",
            tp_group=runner.tp_group,
        )
    )
    return driver
