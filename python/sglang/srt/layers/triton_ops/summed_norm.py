"""Root-mean-square normalisation of a residual and the parts of several GPUs, which it adds.

One launch instead of a sum over the ranks, which writes what a norm then reads. Programs with the
same number on all GPUs meet before they read each other's parts, by flags as torch's kernels on
symmetric memory use them: a program sets its flag at each peer from 0 to 1, and its own back once
the peer has set it. Between two kernels all flags are 0.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.distributed.tensor_group import PeerParts

_MOST_PROGRAMS: Final = 256
"""All of them are on a GPU at the same time."""
_FLAG_BYTES: Final = 4


@triton.jit
def _summed_norm_kernel(
    memories_ptr: tl.tensor,
    pads_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    flags = program * RANKS
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            pad = tl.load(pads_ptr + peer).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(pad + flags + RANK, 0, 1, sem="release", scope="sys") != 0:
                pass
    own = tl.load(pads_ptr + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            while tl.atomic_cas(own + flags + peer, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    dtype = residual_ptr.dtype.element_ty
    for row in range(program, rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * SIZE + cols
        x = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        # In the order of ranks, so that all get the same bits.
        for peer in tl.static_range(RANKS):
            memory = tl.load(memories_ptr + peer) + offset
            # Known to be aligned, or each number would be loaded by itself.
            part = tl.multiple_of(memory.to(tl.pointer_type(dtype)), 16)
            x += tl.load(part + places, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr + places, rounded, mask=inside)
        wide = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        if CENTERED:
            normed = wide * scale * (1.0 + weight)
        else:
            # Rounded before the weight is applied: the order that checkpoints were trained with.
            normed = (wide * scale).to(dtype).to(tl.float32) * weight
        tl.store(out_ptr + places, normed.to(dtype), mask=inside)


def add_parts_rms_norm_(
    peers: PeerParts, residual: torch.Tensor, weight: torch.Tensor, eps: float, is_centered: bool
) -> torch.Tensor:
    """`residual += sum of all ranks' parts`, and its norm, a new tensor.

    Args:
        peers: Where the parts are, each like `residual`.
        residual: Contiguous `[num_tokens, size]`, overwritten; the same on all ranks.
        weight: `[size]`.
        is_centered: See `rms_norm`.
    """
    assert residual.is_contiguous()
    rows, size = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    most = min(_MOST_PROGRAMS, peers.pad_bytes // (_FLAG_BYTES * peers.size))
    _summed_norm_kernel[(min(rows, most),)](
        peers.memories,
        peers.pads,
        residual,
        weight,
        out,
        rows,
        peers.offset,
        eps,
        RANK=peers.rank,
        RANKS=peers.size,
        SIZE=size,
        BLOCK=block,
        CENTERED=is_centered,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
