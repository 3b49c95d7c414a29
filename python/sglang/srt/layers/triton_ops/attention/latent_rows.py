"""Attention of single tokens over latent rows (MLA); values are part of the rows.

All query heads share the rows of a context, so a block of heads is one matrix product that reads
each row once. Each token has its own list of slots: its request's row of the table, or the slots
that an indexer has chosen. If there are too few tokens to fill the device, contexts are split over
programs (Flash-Decoding). The grid depends on the number of tokens and not on lengths, so graphs
can capture it.

Rows in fp8 are multiplied by their scales in registers, block by block.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.attention.online_softmax import (
    combine_splits,
    split_range,
    warm_up_joins,
)
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.mem_cache.device.fp8_rows import num_groups
from sglang.srt.mem_cache.device.fp8_rows_triton import typed_views

PROGRAMS: Final = 128
"""Programs that fill the device."""
MAX_SPLITS: Final = 64
LAUNCH: Final = (64, 64, 8, 2)
"""Heads and tokens per block, warps, stages: the fastest setting for split contexts."""
_WHOLE_LAUNCH: Final = (64, 64, 8, 3)
"""The same for whole contexts."""
_FP32_LAUNCH: Final = (16, 16, 8, 1)
"""The same for fp32: twice the shared memory, and three TF32 products for each product."""
_FP8_LAUNCH: Final = (64, 64, 8, 2)
"""The same for rows in fp8. Blocks of fewer heads take longer than those with empty heads: 32 heads
2.31 us a token, and 64 heads 1.30 (H100)."""


@triton.jit
def _latent_rows(
    pool_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot: tl.tensor,
    LATENT: tl.constexpr,
    ROW: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_L: tl.constexpr,
) -> tl.tensor:
    """Latent vectors `[BLOCK, BLOCK_L]` of slots; in fp8 (GROUPS > 0) fp32, times their scales.
    ROW is the distance of rows, in elements."""
    dims = tl.arange(0, BLOCK_L)
    at = pool_ptr + slot[:, None] * ROW + dims[None, :]
    if LATENT == BLOCK_L:
        latent = tl.load(at)
    else:
        latent = tl.load(at, mask=dims[None, :] < LATENT, other=0.0)
    if GROUPS > 0:
        COUNT: tl.constexpr = (BLOCK_L + 127) // 128
        group = tl.arange(0, COUNT)
        scale_at = scales_ptr + slot[:, None] * (ROW // 4) + LATENT // 4 + group[None, :]
        scale = tl.load(scale_at, mask=group[None, :] < GROUPS, other=0.0)
        by_group = tl.reshape(latent.to(tl.float32), [BLOCK, COUNT, BLOCK_L // COUNT])
        latent = tl.reshape(by_group * scale[:, :, None], [BLOCK, BLOCK_L])
    return latent


@triton.jit(
    do_not_specialize=["splits", "least"],
    do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "context_rows_ptr"],
)
def _latent_kernel(
    latent_q_ptr: tl.tensor,
    rope_q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    context_rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    latent_q_token: tl.tensor,
    latent_q_head: tl.tensor,
    rope_q_token: tl.tensor,
    rope_q_head: tl.tensor,
    table_stride: tl.tensor,
    contexts_stride: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    ROPE_AT: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(heads / HEADS, tokens, splits)`: one program attends from HEADS heads to one split.

    GROUP: the list has groups of so many slots; the tokens of the open group, which are read too,
    are in the context.
    """
    # Programs that run at the same time read the same rows.
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    is_head = heads < NUM_HEADS
    out_row = token * NUM_HEADS + heads
    await_kernels_before(EARLY)
    length = tl.load(lens_ptr + token).to(tl.int32)
    context = length
    if MOST > 0:
        length = tl.minimum(length, MOST + length % GROUP)
    begin, end, _ = split_range(length, split, splits, least, BLOCK)
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if begin >= end:
            tl.store(lse_ptr + out_row * splits + split, float("-inf"), mask=is_head)
            return
    in_latent, in_rope = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    inside = is_head[:, None] & (in_latent < LATENT)[None, :]
    q_at = token * latent_q_token + heads[:, None] * latent_q_head + in_latent[None, :]
    q = tl.load(latent_q_ptr + q_at, mask=inside, other=0.0)
    q_at = token * rope_q_token + heads[:, None] * rope_q_head + in_rope[None, :]
    q_rope = tl.load(
        rope_q_ptr + q_at, mask=is_head[:, None] & (in_rope < ROPE)[None, :], other=0.0
    )
    slots = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
    own = slots
    listed = end
    if GROUP > 1:
        listed = tl.minimum(length - length % GROUP, end)
        # The context has the tokens behind the list later, by as many as were not chosen.
        own = contexts_ptr + tl.load(context_rows_ptr + token).to(tl.int64) * contexts_stride
        own += context - length
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_L], tl.float32)
    for start in range(begin, end, BLOCK):
        pos = start + tl.arange(0, BLOCK)
        # Past the end: slot 0, the padding page, whose values are finite.
        if GROUP > 1:
            is_listed = pos < listed
            slot = tl.load(slots + pos // GROUP, mask=is_listed, other=0)
            rest = tl.load(own + pos, mask=(pos >= listed) & (pos < end), other=0)
            slot = tl.where(is_listed, slot * GROUP + pos % GROUP, rest).to(tl.int64)
        else:
            slot = tl.load(slots + pos, mask=pos < end, other=0).to(tl.int64)
        latent = _latent_rows(pool_ptr, scales_ptr, slot, LATENT, ROW, GROUPS, BLOCK, BLOCK_L)
        latent = latent.to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="tf32x3")
        if ROPE > 0:
            rope_at = rope_ptr + slot[:, None] * ROPE_ROW + ROPE_AT + in_rope[None, :]
            rope = tl.load(rope_at, mask=in_rope[None, :] < ROPE, other=0.0)
            rope = tl.trans(rope.to(q.dtype))
            scores = tl.dot(q_rope, rope, scores, input_precision="tf32x3")
        scores = tl.where(pos[None, :] < end, scores, float("-inf"))
        # Every block has a token that is seen, so no peak stays -inf.
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(scores * scale - new_peak[:, None])
        mass = mass * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), latent, acc, input_precision="tf32x3")
        peak = new_peak
    acc = acc / mass[:, None]
    if SPLIT:
        part = out_row * splits + split
        tl.store(lse_ptr + part, peak + tl.log2(mass), mask=is_head)
        tl.store(parts_ptr + part[:, None] * LATENT + in_latent[None, :], acc, mask=inside)
    else:
        out_at = out_row[:, None] * LATENT + in_latent[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def plan_splits(num_tokens: int, head_blocks: int) -> int:
    """Most parts of a context, a power of 2."""
    wanted = min(PROGRAMS // (num_tokens * head_blocks), MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


class OpenGroups(NamedTuple):
    """The contexts in which tokens find their open groups."""

    size: int
    """Tokens of a group."""
    table: torch.Tensor
    """int32 `[contexts, max_length]`, the last dimension dense: slots of whole contexts."""
    rows: torch.Tensor
    """Integer `[num_tokens]`: the context of each token."""


def latent_attention(
    latent_q: torch.Tensor,
    rope_q: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    scaling: float,
    *,
    most: int = 0,
    groups: OpenGroups | None = None,
    splits: int | None = None,
    launch: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Attend from tokens to lists of slots, with the computation of `attend_range`.

    Args:
        latent_q: `[num_tokens, num_heads, kv_lora_rank]`, absorbed; the last dimension dense.
        rope_q: `[num_tokens, num_heads, qk_rope_head_dim]`; likewise.
        pool: Contiguous `[slots, 1, kv_lora_rank + qk_rope_head_dim]`; or in fp8, uint8 `[slots, 1,
            bytes of a row]`.
        table: int32 `[lists, max_length]`, the last dimension dense: slots.
        rows: Integer `[num_tokens]`: the list of each token.
        lens: Integer `[num_tokens]`, at least 1 each: number of tokens of the list to read.
        scaling: Positive factor of the scores.
        most: Most tokens of a list to read; 0: no limit.
        groups: The list has items of so many slots, and `lens` and `most` count tokens. The tokens
            of the open group, fewer, are read besides. None: it has slots.
        splits: In the form of `plan_splits`; None: its result.
        launch: In the form of `LAUNCH`; None: the fastest.

    Returns:
        Contiguous `[num_tokens, num_heads, kv_lora_rank]` of the dtype of `latent_q`.
    """
    num_tokens, num_heads, rank = latent_q.shape
    rope_dim = rope_q.shape[-1]
    assert pool.is_contiguous()
    scaled = num_groups(rank) if pool.dtype == torch.uint8 else 0
    row = rope_row = pool.shape[-1]
    rope_at, views = rank, (pool, pool, pool)
    if scaled:
        rope_row, rope_at, views = row // 2, (rank + 4 * scaled) // 2, typed_views(pool)
    assert rope_row - rope_at == rope_dim, f"rows of {row} for {rank} and {rope_dim} elements"
    assert latent_q.stride(-1) == rope_q.stride(-1) == table.stride(-1) == 1
    contexts = OpenGroups(1, table, rows) if groups is None else groups
    assert most % contexts.size == 0 and contexts.table.stride(-1) == 1
    if launch is None:
        launch = _launch_of(latent_q.dtype, is_fp8=bool(scaled))
    heads = _heads_of(launch, num_heads)
    head_blocks = triton.cdiv(num_heads, heads)
    count = plan_splits(num_tokens, head_blocks) if splits is None else splits
    if launch is LAUNCH and count == 1:
        launch = _WHOLE_LAUNCH
    _, block, num_warps, num_stages = launch
    out = latent_q.new_empty((num_tokens, num_heads, rank))
    parts, lse = out, out
    if count > 1:
        shape = (num_tokens * num_heads, count)
        parts = torch.empty((*shape, rank), dtype=torch.float32, device=out.device)
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    _latent_kernel[(head_blocks, num_tokens, count)](
        latent_q,
        rope_q,
        *views,
        table,
        rows,
        lens,
        contexts.table,
        contexts.rows,
        out,
        parts,
        lse,
        latent_q.stride(0),
        latent_q.stride(1),
        rope_q.stride(0),
        rope_q.stride(1),
        table.stride(0),
        contexts.table.stride(0),
        scaling * math.log2(math.e),
        count,
        block,
        NUM_HEADS=num_heads,
        LATENT=rank,
        ROPE=rope_dim,
        ROW=row,
        ROPE_ROW=rope_row,
        ROPE_AT=rope_at,
        GROUPS=scaled,
        MOST=most,
        GROUP=contexts.size,
        HEADS=heads,
        BLOCK_L=max(16, triton.next_power_of_2(rank)),
        BLOCK_R=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK=block,
        SPLIT=count > 1,
        num_warps=num_warps,
        num_stages=num_stages,
        **early_start(out),
    )
    if count > 1:
        combine_splits(parts, lse, out)
    return out


def _launch_of(dtype: torch.dtype, *, is_fp8: bool) -> tuple[int, int, int, int]:
    if dtype.itemsize == 4:
        return _FP32_LAUNCH
    return _FP8_LAUNCH if is_fp8 else LAUNCH


def _heads_of(launch: tuple[int, int, int, int], num_heads: int) -> int:
    """Heads of a program."""
    if launch is _FP8_LAUNCH and num_heads > 16:
        return launch[0]
    return min(launch[0], max(16, int(triton.next_power_of_2(num_heads))))


def warm_up_latent_joins(num_heads: int, rank: int, out: torch.Tensor) -> None:
    """Run the kernels that join parts of contexts, of steps of any size. `out`: any tensor of the
    dtype and on the device of the results."""
    blocks = {
        triton.cdiv(num_heads, _heads_of(_launch_of(out.dtype, is_fp8=is_fp8), num_heads))
        for is_fp8 in (False, True)
    }
    sizes = ((tokens, plan_splits(tokens, n)) for n in blocks for tokens in range(1, PROGRAMS + 1))
    warm_up_joins(sizes, num_heads, rank, out)
