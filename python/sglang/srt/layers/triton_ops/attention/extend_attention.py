"""Attention of new tokens over a paged context that holds them already.

A block is a run of one request's new tokens times the query heads of one KV head. If there are few
blocks, as for a short question after a long prefix, contexts are split over programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.triton_ops.attention.online_softmax import (
    attend_range,
    begin_softmax,
    combine_splits,
    split_range,
)

PROGRAMS = 264
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
WORKSPACE_BYTES = 256 << 20


@triton.jit(do_not_specialize=["splits"])
def _extend_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    sinks_ptr: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Grid `(blocks, kv_heads, splits)`: one program attends from ROWS query rows to one split."""
    block = blocks_ptr + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    table_row = tl.load(block).to(tl.int64)
    first_token = tl.load(block + 1).to(tl.int64)
    first_pos = tl.load(block + 2)
    num_tokens = tl.load(block + 3)
    rows = tl.arange(0, ROWS)
    offset = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = offset < num_tokens
    q_pos = first_pos + offset
    out_row = (first_token + offset) * NUM_KV_HEADS * GROUP + heads
    last = first_pos + num_tokens
    begin, end, _ = split_range(last, split, splits, BLOCK_N, BLOCK_N)
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if begin >= end:
            tl.store(lse_ptr + out_row * splits + split, float("-inf"), mask=is_row)
            return
    dims = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = (first_token + offset)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    slots = table_ptr + table_row * table_stride
    peak, mass = begin_softmax(sinks_ptr, heads, is_row, split, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    # Blocks that even the first row sees completely need no mask.
    common = tl.maximum(tl.minimum(end, first_pos + 1) - begin, 0)
    whole = begin + common // BLOCK_N * BLOCK_N
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, begin, whole, q_pos, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, True,
    )  # fmt: skip
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, whole, end, q_pos, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, True, False,
    )  # fmt: skip
    # A row may see nothing of its split.
    acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    if SPLIT:
        out_row = out_row * splits + split
        tl.store(lse_ptr + out_row, peak + tl.log2(mass), mask=is_row)
    out_at = out_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """The blocks of an extend step, the same for all layers; see `plan_blocks`."""

    blocks: torch.Tensor
    """int32 `[num_blocks, 4]`: table row, first token in the batch, its position, token count."""
    rows: int
    """Query rows of a block, a power of 2."""
    splits: int
    """Most parts of a context, a power of 2."""
    begin: int
    """First token of the batch that is computed; token numbers in `blocks` count from it."""
    end: int
    is_padded: bool = False
    """True if the last tokens may be in no block; their output is then zero."""


def plan_blocks(
    segments: Sequence[tuple[int, int, int, int]],
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> ExtendWork:
    """Cut requests into blocks.

    Args:
        segments: For each request, its table row, first token in the batch, length of prefix and
            number of new tokens, in the batch's order. Tokens between segments are not computed.
        group: Query heads per KV head.
        device: The pool's.
    """
    longest = max(count for _, _, _, count in segments)
    rows = _query_rows(longest, group)
    first, last = segments[0][1], segments[-1][1] + segments[-1][3]
    blocks = cut_into_blocks(segments, rows // group)
    context = max(prefix + count for _, _, prefix, count in segments)
    splits = _count_splits(len(blocks), last - first, context, group, num_kv_heads, head_dim)
    return ExtendWork(device_runtime(device).stage_to_device(blocks), rows, splits, first, last)


def plan_any_blocks(
    num_tokens: int,
    num_requests: int,
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> ExtendWork:
    """Work for any step of at most `num_requests` requests and `num_tokens` new tokens.

    Its blocks are empty; `put_blocks` fills them. Every step has the same launch, so graphs can
    capture it.
    """
    rows = _query_rows(num_tokens, group)
    whole = -(-num_tokens // (rows // group))
    splits = most_splits(num_tokens, group, num_kv_heads, head_dim)
    blocks = torch.zeros((whole + num_requests - 1, 4), dtype=torch.int32, device=device)
    return ExtendWork(blocks, rows, splits, 0, num_tokens, is_padded=True)


def put_blocks(work: ExtendWork, segments: Sequence[tuple[int, int, int, int]], group: int) -> None:
    """Fill the work of `plan_any_blocks` with a step's segments (see `plan_blocks`), without
    waiting for the device."""
    blocks = cut_into_blocks(segments, work.rows // group)
    full = torch.zeros(work.blocks.shape, dtype=torch.int32)
    full[: len(blocks)] = blocks
    work.blocks.copy_(device_runtime(work.blocks.device).stage_to_device(full))


def cut_into_blocks(segments: Sequence[tuple[int, int, int, int]], per_block: int) -> torch.Tensor:
    """`ExtendWork.blocks` of `segments` on the CPU, with at most `per_block` tokens each."""
    first = segments[0][1]
    blocks = [
        (row, token + begin - first, prefix + begin, min(per_block, count - begin))
        for row, token, prefix, count in segments
        for begin in range(0, count, per_block)
    ]
    return torch.tensor(blocks, dtype=torch.int32)


def _query_rows(longest: int, group: int) -> int:
    """Query rows of a block, for requests of at most `longest` new tokens."""
    return max(16, 1 << (min(128, longest * group) - 1).bit_length(), 1 << (group - 1).bit_length())


def _count_splits(
    num_blocks: int,
    num_tokens: int,
    context: int | None,
    group: int,
    num_kv_heads: int,
    head_dim: int,
) -> int:
    """Splits of a context that fill the device, a power of 2.

    Args:
        context: Tokens of the longest context; None: it may have any length.
    """
    wanted = min(
        PROGRAMS // (num_blocks * num_kv_heads),
        MAX_SPLITS if context is None else context // MIN_SPLIT_TOKENS,
        MAX_SPLITS,
        WORKSPACE_BYTES // (num_tokens * group * num_kv_heads * head_dim * 4),
    )
    return 1 << max(0, wanted.bit_length() - 1)


def most_splits(num_tokens: int, group: int, num_kv_heads: int, head_dim: int) -> int:
    """Most splits of a step of so many new tokens, whatever its contexts are."""
    blocks = -(-num_tokens // (_query_rows(num_tokens, group) // group))
    return _count_splits(blocks, num_tokens, None, group, num_kv_heads, head_dim)


def extend_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    work: ExtendWork,
    scaling: float,
    out: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    launch: tuple[int, int, int] | None = None,
) -> None:
    """Attend from the tokens that `work` names.

    Rows of `out` before the first and after the last of them are not written. Other rows that
    `work` does not name get garbage, or zeros if the work is padded.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, dense except for the first stride.
        k_pool: See `decode_attention`. The pool must already have the keys of the new tokens.
        out: Contiguous `[num_tokens, num_heads * head_dim]`.
        sinks: `[num_heads]`: see `begin_softmax`.
        launch: Tokens per block, warps, stages; None: the fastest.
    """
    q, out = q[work.begin : work.end], out[work.begin : work.end]
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    assert q.stride()[1:] == (head_dim, 1) and k_pool.is_contiguous() and v_pool.is_contiguous()
    splits = work.splits
    parts, lse = out, out
    if splits > 1:
        shape = (num_tokens * num_heads, splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if work.is_padded:
        out.zero_()
        if splits > 1:
            lse.fill_(math.inf)  # for rows that no block writes: nothing to join
    if launch is None:
        # fp32 takes twice the shared memory, and each product is three TF32 products.
        # Sums of 128 rows of 256 do not fit into the registers of four warps.
        launch = (64, 8 if head_dim > 128 else 4, 3) if q.element_size() == 2 else (32, 4, 2)
    block_n, num_warps, num_stages = launch
    _extend_kernel[(work.blocks.shape[0], num_kv_heads, splits)](
        q,
        k_pool,
        v_pool,
        req_to_token,
        work.blocks,
        parts,
        lse,
        q.stride(0),
        req_to_token.stride(0),
        scaling * math.log2(math.e),
        splits,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=work.rows,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=block_n,
        SPLIT=splits > 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        combine_splits(parts, lse, out)
