"""All steps between QKV projection and attention in one kernel.

They are the per-head norm of queries and keys, the rotation, and storing keys and values in the
pool. The kernel rounds to the model's dtype at the same points as the layers that it replaces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start


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
    await_kernels_before(EARLY)
    low_ptr = base + head[:, None] * head_dim + cols[None, :]
    low = tl.load(low_ptr, mask=inside, other=0.0)
    high = tl.load(low_ptr + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(square / head_dim + eps)[:, None]
        weight = weight_ptr + head[:, None] * head_dim + cols[None, :]
        low_weight = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
        low = ((low * scale).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    half = cols < HALF
    angle = token * head_dim + cols
    low_cos = tl.load(cos_ptr + angle, mask=half, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos_ptr + angle + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin_ptr + angle, mask=half, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin_ptr + angle + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    new_low = ((low * low_cos).to(dtype).to(tl.float32) + high * low_sin).to(dtype)
    new_high = ((high * high_cos).to(dtype).to(tl.float32) + low * high_sin).to(dtype)
    tl.store(low_ptr, new_low, mask=inside)
    tl.store(low_ptr + HALF, new_high, mask=inside)

    slot = tl.load(loc_ptr + token).to(tl.int64)
    place = slot * (NUM_KV_HEADS * head_dim) + kv_head * head_dim
    is_key = inside & (rows[:, None] == GROUP)
    k_ptr = k_pool_ptr + place + tl.zeros([ROWS, 1], tl.int32) + cols[None, :]
    stored = k_pool_ptr.dtype.element_ty
    tl.store(k_ptr, new_low.to(stored), mask=is_key)
    tl.store(k_ptr + HALF, new_high.to(stored), mask=is_key)
    v_from = base + (num_heads + NUM_KV_HEADS + kv_head) * head_dim + cols
    v_low = tl.load(v_from, mask=half, other=0.0)
    v_high = tl.load(v_from + HALF, mask=half, other=0.0)
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
        **early_start(qkv),
    )
