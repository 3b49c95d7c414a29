"""A driver whose model attends to latent rows by Triton kernels, interpreted on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from rigs.models.tiny_models import StepDriver
from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.latent_triton_backend import LatentTritonBackend


def latent_driver(
    path: Path,
    device: str,
    kv_cache_dtype: str = "auto",
    tp_group: TensorGroup | None = None,
    gpu_id: int = 0,
    backend: type[LatentTritonBackend] = LatentTritonBackend,
) -> StepDriver:
    """On a GPU the default; elsewhere its attention is replaced by `backend`."""
    driver = StepDriver(
        path,
        page_size=16,
        device=device,
        disable_cuda_graph=True,
        kv_cache_dtype=kv_cache_dtype,
        tp_group=tp_group,
        gpu_id=gpu_id,
    )
    runner = driver.runner
    if device != "cuda":
        (layer, *_) = runner.model.attention_layers()
        runner.attn_backends[layer.kind] = backend(
            AttentionConfig(
                num_heads=layer.num_heads,
                specs={spec.name: spec for spec in runner.state_specs},
                page_size=16,
                dtype=torch.float32,
                device=device,
                tp_group=runner.tp_group,
            )
        )
    (only,) = runner.attn_backends.values()
    assert isinstance(only, LatentTritonBackend)
    return driver
