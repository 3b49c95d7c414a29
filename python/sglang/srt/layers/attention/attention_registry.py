"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

ATTENTION_BACKENDS = ("torch_native",)


def create_attention_backend(
    name: str, *, kv_bytes_per_layer: int, page_size: int, dtype: torch.dtype
) -> AttentionBackend:
    """Make the backend called `name`.

    Args:
        kv_bytes_per_layer: Bytes of one token's keys and values in one layer of the pool.
        page_size: Tokens per page.
        dtype: Of the model's activations.

    Raises:
        ValueError: There is none of that name; lists those that there are.
    """
    if name == "torch_native":
        return TorchNativeAttnBackend(
            kv_bytes_per_layer=kv_bytes_per_layer, page_size=page_size, dtype=dtype
        )
    raise ValueError(
        f"attention backend {name!r} is not supported: "
        f"supported are {', '.join(ATTENTION_BACKENDS)}"
    )
