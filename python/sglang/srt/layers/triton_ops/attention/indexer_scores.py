"""An indexer's scores (DSA) on a GPU.

Keys in fp8 are multiplied by queries in fp8: each head's query is rounded like a key, and its scale
goes into the head's weight (as in DeepSeek-V3.2's reference).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.mem_cache.device.fp8_rows import FP8_MAX, LEAST_SCALE
from sglang.srt.mem_cache.device.fp8_rows_triton import typed_views

PROGRAMS: Final = 512
"""Programs of the scores that fill the device."""
_LAUNCH: Final = (256, 64, 8, 3)
"""Most queries of a program (tokens times heads), keys of a block, warps, stages."""
_FP8_LAUNCH: Final = (128, 128, 4, 3)
_FEW_LAUNCH: Final = (64, 128, 4, 3)
"""The same for one token at a time."""
_FP32_LAUNCH: Final = (64, 64, 4, 1)
_MANY_TOKENS: Final = 64
"""For this many tokens or more that have one list, its keys in fp8 are copied first."""
_ALIGNMENT: Final = 16
"""Rows of scores start at multiples of this, so that four scores are read at once."""


@triton.jit
def _rounded_queries(
    q: tl.tensor, weights: tl.tensor, LARGEST: tl.constexpr, LEAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Queries in fp8, one scale for a row, and the weights of rows times these scales."""
    x = q.to(tl.float32)
    largest = tl.full([weights.shape[0]], LARGEST, tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), largest)
    scale = tl.where(scale < LEAST, 1.0, scale)
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return code.to(tl.float8e4nv), weights * scale


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["rows_ptr", "lens_ptr"]
)
def _score_kernel(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_LISTED: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Scores of TOKENS tokens that have one list; programs along axis 1 share its blocks.

    Keys are at the slots of the list, divided by STRIDE, a scale behind each in fp8; or, if not
    IS_LISTED, in fp8 in the order of the list, with scales of their own. They are the left operand,
    so that the sum over heads stays within the four threads that share a row of a product.
    """
    first = tl.program_id(0).to(tl.int64) * TOKENS
    await_kernels_before(EARLY)
    tokens = first + tl.arange(0, TOKENS)
    lens = tl.load(lens_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int32) // STRIDE
    longest = tl.max(lens, axis=0)
    product = tl.arange(0, TOKENS * HEADS)
    token, head = first + product // HEADS, product % HEADS
    is_there = (token < num_tokens) & (head < NUM_HEADS)
    dims = tl.arange(0, BLOCK_D)
    q_at = (token * q_stride + head * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_there[:, None] & (dims < DIM)[None, :], other=0.0)
    weights = tl.load(weights_ptr + token * NUM_HEADS + head, mask=is_there, other=0.0)
    row = DIM
    if IS_FP8 and IS_LISTED:
        row = DIM + 4
    if IS_FP8:
        q, weights = _rounded_queries(q, weights, LARGEST, LEAST)
    slots = table_ptr + tl.load(rows_ptr + first).to(tl.int64) * table_stride
    for start in range(tl.program_id(1) * BLOCK, longest, tl.num_programs(1) * BLOCK):
        pos = start + tl.arange(0, BLOCK)
        slot = pos.to(tl.int64)
        if IS_LISTED:
            slot = tl.load(slots + pos * STRIDE, mask=pos < longest, other=0).to(tl.int64) // STRIDE
        is_key = (dims < DIM)[None, :]
        if not IS_LISTED:
            is_key &= (pos < longest)[:, None]
        keys = tl.load(keys_ptr + slot[:, None] * row + dims[None, :], mask=is_key, other=0.0)
        products = tl.dot(keys.to(q.dtype), tl.trans(q), input_precision="tf32x3")
        products = tl.maximum(products, 0.0) * weights[None, :]
        scores = tl.sum(tl.reshape(products, [BLOCK, TOKENS, HEADS]), axis=2)
        if IS_FP8:
            at_scale = scales_ptr + slot
            if IS_LISTED:
                at_scale = scales_ptr + slot * (row // 4) + DIM // 4
            scores *= tl.load(at_scale, mask=pos < longest, other=0.0)[:, None]
        at = tokens[None, :] * out_stride + pos[:, None]
        tl.store(out_ptr + at, scores, mask=pos[:, None] < lens[None, :])


def slots_of_one(table: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """The first slots `[length]` of the list that all tokens have. The host does not wait, as it
    would for `table[rows[0]]`.

    Args:
        table, rows: As in `index_scores`.
    """
    return table[:, :length].index_select(0, rows[:1]).squeeze(0)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    longest: int,
    *,
    one_list: bool = False,
    stride: int = 1,
) -> torch.Tensor:
    """Scores of the tokens of lists of slots.

    Args:
        q: Contiguous `[num_tokens, heads, head_dim]` of the indexer.
        weights: Contiguous fp32 `[num_tokens, heads]`.
        keys: Contiguous `[slots, head_dim]`; or in fp8, uint8 `[slots, head_dim + 4]`.
        table: int32 `[lists, max_length]`, the last dimension dense.
        rows: Integer `[num_tokens]`: the list of each token.
        lens: Integer `[num_tokens]`: number of tokens of the list that get a score; with a
            `stride`, their whole groups get one.
        longest: Upper bound of the scores of a token, which decides the launch.
        one_list: If true, all tokens have the same list, which is read once for several of them.
        stride: Tokens of a group that has one key, at the slot of its first divided by this.

    Returns:
        fp32 `[num_tokens, longest]`, a view of longer rows; garbage past a token's length.
    """
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous() and weights.is_contiguous() and keys.is_contiguous()
    is_fp8 = keys.dtype == torch.uint8
    codes, scales = typed_views(keys)[:2] if is_fp8 else (keys, keys)
    is_listed = not (is_fp8 and one_list and num_tokens >= _MANY_TOKENS)
    if not is_listed:
        # Rows of 132 bytes are read four bytes at a time, again for each few tokens.
        assert stride == 1, "fp8 keys of groups"
        own = keys.index_select(0, slots_of_one(table, rows, longest))
        codes = own[:, :dim].contiguous().view(torch.float8_e4m3fn)
        scales = own[:, dim:].contiguous().view(torch.float32)
    heads = max(16, triton.next_power_of_2(num_heads))
    launch = _FP8_LAUNCH if is_fp8 else _LAUNCH if one_list else _FEW_LAUNCH
    most, block, num_warps, num_stages = launch if q.element_size() == 2 else _FP32_LAUNCH
    together = max(1, most // heads) if one_list else 1
    groups = triton.cdiv(num_tokens, together)
    programs = min(triton.cdiv(longest, block), max(1, PROGRAMS // groups))
    width = triton.cdiv(longest, _ALIGNMENT) * _ALIGNMENT
    scores = torch.empty((num_tokens, width), dtype=torch.float32, device=q.device)
    _score_kernel[(groups, programs)](
        q,
        weights,
        codes,
        scales,
        table,
        rows,
        lens,
        scores,
        num_tokens,
        q.stride(0),
        table.stride(0),
        scores.stride(0),
        NUM_HEADS=num_heads,
        DIM=dim,
        TOKENS=together,
        HEADS=heads,
        BLOCK_D=max(32 if is_fp8 else 16, triton.next_power_of_2(dim)),
        BLOCK=block,
        STRIDE=stride,
        IS_FP8=is_fp8,
        IS_LISTED=is_listed,
        LARGEST=FP8_MAX,
        LEAST=LEAST_SCALE,
        num_warps=num_warps,
        num_stages=num_stages,
        **early_start(q),
    )
    return scores[:, :longest]
