"""Attention of one token per request over its paged context.

The query heads that share a KV head are the rows of one matrix product, so that the context is
read once; contexts are split over programs where there are too few requests to fill the device.
The grid depends on the batch's size alone, never on lengths: it can be captured in a graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.combine import combine_splits
from sglang.srt.layers.attention.triton_ops.paged import attend_range, split_range

BLOCK_N = 64
PROGRAMS = 512
"""How many fill the device; more cost more than they even out."""
MAX_SPLITS = 32
LONG_SPLITS = 4
LONG_TOKENS = 2048
"""Batches that fill the device are split nevertheless, in parts of at least this: one long
context among short ones would keep all waiting."""


@triton.jit(do_not_specialize=["splits", "least"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    parts_ptr: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    # Programs that run together read neighbouring heads of the same tokens.
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lens_ptr + request).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin, end = split_range(first, length, split, splits, least, BLOCK)
    heads = kv_head * GROUP + tl.arange(0, ROWS)
    is_head = tl.arange(0, ROWS) < GROUP
    out_row = request * NUM_KV_HEADS * GROUP + heads
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if begin >= end:
            tl.store(lse_ptr + out_row * splits + split, float("-inf"), mask=is_head)
            return
    dims = tl.arange(0, BLOCK_D)
    inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = request * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    slots = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    whole = begin + (end - begin) // BLOCK * BLOCK
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, begin, whole, heads, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK, False, 0, True,
    )  # fmt: skip
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, whole, end, heads, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK, False, 0, False,
    )  # fmt: skip
    acc = acc / mass[:, None]
    if SPLIT:
        part = out_row * splits + split
        if end - begin < length - first:
            tl.store(lse_ptr + part, peak + tl.log2(mass), mask=is_head)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
            return
        # The whole context: there is nothing to join.
        tl.store(lse_ptr + part, float("inf"), mask=is_head)
    out_at = out_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def plan_splits(batch_size: int, num_kv_heads: int) -> tuple[int, int]:
    """Into how many parts contexts are split, a power of 2, and the least tokens of each."""
    wanted = PROGRAMS // (batch_size * num_kv_heads)
    if wanted < 2:
        return LONG_SPLITS, LONG_TOKENS
    return 1 << min(wanted, MAX_SPLITS).bit_length() - 1, BLOCK_N


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    *,
    window: int = 0,
    splits: tuple[int, int] | None = None,
    launch: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Attend.

    Args:
        q: `[bs, num_heads, head_dim]`, dense but for the first stride.
        k_pool: Contiguous `[slots, num_kv_heads, head_dim]`, the model's dtype or fp8; `v_pool`
            likewise.
        req_to_token: int32 `[rows, max_context_len]`.
        req_pool_indices: Integer `[bs]`.
        seq_lens: Integer `[bs]`, at least 1 each.
        window: Tokens that are seen, the newest included; 0: all.
        splits: As of `plan_splits`, the default.
        launch: Tokens a block, warps, stages; None: the fastest.

    Returns:
        `[bs, num_heads * head_dim]`.
    """
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    assert q.stride()[1:] == (head_dim, 1) and k_pool.is_contiguous() and v_pool.is_contiguous()
    count, least = plan_splits(batch_size, num_kv_heads) if splits is None else splits
    out = torch.empty((batch_size, num_heads * head_dim), dtype=q.dtype, device=q.device)
    parts, lse = out, out
    if count > 1:
        rows = batch_size * num_heads
        parts = torch.empty((rows, count, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, count), dtype=torch.float32, device=q.device)
    if launch is None:
        launch = (BLOCK_N, 4, 3 if k_pool.element_size() > 1 else 5)
    group = num_heads // num_kv_heads
    block_n, num_warps, num_stages = launch
    _decode_kernel[(num_kv_heads, batch_size, count)](
        q,
        k_pool,
        v_pool,
        req_to_token,
        req_pool_indices,
        seq_lens,
        out,
        lse,
        q.stride(0),
        req_to_token.stride(0),
        scaling * math.log2(math.e),
        parts,
        count,
        least,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK=block_n,
        SPLIT=count > 1,
        WINDOW=window,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if count > 1:
        combine_splits(parts, lse, out.view(-1, head_dim))
    return out
