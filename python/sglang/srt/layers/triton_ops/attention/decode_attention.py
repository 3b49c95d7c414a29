"""Attention of one token per request over its paged context.

Query heads that share a KV head are the rows of one matrix product, so the context is read once. If
there are too few requests to fill the device, contexts are split over programs (Flash-Decoding).
The program that ends last joins the parts; if gates scale the output, a second kernel does. The
grid depends on the batch size and not on lengths, so graphs can capture it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import RoundedRows
from sglang.srt.layers.triton_ops.attention.online_softmax import (
    attend_range,
    begin_softmax,
    combine_splits,
    split_range,
    weigh,
)
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.gating import gated
from sglang.srt.layers.triton_ops.rotation import rotated_heads
from sglang.srt.layers.triton_ops.rounding import round_groups

BLOCK_N = 64
PROGRAMS = 512
"""Programs that fill the device. More would cost more than better balance gains."""
MAX_SPLITS = 32
JOINED_APART = (256, 32)
"""Most parts of a request with gates and few KV heads, and the tokens of their blocks. A second
kernel joins them, fast enough for so many."""
LONG_SPLITS = (4, 16)
LONG_TOKENS = 2048
LONG_PROGRAMS = 8192
"""Batches that fill the device are split too, because all would wait for one long context among
short ones: into parts of at least `LONG_TOKENS`, over at most `LONG_PROGRAMS` programs. A program
without work costs little."""
FULL_LAUNCH = (32, 1, 3)
"""Tokens of a block, warps and stages of batches that fill the device, for heads of 128 in 16
bits. One warp does not wait for others."""
_EARLY_PROGRAMS = 256
"""Most programs that read keys and values before they wait. They need more registers, so a device
has no room for twice as many at a time."""
_MOST_COUNTED = 1 << 16
_ROWS_JOINED_AT_ONCE = 64
"""Parts that a program joins at once, times heads."""
_ROWS_JOINED_EARLY = 128
"""The same of a program that reads early. Few of those run at a time, so each has more registers
free."""
_SECTOR_BYTES = 32
"""Unit that an L1 cache fetches. Rows in the same sector as a newest row are not read early."""


@triton.jit(
    do_not_specialize=["splits", "least", "written"],
    do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "loc_ptr"],
)
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
    arrivals_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    gates_stride: tl.tensor,
    gates_step: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    written: tl.tensor,
    sinks_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    new_k_ptr: tl.tensor,
    new_v_ptr: tl.tensor,
    loc_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    new_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED_ROWS: tl.constexpr,
    JOINED_PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    APART: tl.constexpr,
    EARLY: tl.constexpr,
    EARLY_KV: tl.constexpr,
) -> None:
    """Grid `(kv_heads, bs, splits)`: one program attends from a group's query heads to one
    split. If there is `cos_ptr`, it rotates them first, and the program of the split with the new
    token rotates its key, and stores key and value."""
    # Programs that run together read neighbouring heads of the same tokens.
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # Written before the lookup of embeddings, which does not start early.
    length = tl.load(lens_ptr + request).to(tl.int32)
    slots = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    begin, end, parts = split_range(length, split, splits, least, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    if EARLY_KV:
        # Since the embedding lookup, only this layer's kernels have written to its keys and values,
        # and only those of the newest tokens.
        old = length - written
        pos = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + pos, mask=pos < end, other=0).to(tl.int64)
        at = slot[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        is_old = (pos < tl.minimum(end, old))[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head + at, mask=is_old, other=0.0)
        v = tl.load(v_head + at, mask=is_old, other=0.0)
    is_dim = dims < HEAD_DIM
    if cos_ptr is not None:
        # Angles and slots were written before the embedding lookup, which does not start early.
        loc = tl.load(loc_ptr + request).to(tl.int64)
        cos = tl.load(cos_ptr + request * HEAD_DIM + dims, mask=is_dim, other=0.0)
        sin = tl.load(sin_ptr + request * HEAD_DIM + dims, mask=is_dim, other=0.0)
    await_kernels_before(EARLY)
    heads = kv_head * GROUP + tl.arange(0, ROWS)
    is_head = tl.arange(0, ROWS) < GROUP
    out_row = request * NUM_KV_HEADS * GROUP + heads
    part = out_row * splits + split
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if begin >= end:
            if APART:
                tl.store(lse_ptr + part, tl.full([ROWS], float("-inf"), tl.float32), mask=is_head)
            return
    inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q_ptr + request * q_stride + heads[:, None] * HEAD_DIM
    if cos_ptr is not None:
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        q = rotated_heads(q_at, dims[None, :], inside, cos[None, :], sin[None, :], HEAD_DIM)
        if end == length:
            new_at = request * new_stride + kv_head * HEAD_DIM
            new_k = rotated_heads(new_k_ptr + new_at, dims, is_dim, cos, sin, HEAD_DIM)
            new_v = tl.load(new_v_ptr + new_at + dims, mask=is_dim, other=0.0)
            stored = loc * (NUM_KV_HEADS * HEAD_DIM) + dims
            tl.store(k_head + stored, new_k.to(k_ptr.dtype.element_ty), mask=is_dim)
            tl.store(v_head + stored, new_v.to(v_ptr.dtype.element_ty), mask=is_dim)
        # All threads of this program, which alone reads them, see them in memory.
        tl.debug_barrier()
    else:
        q = tl.load(q_at + dims[None, :], mask=inside, other=0.0)
    peak, mass = begin_softmax(sinks_ptr, heads, is_head, split, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if EARLY_KV:
        if end > old:
            is_new = ((pos >= old) & (pos < end))[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.where(is_new, tl.load(k_head + at, mask=is_new, other=0.0), k)
            v = tl.where(is_new, tl.load(v_head + at, mask=is_new, other=0.0), v)
        p, _, peak, mass = weigh(q, k, (pos < end)[None, :], peak, mass, scale, False)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="tf32x3")
        begin = tl.minimum(begin + BLOCK, end)
    whole = begin + (end - begin) // BLOCK * BLOCK
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, begin, whole, heads, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK, False, True,
    )  # fmt: skip
    peak, mass, acc = attend_range(
        q, peak, mass, acc, k_head, v_head, slots, whole, end, heads, scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK, False, False,
    )  # fmt: skip
    acc = acc / mass[:, None]
    if SPLIT:  # noqa: SIM102 - known when this is compiled
        if APART or parts > 1:
            tl.store(lse_ptr + part, peak + tl.log2(mass), mask=is_head)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
            if APART:
                return
            # Every thread of this program stores before the program is counted.
            tl.debug_barrier()
            counter = arrivals_ptr + request * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                _join(
                    parts_ptr, lse_ptr, out_ptr, gates_ptr + request * gates_stride, gates_step,
                    scales_ptr, request, kv_head, parts, splits, q_ptr.dtype.element_ty,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, JOINED_ROWS, JOINED_PARTS, GATED,
                )  # fmt: skip
            return
    out = acc.to(q_ptr.dtype.element_ty)
    if GATED:
        at = gates_ptr + request * gates_stride + heads[:, None] * gates_step + dims[None, :]
        out = gated(out, tl.load(at, mask=inside, other=0.0))
    _store(out, out_ptr, scales_ptr, out_row, heads, is_head, request, dims, inside, HEAD_DIM)


@triton.jit
def _store(
    out: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    is_head: tl.tensor,
    request: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store the output of some heads; in fp8 each head is a group with a scale."""
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        out, scales = round_groups(out.to(tl.float32))
        tl.store(scales_ptr + heads * tl.num_programs(1) + request, scales, mask=is_head)
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=inside)


@triton.jit
def _join(
    parts_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    gates_step: tl.tensor,
    scales_ptr: tl.tensor,
    request: tl.tensor,
    kv_head: tl.tensor,
    parts: tl.tensor,
    splits: tl.tensor,
    DTYPE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """Join the parts of the heads of one group, weighted by their masses, PARTS at a time."""
    # Parts of other programs are read past the L1 cache, because it is not coherent.
    dims = tl.arange(0, BLOCK_D)
    is_head = tl.arange(0, ROWS) < GROUP
    head = kv_head * GROUP + tl.arange(0, ROWS)
    row = request * NUM_KV_HEADS * GROUP + head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, parts, PARTS):
        number = start + tl.arange(0, PARTS)
        part = row[:, None] * splits + number[None, :]
        there = is_head[:, None] & (number < parts)[None, :]
        lse = tl.load(lse_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        # Rows without a head have no weight, and must not become NaN.
        lse = tl.where(is_head[:, None], lse, 0.0)
        at = part[:, :, None] * HEAD_DIM + dims[None, None, :]
        inside = there[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        values = tl.load(parts_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, axis=1))
        weight = tl.exp2(lse - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], axis=1)
        peak = new_peak
    inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    out = (acc / mass[:, None]).to(DTYPE)
    if GATED:
        at = gates_ptr + head[:, None] * gates_step + dims[None, :]
        out = gated(out, tl.load(at, mask=inside, other=0.0))
    _store(out, out_ptr, scales_ptr, row, head, is_head, request, dims, inside, HEAD_DIM)


class NewTokens(NamedTuple):
    """Queries are not rotated, and the newest key and value of each request not stored."""

    k: torch.Tensor
    """`[bs, num_kv_heads, head_dim]`, dense except for the first stride; not rotated."""
    v: torch.Tensor
    """Of the shape and strides of `k`."""
    loc: torch.Tensor
    """Integer `[bs]`: slots."""
    cos: torch.Tensor
    """Contiguous `[bs, 1, head_dim]`."""
    sin: torch.Tensor
    """Signed; like `cos`."""


def make_arrivals(device: torch.device | str) -> torch.Tensor:
    """Counters of finished parts for `decode_attention`: int32 `[65536]`, zero between calls. Each
    calling stream needs its own."""
    return torch.zeros(_MOST_COUNTED, dtype=torch.int32, device=device)


def plan_splits(batch_size: int, num_kv_heads: int, *, is_gated: bool = False) -> tuple[int, int]:
    """Most parts of a context, a power of 2, and fewest tokens of a part."""
    if batch_size * num_kv_heads > _MOST_COUNTED:
        return 1, BLOCK_N
    wanted = PROGRAMS // (batch_size * num_kv_heads)
    if wanted < 2:
        least, most = LONG_SPLITS
        wanted = min(max(LONG_PROGRAMS // (batch_size * num_kv_heads), least), most)
        return _power_of_two_below(wanted), LONG_TOKENS
    if is_gated and wanted >= JOINED_APART[0]:
        return JOINED_APART
    return _power_of_two_below(min(wanted, MAX_SPLITS)), BLOCK_N


def _power_of_two_below(number: int) -> int:
    return 1 << number.bit_length() - 1


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    arrivals: torch.Tensor,
    *,
    written: int = 1,
    gates: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    rounded: RoundedRows | None = None,
    new: NewTokens | None = None,
    splits: tuple[int, int] | None = None,
    launch: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Attend from one token of each request to its context.

    Args:
        q: `[bs, num_heads, head_dim]`, dense except for the first stride.
        k_pool: Contiguous `[slots, num_kv_heads, head_dim]`, of the model's dtype or fp8; `v_pool`
            likewise.
        req_to_token: int32 `[rows, max_context_len]`.
        req_pool_indices: Integer `[bs]`.
        seq_lens: Integer `[bs]`, at least 1 each.
        arrivals: Counters from `make_arrivals`.
        written: Tokens at the end of a context whose keys and values this step may have written.
        gates: `[bs, num_heads, head_dim]` with dense rows; the output is multiplied by their
            sigmoid. None: no gates.
        sinks: `[num_heads]`: see `begin_softmax`.
        rounded: Memory for the result of a step without gates, with a scale for each head: what
            `quantize_activations` makes of the result otherwise. None: it is not rounded.
        new: Tokens to rotate, with their queries, and to store first; None: all that is done.
        splits: In the form of `plan_splits`; None: its result.
        launch: Tokens per block, warps, stages; None: the fastest.

    Returns:
        `[bs, num_heads * head_dim]`, of the dtype of `q`, or the elements of `rounded`.
    """
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    assert q.stride()[1:] == (head_dim, 1) and k_pool.is_contiguous() and v_pool.is_contiguous()
    if splits is None:
        splits = plan_splits(batch_size, num_kv_heads, is_gated=gates is not None)
    count, least = splits
    # One program would take as long to join many parts as all programs took to read the context.
    joins_apart = gates is not None and count > 1 and least < LONG_TOKENS
    if rounded is None:
        out = torch.empty((batch_size, num_heads * head_dim), dtype=q.dtype, device=q.device)
    else:
        out = rounded.elements
        assert gates is None and head_dim == triton.next_power_of_2(head_dim)
        assert rounded.scales.shape == (batch_size, num_heads)
    parts, lse = out, out
    if count > 1:
        rows = batch_size * num_heads
        parts = torch.empty((rows, count, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, count), dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    if launch is None:
        block_n = JOINED_APART[1] if splits == JOINED_APART else BLOCK_N
        launch = (block_n, 4, 2 if k_pool.element_size() > 1 else 5)
        is_usual = head_dim == 128 and k_pool.element_size() == 2 and group <= 16
        if least == LONG_TOKENS and is_usual:
            launch = FULL_LAUNCH
    gate_arguments = (out, 0, 0)
    if gates is not None:
        assert gates.shape == q.shape and gates.stride(2) == 1
        gate_arguments = (gates, gates.stride(0), gates.stride(1))
    new_arguments: tuple[Any, ...] = (None, None, None, None, None, 0)
    if new is not None:
        assert new.k.stride() == new.v.stride() and new.k.stride()[1:] == (head_dim, 1)
        assert new.cos.is_contiguous() and new.sin.is_contiguous() and written == 1
        assert new.cos.shape[-1] == head_dim
        new_arguments = (*new, new.k.stride(0))
    block_n, num_warps, num_stages = launch
    starts = early_start(q, most_rows=SEVERAL_ROWS)
    has_room = joins_apart or num_kv_heads * batch_size * count <= _EARLY_PROGRAMS
    whole_sectors = head_dim * k_pool.element_size() % _SECTOR_BYTES == 0
    reads_early = starts["EARLY"] > 0 and has_room and whole_sectors
    joined_rows = triton.next_power_of_2(group)
    joined_at_once = _ROWS_JOINED_EARLY if reads_early else _ROWS_JOINED_AT_ONCE
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
        arrivals,
        *gate_arguments,
        count,
        least,
        written,
        sinks,
        out if rounded is None else rounded.scales,
        *new_arguments,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=max(16, triton.next_power_of_2(group)),
        JOINED_ROWS=joined_rows,
        JOINED_PARTS=max(1, joined_at_once * min(num_warps, 4) // (4 * joined_rows)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK=block_n,
        SPLIT=count > 1,
        GATED=gates is not None,
        APART=joins_apart,
        EARLY_KV=reads_early,
        num_warps=num_warps,
        num_stages=num_stages,
        **starts,
    )
    if joins_apart:
        combine_splits(parts, lse, out, gates)
    return out
