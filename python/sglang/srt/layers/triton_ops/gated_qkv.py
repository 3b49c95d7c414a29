"""The steps before gated attention in one kernel: norm, rotation, and storing keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start


@triton.jit
def _prepare_kernel(
    qkv_ptr: tl.tensor,
    q_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    loc_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program processes one head of a token: a query, or a key with its value."""
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    dims = tl.arange(0, BLOCK)
    inside = dims < HEAD_DIM
    half = ROTARY_DIM // 2
    partner = tl.where(dims < half, dims + half, tl.where(dims < ROTARY_DIM, dims - half, dims))
    base = qkv_ptr + token * stride
    weight_ptr = q_weight_ptr
    # Each query is followed by its gate.
    row = base + 2 * head * HEAD_DIM
    if head >= HEADS:
        weight_ptr = k_weight_ptr
        row = base + (HEADS + head) * HEAD_DIM
    weight = 1.0 + tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    other_weight = 1.0 + tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)
    # Angles and slots were written before the embedding lookup, which does not start early.
    turns = dims < ROTARY_DIM
    angle = token * ROTARY_DIM + dims
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    loc = tl.load(loc_ptr + token).to(tl.int64)
    await_kernels_before(EARLY)
    x = tl.load(row + dims, mask=inside, other=0.0)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HEAD_DIM + eps)
    normed = (wide * scale * weight).to(dtype).to(tl.float32)
    other = (other * scale * other_weight).to(dtype).to(tl.float32)
    rotated = ((normed * cos).to(dtype).to(tl.float32) + other * sin).to(dtype)
    if head < HEADS:
        tl.store(q_ptr + (token * HEADS + head) * HEAD_DIM + dims, rotated, mask=inside)
        return
    # The whole key must be read before any of it is overwritten.
    tl.debug_barrier()
    tl.store(row + dims, rotated, mask=inside)
    kv_head = head - HEADS
    place = (loc * KV_HEADS + kv_head) * HEAD_DIM + dims
    stored = k_pool_ptr.dtype.element_ty
    tl.store(k_pool_ptr + place, rotated.to(stored), mask=inside)
    v = tl.load(row + KV_HEADS * HEAD_DIM + dims, mask=inside, other=0.0)
    tl.store(v_pool_ptr + place, v.to(stored), mask=inside)


def prepare_gated_qkv_(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    loc: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate queries and keys (keys in place), and store keys and values.

    Args:
        qkv: Contiguous `[num_tokens, 2 * num_heads + 2 * num_kv_heads, head_dim]`: a gate after
            each query.
        weights: Zero-centred norm weights of queries and of keys, `[head_dim]` each.
        angles: Cosines and signed sines, `[num_tokens, 1, rotary_dim]` each.
        loc: int64 `[num_tokens]`: slots.
        k_pool: Contiguous `[slots, num_kv_heads, head_dim]`; `v_pool` likewise.

    Returns:
        The queries: `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = k_pool.shape[1]
    num_heads = all_heads // 2 - num_kv_heads
    cos, sin = angles
    assert qkv.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
    assert k_pool.shape == v_pool.shape and cos.is_contiguous() and sin.is_contiguous()
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _prepare_kernel[(num_heads + num_kv_heads, num_tokens)](
        qkv,
        q,
        *weights,
        cos,
        sin,
        loc,
        k_pool,
        v_pool,
        qkv.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos.shape[-1],
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **early_start(qkv),
    )
    return q
