"""The steps between QKV projection and attention: norms, rotation, storing in the pool."""

from __future__ import annotations

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.fused_kernels import FusedKernels, fused_kernels
from sglang.srt.layers.layernorm import QKNorm
from sglang.srt.layers.radix_attention import SLIDING_WINDOW, RadixAttention
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary


def prepare_qkv(
    qkv: torch.Tensor,
    qk_norm: QKNorm | None,
    rotation: Rotation,
    attn: RadixAttention,
    forward_batch: ForwardBatch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate queries and keys, and store keys and values in the layer's pool.

    Layers with a sliding window store by themselves.

    Args:
        qkv: Contiguous `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`. Fused kernels
            change it in place.

    Returns:
        Queries, keys and values as `RadixAttention.forward` takes them.
    """
    num_rotated = attn.num_heads + attn.num_kv_heads
    has_window = attn.kind == SLIDING_WINDOW
    kernels = fused_kernels(qkv.device)
    if kernels is not None and not has_window:
        _fused(kernels, qkv, qk_norm, rotation, attn, forward_batch)
        return qkv[:, : attn.num_heads], qkv[:, attn.num_heads : num_rotated], qkv[:, num_rotated:]
    # Queries and keys lie side by side, so one pass normalises and rotates both.
    qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
    if qk_norm is not None:
        qk = qk_norm.forward(qk)
    qk = apply_rotary(qk, rotation)
    q, k = qk[:, : attn.num_heads], qk[:, attn.num_heads :]
    if not has_window:
        forward_batch.token_to_kv_pool.set_kv_buffer(attn, forward_batch.out_cache_loc, k, v)
    return q, k, v


def _fused(
    kernels: FusedKernels,
    qkv: torch.Tensor,
    qk_norm: QKNorm | None,
    rotation: Rotation,
    attn: RadixAttention,
    forward_batch: ForwardBatch,
) -> None:
    k_pool, v_pool = forward_batch.token_to_kv_pool.kv_buffer_to_write(attn.layer_id)
    kernels.normalise_rotate_store_(
        qkv,
        None if qk_norm is None else (qk_norm.weight, qk_norm.eps),
        (rotation.cos, rotation.signed_sin),
        forward_batch.out_cache_loc,
        k_pool,
        v_pool,
    )
