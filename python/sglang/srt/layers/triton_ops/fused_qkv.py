"""All steps between QKV projection and attention in one kernel, and the angles of positions.

The steps are the per-head norm of queries and keys, the rotation, and storing keys and values in
the pool. A kernel rounds to the model's dtype at the same points as the layers that it replaces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import AngleKinds
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)

_BLOCK_TOKENS = 16


@triton.jit
def _normalise_rotate_store_kernel(
    qkv_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    loc_ptr: tl.tensor,
    k_pool_ptr: tl.tensor,
    v_pool_ptr: tl.tensor,
    eps: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program processes a token's KV head and its group of queries; BLOCK covers half a
    head."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    head_dim = 2 * HALF
    num_heads = NUM_KV_HEADS * GROUP
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    # The last row is the key; the first GROUP are its queries.
    head = tl.where(rows < GROUP, kv_head * GROUP + rows, num_heads + kv_head)
    inside = (rows[:, None] <= GROUP) & (cols[None, :] < HALF)
    base = qkv_ptr + token * (num_heads + 2 * NUM_KV_HEADS) * head_dim
    # Conversions wait for their loads, so they follow the wait, and the next kernel starts sooner.
    if NORM:
        weight = weight_ptr + head[:, None] * head_dim + cols[None, :]
        low_weight = tl.load(weight, mask=inside, other=0.0)
        high_weight = tl.load(weight + HALF, mask=inside, other=0.0)
    # Angles were written before the embedding lookup, which does not start early.
    half = cols < HALF
    angle = token * head_dim + cols
    low_cos = tl.load(cos_ptr + angle, mask=half, other=0.0)
    high_cos = tl.load(cos_ptr + angle + HALF, mask=half, other=0.0)
    low_sin = tl.load(sin_ptr + angle, mask=half, other=0.0)
    high_sin = tl.load(sin_ptr + angle + HALF, mask=half, other=0.0)
    await_kernels_before(EARLY)
    slot = tl.load(loc_ptr + token).to(tl.int64)
    low_ptr = base + head[:, None] * head_dim + cols[None, :]
    low = tl.load(low_ptr, mask=inside, other=0.0)
    high = tl.load(low_ptr + HALF, mask=inside, other=0.0)
    v_from = base + (num_heads + NUM_KV_HEADS + kv_head) * head_dim + cols
    v_low = tl.load(v_from, mask=half, other=0.0)
    v_high = tl.load(v_from + HALF, mask=half, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(square / head_dim + eps)[:, None]
        low = (low * scale).to(dtype).to(tl.float32) * low_weight.to(tl.float32)
        high = (high * scale).to(dtype).to(tl.float32) * high_weight.to(tl.float32)
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    low_cos, high_cos = low_cos.to(tl.float32)[None, :], high_cos.to(tl.float32)[None, :]
    low_sin, high_sin = low_sin.to(tl.float32)[None, :], high_sin.to(tl.float32)[None, :]
    new_low = ((low * low_cos).to(dtype).to(tl.float32) + high * low_sin).to(dtype)
    new_high = ((high * high_cos).to(dtype).to(tl.float32) + low * high_sin).to(dtype)
    tl.store(low_ptr, new_low, mask=inside)
    tl.store(low_ptr + HALF, new_high, mask=inside)

    place = slot * (NUM_KV_HEADS * head_dim) + kv_head * head_dim
    is_key = inside & (rows[:, None] == GROUP)
    k_ptr = k_pool_ptr + place + tl.zeros([ROWS, 1], tl.int32) + cols[None, :]
    stored = k_pool_ptr.dtype.element_ty
    tl.store(k_ptr, new_low.to(stored), mask=is_key)
    tl.store(k_ptr + HALF, new_high.to(stored), mask=is_key)
    tl.store(v_pool_ptr + place + cols, v_low.to(stored), mask=half)
    tl.store(v_pool_ptr + place + HALF + cols, v_high.to(stored), mask=half)


def normalise_rotate_store_(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    loc: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Change the queries and keys of `qkv` in place, and store keys and values.

    Args:
        qkv: Contiguous `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`.
        norm: Weight `[num_heads + num_kv_heads, head_dim]` and epsilon; None: no norm.
        angles: Cosines and signed sines, `[num_tokens, 1, head_dim]` each.
        loc: int64 `[num_tokens]`: slots.
        k_pool: Contiguous `[slots, num_kv_heads, head_dim]`; `v_pool` likewise.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = k_pool.shape[1]
    group = all_heads // num_kv_heads - 2
    cos, sin = angles
    assert qkv.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
    assert k_pool.shape == v_pool.shape and cos.is_contiguous() and sin.is_contiguous()
    weight, eps = (qkv, 0.0) if norm is None else norm
    half = head_dim // 2
    _normalise_rotate_store_kernel[(num_tokens, num_kv_heads)](
        qkv,
        weight,
        cos,
        sin,
        loc,
        k_pool,
        v_pool,
        eps,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HALF=half,
        ROWS=triton.next_power_of_2(group + 1),
        BLOCK=triton.next_power_of_2(half),
        NORM=norm is not None,
        num_warps=1,
        **early_start(qkv, most_rows=SEVERAL_ROWS, is_short=True),
    )


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


# Positions of a draft layer begin with a request's second.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions_ptr"])
def _angles_kernel(
    positions_ptr: tl.tensor,
    freq_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    multiple_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    tokens: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens / BLOCK_T, kinds)`."""
    kind = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair = tl.arange(0, BLOCK_H)
    freq = tl.load(freq_ptr + kind * HALF + pair, mask=pair < HALF, other=0.0)
    scale = tl.load(scale_ptr + kind)
    multiple = tl.load(multiple_ptr + kind)
    await_kernels_before(EARLY)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0)
    position = (position // multiple * multiple).to(tl.float32)
    angle = position[:, None] * freq[None, :]
    dtype = cos_ptr.dtype.element_ty
    cos = (tl.cos(angle) * scale).to(dtype)
    sin = tl.sin(angle) * scale
    at = (kind * tokens + token)[:, None] * (2 * HALF) + pair[None, :]
    inside = (token < tokens)[:, None] & (pair < HALF)[None, :]
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + HALF, cos, mask=inside)
    tl.store(sin_ptr + at, (-sin).to(dtype), mask=inside)
    tl.store(sin_ptr + at + HALF, sin.to(dtype), mask=inside)


def rotary_angles(
    positions: torch.Tensor, kinds: AngleKinds, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for `Rotation`.

    Args:
        positions: int64 `[num_tokens]`.
        dtype: Dtype of the results.

    Returns:
        Two `[kinds, num_tokens, 1, rotary_dim]`.
    """
    num_tokens, (count, half) = len(positions), kinds.frequencies.shape
    assert positions.is_contiguous() and kinds.frequencies.is_contiguous()
    cos = torch.empty((count, num_tokens, 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _angles_kernel[(triton.cdiv(num_tokens, _BLOCK_TOKENS), count)](
        positions,
        *kinds,
        cos,
        sin,
        num_tokens,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(half),
        BLOCK_T=_BLOCK_TOKENS,
        num_warps=4,
        **early_start(positions),
    )
    return cos, sin
