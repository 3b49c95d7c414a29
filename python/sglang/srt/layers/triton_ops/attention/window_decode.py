"""Sliding-window attention of one token per request, over rings: position p of a request is in row
`p % window` of its ring.

One kernel stores the tokens and attends. A program writes one head's key and value of a token, and
reads the whole ring of that head, which no other program writes. Windows are short, so no ring is
split. The grid depends on the batch size alone, so graphs can capture it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.attention.online_softmax import begin_softmax, weigh
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.rotation import rotated_heads

_ELEMENTS: Final = 8192
"""Elements of a ring's keys that a program reads at once."""


@triton.jit
def attend_block(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
):
    """Add a block of keys to an online softmax."""
    p, shrink, peak, mass = weigh(q, k, seen, peak, mass, scale, False)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="tf32x3")
    return peak, mass, acc


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    ring_k_ptr: tl.tensor,
    ring_v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
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
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(kv_heads, bs)`: one program stores one head's key and value of one token, and attends
    from the query heads of its group to the ring. If there is `cos_ptr`, it rotates queries and
    key first."""
    kv_head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + request).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    heads = kv_head * GROUP + tl.arange(0, ROWS)
    is_head = tl.arange(0, ROWS) < GROUP
    own = position % WINDOW
    count = tl.minimum(position + 1, WINDOW)
    at = (slot * NUM_KV_HEADS + kv_head) * (WINDOW * HEAD_DIM)
    rows = tl.arange(0, BLOCK)
    where = rows[:, None] * HEAD_DIM + dims[None, :]
    inside = (rows < count)[:, None] & is_dim[None, :]
    if WINDOW <= BLOCK:
        # Since the embedding lookup, only this layer's kernels have written to its rings, and this
        # one does not use what it overwrites.
        k = tl.load(ring_k_ptr + at + where, mask=inside, other=0.0)
        v = tl.load(ring_v_ptr + at + where, mask=inside, other=0.0)
    if cos_ptr is not None:
        # Angles were written before the embedding lookup, which does not start early.
        cos = tl.load(cos_ptr + request * HEAD_DIM + dims, mask=is_dim, other=0.0)
        sin = tl.load(sin_ptr + request * HEAD_DIM + dims, mask=is_dim, other=0.0)
    await_kernels_before(EARLY)
    new_k_at = k_ptr + request * k_stride + kv_head * HEAD_DIM
    new_v_at = v_ptr + request * v_stride + kv_head * HEAD_DIM
    new_v = tl.load(new_v_at + dims, mask=is_dim, other=0.0)
    new_v = new_v.to(ring_v_ptr.dtype.element_ty)
    q_inside = is_head[:, None] & is_dim[None, :]
    q_at = q_ptr + request * q_stride + heads[:, None] * HEAD_DIM
    if cos_ptr is not None:
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        new_k = rotated_heads(new_k_at, dims, is_dim, cos, sin, HEAD_DIM)
        q = rotated_heads(q_at, dims[None, :], q_inside, cos[None, :], sin[None, :], HEAD_DIM)
    else:
        new_k = tl.load(new_k_at + dims, mask=is_dim, other=0.0)
        q = tl.load(q_at + dims[None, :], mask=q_inside, other=0.0)
    new_k = new_k.to(ring_k_ptr.dtype.element_ty)
    peak, mass = begin_softmax(sinks_ptr, heads, is_head, 0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK):
        row = start + rows
        if WINDOW > BLOCK:
            where = row[:, None] * HEAD_DIM + dims[None, :]
            inside = (row < count)[:, None] & is_dim[None, :]
            k = tl.load(ring_k_ptr + at + where, mask=inside, other=0.0)
            v = tl.load(ring_v_ptr + at + where, mask=inside, other=0.0)
        is_own = (row == own)[:, None]
        peak, mass, acc = attend_block(
            q, tl.where(is_own, new_k[None, :], k), tl.where(is_own, new_v[None, :], v),
            (row < count)[None, :], peak, mass, acc, scale,
        )  # fmt: skip
    stored = at + own * HEAD_DIM + dims
    tl.store(ring_k_ptr + stored, new_k, mask=is_dim)
    tl.store(ring_v_ptr + stored, new_v, mask=is_dim)
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    out_at = (request * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_at, out, mask=q_inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """The rings of one layer, and a step's slots in them: int64 on the device."""

    k: torch.Tensor
    """Contiguous `[slots, num_kv_heads, window, head_dim]`; `v` likewise."""
    v: torch.Tensor
    slots: torch.Tensor
    """`[bs]`: slots that the step writes."""
    first_slots: torch.Tensor | None = None
    """`[bs]`: slots that the requests continue from; None: `slots`."""

    @property
    def window(self) -> int:
        return self.k.shape[2]

    @property
    def read_slots(self) -> torch.Tensor:
        """`[bs]`: slots that the requests continue from."""
        return self.slots if self.first_slots is None else self.first_slots


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rings: RingStep) -> None:
    head_dim = rings.k.shape[-1]
    assert rings.k.is_contiguous() and rings.v.is_contiguous()
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q, k, v)), "heads are dense"


def decode_in_rings(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rings: RingStep,
    positions: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Store one token of each request in its ring, and attend from it to the last `window`.

    Args:
        q: `[bs, num_heads, head_dim]`, dense except for the first stride.
        k: `[bs, num_kv_heads, head_dim]`, likewise; `v` too.
        rings: `slots` have the requests' states.
        positions: Integer `[bs]`.
        sinks: `[num_heads]`: see `begin_softmax`.
        angles: Cosines and signed sines, contiguous `[bs, 1, head_dim]` each, by which queries and
            keys are rotated first; None: they are rotated already.

    Returns:
        `[bs, num_heads * head_dim]`.
    """
    check_heads(q, k, v, rings)
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
    out = torch.empty((batch_size, num_heads * head_dim), dtype=q.dtype, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    elements = _ELEMENTS if q.element_size() == 2 else _ELEMENTS // 4
    block = max(16, min(elements // block_d, triton.next_power_of_2(rings.window)))
    _decode_kernel[(num_kv_heads, batch_size)](
        q,
        k,
        v,
        rings.k,
        rings.v,
        rings.slots,
        positions,
        out,
        sinks,
        *(angles or (None, None)),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scaling * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=rings.window,
        ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK=block,
        num_warps=4,
        num_stages=1,
        **early_start(q, most_rows=SEVERAL_ROWS),
    )
    return out
