"""Sliding-window attention of new tokens over rings: position p of a request is in row `p % window`
of its ring.

Attention reads the last tokens of the ring and then the new ones, both in the order of positions,
and skips what no row of a block sees. The new tokens are stored by a kernel of their own, because
they overwrite what other blocks read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.attention.extend_attention import ExtendWork
from sglang.srt.layers.triton_ops.attention.online_softmax import begin_softmax
from sglang.srt.layers.triton_ops.attention.window_decode import (
    RingStep,
    attend_block,
    check_heads,
)

_STORED: Final = 4096
"""Elements of a ring's keys that a program stores."""


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]  # noqa: ANN202
    q: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    base: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    q_pos: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    IN_RING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the keys of positions `[begin, end)` to an online softmax. Position `p` is in row
    `p % WINDOW` of a ring, or in row `p - base` of the new tokens."""
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)
        row = (pos % WINDOW if IN_RING else pos - base).to(tl.int64)
        inside = (pos < end)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + row[:, None] * k_stride + dims[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + row[:, None] * v_stride + dims[None, :], mask=inside, other=0.0)
        age = q_pos[:, None] - pos[None, :]
        seen = (pos < end)[None, :] & (age >= 0) & (age < WINDOW)
        peak, mass, acc = attend_block(q, k, v, seen, peak, mass, acc, scale)
    return peak, mass, acc


@triton.jit(
    do_not_specialize_on_alignment=["read_ptr", "bounds_ptr", "lens_ptr"],
)
def _extend_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    ring_k_ptr: tl.tensor,
    ring_v_ptr: tl.tensor,
    read_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid `(blocks, kv_heads)`: one program attends from ROWS query rows to the keys of one head.
    Without `blocks_ptr`, a block is the last token of one request, and its output is the
    request's."""
    kv_head = tl.program_id(1)
    if blocks_ptr is not None:
        block = blocks_ptr + tl.program_id(0) * 4
        request = tl.load(block).to(tl.int64)
        first_token = tl.load(block + 1).to(tl.int64)
        num_tokens = tl.load(block + 3)
        out_token = first_token
    else:
        request = tl.program_id(0).to(tl.int64)
        # Padding requests have no tokens, and any output will do.
        first_token = tl.maximum(tl.load(bounds_ptr + request + 1).to(tl.int64) - 1, 0)
        num_tokens = 1
        out_token = request
    begin = tl.load(bounds_ptr + request).to(tl.int64)
    new = tl.load(bounds_ptr + request + 1).to(tl.int64) - begin
    length = tl.load(lens_ptr + request).to(tl.int32)
    prefix = length - new.to(tl.int32)
    first_pos = length - 1
    if blocks_ptr is not None:
        first_pos = tl.load(block + 2)
    rows = tl.arange(0, ROWS)
    offset = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = offset < num_tokens
    dims = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = (first_token + offset)[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    q_pos = first_pos + offset
    # Blocks without tokens read nothing.
    oldest, last = tl.maximum(first_pos - WINDOW + 1, 0), first_pos + num_tokens
    peak, mass = begin_softmax(sinks_ptr, heads, is_row, 0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    slot = tl.load(read_ptr + request).to(tl.int64)
    ring = (slot * NUM_KV_HEADS + kv_head) * (WINDOW * HEAD_DIM)
    peak, mass, acc = _attend_keys(
        q, peak, mass, acc, ring_k_ptr + ring, ring_v_ptr + ring, HEAD_DIM, HEAD_DIM,
        0, oldest, tl.minimum(prefix, last), q_pos, scale,
        WINDOW, True, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    k_ptr += begin * k_stride + kv_head * HEAD_DIM
    v_ptr += begin * v_stride + kv_head * HEAD_DIM
    peak, mass, acc = _attend_keys(
        q, peak, mass, acc, k_ptr, v_ptr, k_stride, v_stride,
        prefix, tl.maximum(oldest, prefix), last, q_pos, scale,
        WINDOW, False, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    # Rows without a token see nothing.
    acc = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    out_at = (out_token + offset) * NUM_KV_HEADS * GROUP + heads
    out_at = out_at[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _last_before(end: tl.tensor, rows: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The last position before `end` that each row of a ring holds; negative: none."""
    return end - 1 - (end - 1 - rows + WINDOW) % WINDOW


@triton.jit
def _new_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    ptr: tl.tensor,
    stride: tl.tensor,
    old: tl.tensor,
    token: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
):
    """Rows of a ring. A negative `token` stands for no new token: the row is that of `old`."""
    is_new = (token >= 0)[:, None] & inside
    at = token.to(tl.int64)[:, None] * stride + dims[None, :]
    new = tl.load(ptr + at, mask=is_new, other=0.0).to(old.dtype)
    return tl.where(is_new, new, old)


@triton.jit(
    do_not_specialize_on_alignment=[
        "read_ptr", "slots_ptr", "track_ptr", "bounds_ptr", "track_lens_ptr", "lens_ptr"
    ],
)  # fmt: skip
def _store_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    ring_k_ptr: tl.tensor,
    ring_v_ptr: tl.tensor,
    read_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(bs, kv_heads, window / BLOCK)`: one program writes BLOCK rows of one head of a
    request's ring, and of its snapshot."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    begin = tl.load(bounds_ptr + request).to(tl.int64)
    new = (tl.load(bounds_ptr + request + 1).to(tl.int64) - begin).to(tl.int32)
    if new == 0:
        return
    prefix = tl.load(lens_ptr + request).to(tl.int32) - new
    rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows < WINDOW)[:, None] & (dims < HEAD_DIM)[None, :]
    where = rows[:, None] * HEAD_DIM + dims[None, :]
    read, slot = tl.load(read_ptr + request).to(tl.int64), tl.load(slots_ptr + request).to(tl.int64)
    size = WINDOW * HEAD_DIM
    at = (read * NUM_KV_HEADS + kv_head) * size + where
    old_k = tl.load(ring_k_ptr + at, mask=inside, other=0.0)
    old_v = tl.load(ring_v_ptr + at, mask=inside, other=0.0)
    k_ptr += begin * k_stride + kv_head * HEAD_DIM
    v_ptr += begin * v_stride + kv_head * HEAD_DIM
    if track_ptr is not None:
        track_len = tl.load(track_lens_ptr + request).to(tl.int32)
        if track_len > 0:
            token = _last_before(prefix + track_len, rows, WINDOW) - prefix
            to = (tl.load(track_ptr + request).to(tl.int64) * NUM_KV_HEADS + kv_head) * size + where
            k = _new_rows(k_ptr, k_stride, old_k, token, dims, inside)
            tl.store(ring_k_ptr + to, k, mask=inside)
            v = _new_rows(v_ptr, v_stride, old_v, token, dims, inside)
            tl.store(ring_v_ptr + to, v, mask=inside)
    token = _last_before(prefix + new, rows, WINDOW) - prefix
    to = (slot * NUM_KV_HEADS + kv_head) * size + where
    k = _new_rows(k_ptr, k_stride, old_k, token, dims, inside)
    v = _new_rows(v_ptr, v_stride, old_v, token, dims, inside)
    # Every thread must have read the old rows before any of them is overwritten.
    tl.debug_barrier()
    tl.store(ring_k_ptr + to, k, mask=inside)
    tl.store(ring_v_ptr + to, v, mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTokens:
    """Which tokens of a prefill belong to which request, the same for all layers."""

    bounds: torch.Tensor
    """int64 `[bs + 1]`: begin and end of each request's tokens; padding requests have none."""
    seq_lens: torch.Tensor
    """Integer `[bs]`: lengths of the contexts, the new tokens included."""
    track_lens: torch.Tensor
    """int64 `[bs]`: new tokens before each request's snapshot; 0: no snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingExtend(RingTokens):
    """The requests of a prefill, and the work of its attention."""

    work: ExtendWork
    """Blocks of all tokens; a block's row is the index of its request. The number of parts has no
    meaning here."""


def extend_in_rings(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rings: RingStep,
    step: RingExtend,
    scaling: float,
    sinks: torch.Tensor | None = None,
    *,
    last_only: bool = False,
) -> torch.Tensor:
    """Attend from new tokens to the last `window` tokens up to each. The rings stay as they are.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, dense except for the first stride.
        k: `[num_tokens, num_kv_heads, head_dim]`, likewise; `v` too.
        sinks: `[num_heads]`: see `begin_softmax`.
        last_only: If true, only the last token of each request attends.

    Returns:
        `[num_tokens, num_heads * head_dim]`, or `[bs, ...]` with `last_only`.
    """
    check_heads(q, k, v, rings)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
    requests = len(rings.slots)
    shape = (requests if last_only else num_tokens, num_heads * head_dim)
    is_padded = step.work.is_padded and not last_only
    make = torch.zeros if is_padded else torch.empty
    out = make(shape, dtype=q.dtype, device=q.device)
    rows = max(16, triton.next_power_of_2(group)) if last_only else step.work.rows
    # Many rows with large blocks of keys leave registers for one program of a multiprocessor alone.
    is_large = rows > 64 or head_dim > 128 or q.element_size() > 2
    _extend_kernel[(requests if last_only else len(step.work.blocks), num_kv_heads)](
        q,
        k,
        v,
        rings.k,
        rings.v,
        rings.read_slots,
        step.bounds,
        step.seq_lens,
        None if last_only else step.work.blocks,
        out,
        sinks,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scaling * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=rings.window,
        ROWS=rows,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=32 if is_large else 64,
        num_warps=8 if is_large else 4,
        num_stages=3 if q.element_size() == 2 else 2,
    )
    return out


def store_in_rings(
    k: torch.Tensor,
    v: torch.Tensor,
    rings: RingStep,
    step: RingTokens,
    track_slots: torch.Tensor | None,
) -> None:
    """Store the tokens of a prefill, and take its snapshots on the way. Keys and values may be the
    same, in one ring.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, dense except for the first stride; `v` too.
        rings: If there are `first_slots`, the kernel copies the rows from them that no token
            overwrites.
        track_slots: int64 `[bs]`: slots for snapshots; None: there are none.
    """
    check_heads(k, k, v, rings)
    _, num_kv_heads, window, head_dim = rings.k.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    block = max(1, min(_STORED // block_d, triton.next_power_of_2(window)))
    _store_kernel[(len(rings.slots), num_kv_heads, triton.cdiv(window, block))](
        k,
        v,
        rings.k,
        rings.v,
        rings.read_slots,
        rings.slots,
        track_slots,
        step.bounds,
        step.track_lens,
        step.seq_lens,
        k.stride(0),
        v.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WINDOW=window,
        BLOCK_D=block_d,
        BLOCK=block,
        num_warps=4,
    )
