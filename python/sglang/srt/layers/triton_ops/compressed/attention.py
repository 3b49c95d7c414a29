"""Attention to a window and to compressed rows; all heads share a key, which is its value too.

A program attends from a block of heads of one token. Its keys are those of the window, then rows:
all that the token sees, or those that an indexer has chosen. In the window, tokens before the step
are in a ring, where position p is in row `p % window`; the step's own tokens lie side by side. In a
decode step, a token's key is stored in the ring, in the place of one that the token does not see.
If there are too few tokens to fill the device, the keys are split over programs (Flash-Decoding).
The grid depends on the number of tokens alone, so graphs can capture it.

Outputs are rotated back. Rotations are linear, so each split rotates its part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.attention.latent_rows import PROGRAMS, plan_splits
from sglang.srt.layers.triton_ops.attention.online_softmax import (
    begin_softmax,
    combine_splits,
    split_range,
    warm_up_joins,
    weigh,
)
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

LAUNCH: Final = (64, 64, 8, 2)
"""Heads and keys per block, warps, stages."""
SMALL_LAUNCHES: Final = ((4, (16, 32, 4, 2)), (64, (16, 64, 4, 2)))
"""The same for up to so many tokens, where each program's own time counts."""
_FP32_LAUNCH: Final = (16, 16, 8, 1)
"""The same for fp32: twice the shared memory, and three TF32 products for each product."""


@triton.jit
def _turned_back(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
) -> tl.tensor:
    """Outputs `[HEADS, BLOCK_D]`, fp32, rotated by the negative angles. A thread of a product has
    both elements of a pair.

    Args:
        cos, sin: Pointers to the token's angles.
    """
    HEADS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, PAIRS) - (DIM - ROTARY) // 2
    is_turned = (pair >= 0) & (pair < ROTARY // 2)
    c = tl.load(cos + pair, mask=is_turned, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + ROTARY // 2 + pair, mask=is_turned, other=0.0).to(tl.float32)[None, :]
    first, second = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
    turned = tl.join(first * c + second * s, second * c - first * s)
    return tl.reshape(turned, [HEADS, 2 * PAIRS])


@triton.jit
def _load_keys(
    at: tl.tensor, seen: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Keys `[BLOCK, BLOCK_D]`; zeros in the place of those that are not seen."""
    if DIM == BLOCK_D:
        return tl.load(at, mask=seen[:, None], other=0.0)
    else:
        is_dim = tl.arange(0, BLOCK_D) < DIM
        return tl.load(at, mask=seen[:, None] & is_dim[None, :], other=0.0)


@triton.jit
def _add_keys(  # type: ignore[no-untyped-def]  # noqa: ANN202
    q: tl.tensor,
    key: tl.tensor,
    seen: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
):
    """Add a block of keys to an online softmax."""
    key = key.to(q.dtype)
    p, shrink, peak, mass = weigh(q, key, seen[None, :], peak, mass, scale, False)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(q.dtype), key, acc, input_precision="tf32x3")
    return peak, mass, acc


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=[
        "tokens_ptr", "positions_ptr", "requests_ptr", "prefixes_ptr", "slots_ptr", "lists_ptr"
    ],
)  # fmt: skip
def _attention_kernel(
    q_ptr: tl.tensor,
    new_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    prefixes_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    new_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(heads / HEADS, tokens, splits)`: one program attends from HEADS heads to one split.
    Without `requests_ptr`, it is a decode step: each token is its request's only one."""
    EVEN: tl.constexpr = (NUM_HEADS % HEADS == 0) and (DIM == BLOCK_D)
    WINDOW_END: tl.constexpr = (WINDOW + BLOCK - 1) // BLOCK * BLOCK
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    nth = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    is_head = heads < NUM_HEADS
    out_row = nth * NUM_HEADS + heads
    if requests_ptr is not None:
        await_kernels_before(EARLY)
    token = nth
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + nth).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int32)
    request = token
    prefix = position
    if requests_ptr is not None:
        request = tl.load(requests_ptr + token).to(tl.int64)
        prefix = tl.load(prefixes_ptr + token).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if requests_ptr is None:
        # These were written before the lookup of embeddings, which does not start early.
        await_kernels_before(EARLY)
    count = 0
    if rows_ptr is not None:
        count = (position + 1) // RATIO
        if TOPK > 0:
            count = tl.minimum(count, TOPK)
    begin, end, _ = split_range(WINDOW_END + count, split, splits, BLOCK, BLOCK)
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if begin >= end:
            tl.store(lse_ptr + out_row * splits + split, float("-inf"), mask=is_head)
            return
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    cos, sin = cos_ptr + token * ROTARY, sin_ptr + token * ROTARY
    q_at = (q_ptr + token * q_stride + heads * DIM)[:, None] + dims[None, :]
    if EVEN:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    ring = ring_ptr + slot * (WINDOW * DIM)
    # The key of position p is `p - position` rows after the token's own.
    own = new_ptr + token * new_stride
    peak, mass = begin_softmax(sinks_ptr, heads, is_head, split, HEADS)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for start in range(begin, tl.minimum(end, WINDOW_END), BLOCK):
        place = start + tl.arange(0, BLOCK)
        pos = position - WINDOW + 1 + place
        seen = (place < WINDOW) & (pos >= 0)
        old_at = ring + pos % WINDOW * DIM
        new_at = own + (pos - position).to(tl.int64) * new_stride
        key_at = tl.where(pos >= prefix, new_at, old_at)[:, None] + dims[None, :]
        key = _load_keys(key_at, seen, DIM, BLOCK_D)
        peak, mass, acc = _add_keys(q, key, seen, peak, mass, acc, scale)
    if rows_ptr is not None:
        table = table_ptr + nth * table_stride
        if TOPK == 0:
            table = table_ptr + tl.load(lists_ptr + request).to(tl.int64) * table_stride
        for start in range(tl.maximum(begin, WINDOW_END), end, BLOCK):
            place = start - WINDOW_END + tl.arange(0, BLOCK)
            seen = place < end - WINDOW_END
            if TOPK > 0:
                item = tl.load(table + place, mask=seen, other=0).to(tl.int64)
            else:
                item = tl.load(table + place * RATIO, mask=seen, other=0).to(tl.int64) // RATIO
            key_at = (rows_ptr + item * DIM)[:, None] + dims[None, :]
            key = _load_keys(key_at, seen, DIM, BLOCK_D)
            peak, mass, acc = _add_keys(q, key, seen, peak, mass, acc, scale)
    if requests_ptr is None:  # noqa: SIM102 - known when this is compiled
        if tl.program_id(0) + split == 0:
            # No program reads what this overwrites.
            key = tl.load(own + dims, mask=is_dim, other=0.0)
            tl.store(ring + position % WINDOW * DIM + dims, key, mask=is_dim)
    # A split may have seen nothing. It has no weight, and is not read.
    acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    acc = _turned_back(acc, cos, sin, DIM, ROTARY)
    if SPLIT:
        part = out_row * splits + split
        tl.store(lse_ptr + part, peak + tl.log2(mass), mask=is_head)
        out = parts_ptr + part * DIM
    else:
        out = out_ptr + out_row * DIM
    out_at = out[:, None] + dims[None, :]
    if EVEN:
        tl.store(out_at, acc.to(out.dtype.element_ty))
    else:
        inside = is_head[:, None] & is_dim[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTokens:
    """The tokens that attend, and where their windows are: int64 on the device."""

    positions: torch.Tensor
    """`[num_tokens]`."""
    slots: torch.Tensor
    """`[bs]`: each request's slot of the rings."""
    requests: torch.Tensor | None = None
    """`[num_tokens]`: each token's request; None: a decode step, whose tokens are its requests."""
    prefixes: torch.Tensor | None = None
    """`[num_tokens]`: tokens of the request before the step; None: likewise."""
    tokens: torch.Tensor | None = None
    """`[n]`: the tokens of the step that attend; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLists:
    """The rows that tokens see."""

    rows: torch.Tensor
    """Contiguous `[items, head_dim]`."""
    table: torch.Tensor
    """int32, the last dimension dense. Chosen items `[n, topk]` for each token that attends, the
    first that it sees; or slots `[lists, max_length]`."""
    ratio: int
    """Tokens of a row: token t sees row i if i < (t + 1) // ratio."""
    lists: torch.Tensor | None = None
    """int64 `[bs]`: each request's list of slots; None: the table has chosen items."""


def compressed_attention(
    q: torch.Tensor,
    new: torch.Tensor,
    ring: torch.Tensor,
    queries: QueryTokens,
    rows: RowLists | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    sinks: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    launch: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Attend from tokens to their windows and to rows. A decode step stores `new` in the ring.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, dense except for the first stride; rotated.
        new: Keys of the step's tokens, `[num_tokens, 1, head_dim]`, likewise.
        ring: Contiguous `[slots, 1, window, head_dim]` of the same dtype. A prefill
            leaves it as it is.
        rows: None: the layer has a window alone.
        angles: Cosines and signed sines, contiguous `[num_tokens, 1, rotary_dim]` each, by
            which the last dimensions of outputs are rotated back.
        scaling: Positive factor of the scores.
        sinks: `[num_heads]`: see `begin_softmax`.
        splits: In the form of `plan_splits`; None: its result.
        launch: In the form of `LAUNCH`; None: the fastest.

    Returns:
        Contiguous `[n, num_heads * head_dim]`.
    """
    _, num_heads, dim = q.shape
    window, rotary = ring.shape[2], angles[0].shape[-1]
    assert ring.dtype == new.dtype and ring.is_contiguous()
    assert q.stride()[1:] == (dim, 1) and new.stride(-1) == 1
    assert rows is None or (rows.rows.is_contiguous() and rows.table.stride(-1) == 1)
    assert all(one.is_contiguous() for one in angles) and dim % 2 == rotary % 2 == 0
    count = len(q) if queries.tokens is None else len(queries.tokens)
    if launch is None:
        launch = _launch_of(count, q)
    heads = _heads_of(launch, num_heads)
    _, block, num_warps, num_stages = launch
    head_blocks = triton.cdiv(num_heads, heads)
    if splits is None:
        splits = plan_splits(count, head_blocks)
    out = torch.empty((count, num_heads * dim), dtype=q.dtype, device=q.device)
    parts, lse = out, out
    if splits > 1:
        shape = (count * num_heads, splits)
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    is_chosen = rows is not None and rows.lists is None
    _attention_kernel[(head_blocks, count, splits)](
        q,
        new,
        ring,
        None if rows is None else rows.rows,
        None if rows is None else rows.table,
        queries.tokens,
        queries.positions,
        queries.requests,
        queries.prefixes,
        queries.slots,
        None if rows is None else rows.lists,
        sinks,
        *angles,
        out,
        parts,
        lse,
        q.stride(0),
        new.stride(0),
        0 if rows is None else rows.table.stride(0),
        scaling * math.log2(math.e),
        splits,
        NUM_HEADS=num_heads,
        DIM=dim,
        ROTARY=rotary,
        WINDOW=window,
        RATIO=1 if rows is None else rows.ratio,
        TOPK=rows.table.shape[1] if rows is not None and is_chosen else 0,
        HEADS=heads,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK=block,
        SPLIT=splits > 1,
        num_warps=num_warps,
        num_stages=num_stages,
        **early_start(out),
    )
    if splits > 1:
        combine_splits(parts, lse, out)
    return out


def _launch_of(tokens: int, like: torch.Tensor) -> tuple[int, int, int, int]:
    if like.element_size() == 4:
        return _FP32_LAUNCH
    return next((launch for most, launch in SMALL_LAUNCHES if tokens <= most), LAUNCH)


def _heads_of(launch: tuple[int, int, int, int], num_heads: int) -> int:
    """Heads of a program."""
    return min(launch[0], max(16, int(triton.next_power_of_2(num_heads))))


def warm_up_compressed_joins(num_heads: int, dim: int, out: torch.Tensor) -> None:
    """Run the kernels that join splits, of steps of any size. `out`: any tensor of the dtype and on
    the device of the results."""

    def splits_of(tokens: int) -> int:
        heads = _heads_of(_launch_of(tokens, out), num_heads)
        return plan_splits(tokens, triton.cdiv(num_heads, heads))

    sizes = ((tokens, splits_of(tokens)) for tokens in range(1, PROGRAMS + 1))
    warm_up_joins(sizes, num_heads, dim, out)
