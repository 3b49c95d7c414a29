"""Online softmax of query rows over a range of a paged context, and the join of attention over
parts of a context by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import (
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.gating import gated

_LEAST_DIMS = 64
_PROGRAMS = 1024
"""A program joins at least so many elements of a row; more, if there would be more programs than
that."""


@triton.jit
def split_range(  # type: ignore[no-untyped-def]  # noqa: ANN201
    last: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    BLOCK_N: tl.constexpr,
):
    """The tokens `[begin, end)` of one split of the context `[0, last)`, and the number of splits
    that are not empty.

    All splits but the last have whole blocks, and at least `least` tokens. Splits past the last
    token are empty.
    """
    # Counted in whole blocks: 1,025 tokens are 17 splits of 64, not 9 of 128.
    whole = tl.cdiv(last, BLOCK_N) * BLOCK_N
    wanted = tl.minimum(splits, tl.maximum(whole // least, 1))
    per_part = tl.cdiv(tl.cdiv(last, wanted), BLOCK_N) * BLOCK_N
    begin = split * per_part
    return begin, tl.minimum(begin + per_part, last), tl.cdiv(last, per_part)


@triton.jit
def begin_softmax(  # type: ignore[no-untyped-def]  # noqa: ANN201
    sinks_ptr: tl.tensor,
    heads: tl.tensor,
    is_row: tl.tensor,
    split: tl.tensor,
    ROWS: tl.constexpr,
):
    """Peak and mass of ROWS query rows that have seen no key yet.

    A sink is one more logit of a head, without a value. It is not scaled. The first split of a
    context counts it, for all splits together. None in place of a pointer: there are no sinks.
    """
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32)
        counts = tl.zeros([ROWS], tl.int32) + split == 0
        peak = tl.where(counts, sink * 1.4426950408889634, peak)
        mass = tl.where(counts, 1.0, mass)
    return peak, mass


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    q_pos: tl.tensor,
    scale: tl.tensor,
    slot_stride: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One pass of online softmax (Milakov and Gimelshein, 2018), base 2.

    Slots of the context are looked up token by token, so one kernel serves all page sizes. EVEN:
    the range is whole blocks, and every row sees all of it.
    """
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        pos = start + tokens
        if EVEN:
            slot = tl.load(slots_ptr + pos).to(tl.int64)
        else:
            # Past the end: slot 0, the padding page, whose values are finite.
            slot = tl.load(slots_ptr + pos, mask=pos < end, other=0).to(tl.int64)
        at = slot[:, None] * slot_stride + dims[None, :]
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + at)
        else:
            k = tl.load(k_ptr + at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        seen = pos[None, :] < end
        if CAUSAL:
            seen = seen & (pos[None, :] <= q_pos[:, None])
        p, shrink, peak, mass = weigh(q, k, seen, peak, mass, scale, EVEN)
        if HEAD_DIM == BLOCK_D:
            v = tl.load(v_ptr + at)
        else:
            v = tl.load(v_ptr + at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="tf32x3")
    return peak, mass, acc


@triton.jit
def weigh(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q: tl.tensor,
    k: tl.tensor,
    seen: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    scale: tl.tensor,
    EVEN: tl.constexpr,
):
    """Weights of one block's values, the factor for the sums before it, and the new peak and mass.

    EVEN: every row sees all of the block, and `seen` is ignored.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3") * scale
    if not EVEN:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    if EVEN:
        base = new_peak
    else:
        # For a row that has seen nothing yet, -inf minus -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    p = tl.exp2(scores - base[:, None])
    return p, shrink, new_peak, mass * shrink + tl.sum(p, axis=1)


@triton.jit
def _combine_kernel(
    parts_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    gates_stride: tl.tensor,
    gates_step: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(rows, head_dim / BLOCK_D)`: one program joins all splits of a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    await_kernels_before(EARLY)
    lse = tl.load(lse_ptr + row * SPLITS + splits)
    peak = tl.max(lse, axis=0)
    if peak == float("inf"):
        return
    weight = tl.exp2(lse - peak)
    # Parts that were not written have no weight, and are not read.
    inside = (weight > 0.0)[:, None] & (cols < HEAD_DIM)[None, :]
    at = (row * SPLITS + splits)[:, None] * HEAD_DIM + cols[None, :]
    parts = tl.load(parts_ptr + at, mask=inside, other=0.0)
    out = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    out = out.to(out_ptr.dtype.element_ty)
    if GATED:
        at = gates_ptr + row // HEADS * gates_stride + row % HEADS * gates_step + cols
        out = gated(out, tl.load(at, mask=cols < HEAD_DIM, other=0.0))
    tl.store(out_ptr + row * HEAD_DIM + cols, out, mask=cols < HEAD_DIM)


def combine_splits(
    parts: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    gates: torch.Tensor | None = None,
) -> None:
    """Join the splits of every row.

    Args:
        parts: fp32 `[rows, splits, head_dim]`, each normalised separately.
        lse: fp32 `[rows, splits]`: base-2 log-sum-exp of each split; -inf: an empty split; +inf:
            the row of `out` is final already.
        out: Contiguous `[num_tokens, num_heads * head_dim]`, of any shape.
        gates: `[num_tokens, num_heads, head_dim]` with dense rows; the result is multiplied by
            their sigmoid. None: no gates.
    """
    rows, splits, head_dim = parts.shape
    block_d = _block_dims(rows, head_dim)
    heads, stride, step = 1, 0, 0
    if gates is not None:
        heads, stride, step = gates.shape[1], gates.stride(0), gates.stride(1)
    _combine_kernel[(rows, triton.cdiv(head_dim, block_d))](
        parts,
        lse,
        out,
        out if gates is None else gates,
        stride,
        step,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLITS=splits,
        GATED=gates is not None,
        num_warps=4 if splits > 8 else 1,
        **early_start(out),
    )


@triton.jit
def _merge_kernel(
    a_ptr: tl.tensor,
    a_lse_ptr: tl.tensor,
    b_ptr: tl.tensor,
    b_lse_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid `(num_tokens, heads / ROWS)`: one program joins ROWS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    a_lse = tl.load(a_lse_ptr + heads * num_tokens + token, mask=is_head, other=0.0)
    b_lse = tl.load(b_lse_ptr + heads * num_tokens + token, mask=is_head, other=0.0)
    share = 1.0 / (1.0 + tl.exp(b_lse - a_lse))
    peak = tl.maximum(a_lse, b_lse)
    joined = peak + tl.log(tl.exp(a_lse - peak) + tl.exp(b_lse - peak))
    # Not in place, because another warp may not have read it yet.
    tl.store(joined_ptr + heads * num_tokens + token, joined, mask=is_head)
    inside = is_head[:, None] & (cols < HEAD_DIM)[None, :]
    at = token * NUM_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + cols[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    b = tl.load(b_ptr + at, mask=inside, other=0.0)
    merged = a.to(tl.float32) * share[:, None] + b.to(tl.float32) * (1.0 - share)[:, None]
    tl.store(a_ptr + at, merged.to(a.dtype), mask=inside)


@triton.jit
def _sinks_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid `(num_tokens, heads / ROWS)`: one program scales ROWS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    lse = tl.load(lse_ptr + heads * num_tokens + token, mask=is_head, other=0.0)
    share = 1.0 / (1.0 + tl.exp(tl.load(sinks_ptr + heads, mask=is_head, other=0.0) - lse))
    inside = is_head[:, None] & (cols < HEAD_DIM)[None, :]
    at = out_ptr + token * NUM_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + cols[None, :]
    out = tl.load(at, mask=inside, other=0.0)
    tl.store(at, (out.to(tl.float32) * share[:, None]).to(out.dtype), mask=inside)


def add_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add one more logit to the softmax of each row of `out`, without a value.

    Args:
        out: Contiguous `[num_tokens, num_heads, head_dim]`.
        lse: As in `merge_into_`.
        sinks: fp32 `[num_heads]`.
    """
    num_tokens, num_heads, head_dim = out.shape
    assert out.is_contiguous() and lse.is_contiguous()
    rows = min(32, triton.next_power_of_2(num_heads))
    _sinks_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        out,
        lse,
        sinks,
        num_tokens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def merge_into_(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> torch.Tensor:
    """Join attention over two parts of a context into `out`.

    Args:
        out: Contiguous `[num_tokens, num_heads, head_dim]`; `other` likewise.
        lse: Contiguous fp32 `[num_heads, num_tokens]`, log-sum-exp (natural) of the scores;
            `other_lse` likewise.

    Returns:
        The log-sum-exp over both parts, of the shape of `lse`.
    """
    num_tokens, num_heads, head_dim = out.shape
    assert out.is_contiguous() and other.is_contiguous()
    assert lse.is_contiguous() and other_lse.is_contiguous()
    joined = torch.empty_like(lse)
    rows = min(32, triton.next_power_of_2(num_heads))
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        out,
        lse,
        other,
        other_lse,
        joined,
        num_tokens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return joined


def _block_dims(rows: int, head_dim: int) -> int:
    """Elements of a row that a program joins."""
    block_d = most_dims = int(triton.next_power_of_2(head_dim))
    while block_d > _LEAST_DIMS and rows * most_dims // block_d < _PROGRAMS:
        block_d //= 2
    return block_d


def warm_up_joins(
    cases: Iterable[tuple[int, int]], num_heads: int, head_dim: int, out: torch.Tensor
) -> None:
    """Run every kernel that `combine_splits` has for steps of some sizes.

    Args:
        cases: Numbers of tokens and of splits.
        out: Any tensor of the dtype and on the device of the results.
    """
    known = set()
    for tokens, splits in cases:
        rows = tokens * num_heads
        results = out.new_empty((tokens, num_heads * head_dim))
        kernel = splits, _block_dims(rows, head_dim), *early_start(results).values()
        if splits > 1 and kernel not in known:
            known.add(kernel)
            parts = out.new_zeros((rows, splits, head_dim), dtype=torch.float32)
            combine_splits(parts, parts[..., 0].contiguous(), results)
