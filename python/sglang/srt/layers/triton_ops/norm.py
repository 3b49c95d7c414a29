"""Root-mean-square normalisation that can add the residual in the same pass, and in the same launch
the partial sums of several GPUs.

For up to 64 tokens, each rank writes its partial sum to its peers' low-latency buffers. For more
tokens, the ranks pass a barrier and then read each other's partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.distributed.tensor_group import (
    LOW_LATENCY_ROW_BYTES,
    LOW_LATENCY_ROWS,
    MOST_PROGRAMS,
    PeerParts,
)
from sglang.srt.layers.triton_ops.arguments import RoundedRows
from sglang.srt.layers.triton_ops.early_start import (
    SEVERAL_ROWS,
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.peers import barrier, receive, send, sequence_numbers
from sglang.srt.layers.triton_ops.rounding import round_groups


@triton.jit
def _normed(
    rounded: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
) -> tl.tensor:
    """The norm of one token, in the token's dtype."""
    wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if CENTERED:
        normed = wide * scale * (1.0 + weight)
    else:
        # Rounded before the weight is applied, as in the training of checkpoints.
        normed = (wide * scale).to(rounded.dtype).to(tl.float32) * weight
    return normed.to(rounded.dtype)


@triton.jit
def normed_row(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """The norm of one token, in the token's dtype; WIDE: rounded once, after the weight."""
    if WIDE:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        normed = (wide * scale * weight).to(x.dtype)
    else:
        normed = _normed(x, weight, eps, SIZE, False)
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(rows,)`: one program normalises one token; BLOCK covers it.

    GROUP: features that have a scale in fp8, 0: the result is not rounded. Rows after the tokens
    are zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    is_given = cols < tl.where(row < tokens, SIZE, 0)
    await_kernels_before(EARLY)
    x = tl.load(x_ptr + row * SIZE + cols, mask=is_given, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * SIZE + cols, mask=is_given, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * SIZE + cols, x, mask=is_given)
    normed = _normed(x, weight, eps, SIZE, CENTERED)
    if GROUP:
        # A token that is one group has zeros after it, which leave its scale alone.
        WIDTH: tl.constexpr = BLOCK if GROUP == SIZE else GROUP
        groups = tl.reshape(normed.to(tl.float32), [BLOCK // WIDTH, WIDTH])
        elements, scales = round_groups(groups)
        tl.store(out_ptr + row * SIZE + cols, tl.reshape(elements, [BLOCK]), mask=inside)
        group = tl.arange(0, BLOCK // WIDTH)
        to = scales_ptr + group * tl.num_programs(0) + row
        tl.store(to, scales, mask=group < SIZE // GROUP)
    else:
        tl.store(out_ptr + row * SIZE + cols, normed, mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, is_centered: bool = False
) -> torch.Tensor:
    """Normalise contiguous `[num_tokens, size]` into a new tensor.

    Args:
        is_centered: If true, multiply by (1 + weight) in fp32, then round.
    """
    assert x.is_contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps, is_centered)
    return out


def add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    is_centered: bool = False,
) -> None:
    """`residual += x`, then `x = norm(residual)`: both contiguous `[num_tokens, size]`."""
    assert x.is_contiguous() and residual.is_contiguous()
    _launch(x, residual, weight, x, eps, is_centered)


def rounded_norm_(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: RoundedRows,
    is_centered: bool = False,
) -> None:
    """`residual += x`, then `out = norm(residual)`, rounded.

    Args:
        x: Contiguous `[num_tokens, size]`; None: nothing is added.
        residual: Contiguous `[num_tokens, size]`.
    """
    assert residual.is_contiguous() and (x is None or x.is_contiguous())
    given = residual if x is None else x
    _launch(given, None if x is None else residual, weight, out, eps, is_centered)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor | RoundedRows,
    eps: float,
    is_centered: bool,
) -> None:
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    tokens = x.numel() // size
    elements, scales, rows, group = out, out, tokens, 0
    if isinstance(out, RoundedRows):
        elements, scales, rows = out.elements, out.scales, len(out.elements)
        group = size // scales.shape[1]
    _rms_norm_kernel[(rows,)](
        x,
        residual if residual is not None else x,
        weight,
        elements,
        scales,
        tokens,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        CENTERED=is_centered,
        GROUP=group,
        num_warps=min(16, max(1, block // 512)),
        **early_start(x, most_rows=SEVERAL_ROWS, is_short=True),
    )


@triton.jit(do_not_specialize=["rows"])
def _summed_norm_kernel(
    memories: tl.tuple,
    flags: tl.tensor,
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
    EARLY: tl.constexpr,
) -> None:
    """Grid `(programs,)`: one program takes every `programs`-th token; BLOCK covers a token."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    # The kernel before this one has written this rank's partial sums: the peers may read them.
    await_kernels_before(EARLY)
    barrier(memories, flags, RANK, RANKS)
    dtype = residual_ptr.dtype.element_ty
    for row in range(program, rows, tl.num_programs(0)):
        places = tl.cast(row, tl.int64) * SIZE + cols
        x = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
        # Summed in the order of ranks, so that all get the same bits.
        for peer in tl.static_range(RANKS):
            memory = memories[peer] + offset
            # Declared as aligned; otherwise each number would be loaded separately.
            part = tl.multiple_of(memory.to(tl.pointer_type(dtype)), 16)
            x += tl.load(part + places, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(residual_ptr + places, rounded, mask=inside)
        normed = _normed(rounded, weight, eps, SIZE, CENTERED)
        tl.store(out_ptr + places, normed, mask=inside)


@triton.jit
def _numbers(words: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Unpack int32 words to fp32 numbers: two bf16 numbers, or one fp32 number, per word."""
    if HALF:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), [2 * words.shape[0]])
    else:
        numbers = words.to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _sent_norm_kernel(
    memories: tl.tuple,
    buffer: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_WORD: tl.constexpr,
    CENTERED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens,)`: a program sends this rank's partial sum of one token, and adds the
    peers'."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    at = tl.arange(0, BLOCK // PER_WORD)
    is_word = at < SIZE // PER_WORD
    numbers = sequence_numbers(memories, buffer, RANK, RANKS) + row
    part = (memories[RANK] + offset).to(tl.pointer_type(tl.int32))
    part = tl.multiple_of(part, 16) + row.to(tl.int64) * (SIZE // PER_WORD)
    await_kernels_before(EARLY)
    own = tl.load(part + at, mask=is_word, other=0)
    number = tl.load(numbers) + 1
    send(memories, buffer, number, row, own, at, is_word, RANK, RANKS)
    dtype = residual_ptr.dtype.element_ty
    places = row.to(tl.int64) * SIZE + cols
    x = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    # Summed in the order of ranks, so that all get the same bits.
    for peer in tl.static_range(RANKS):
        words = own
        if peer != RANK:
            words = receive(memories, buffer, number, row, at, is_word, peer, RANK, RANKS)
        x += _numbers(words, PER_WORD == 2)
    tl.store(numbers, number)
    rounded = x.to(dtype)
    tl.store(residual_ptr + places, rounded, mask=inside)
    normed = _normed(rounded, weight, eps, SIZE, CENTERED)
    tl.store(out_ptr + places, normed, mask=inside)


def add_parts_rms_norm_(
    peers: PeerParts, residual: torch.Tensor, weight: torch.Tensor, eps: float, is_centered: bool
) -> torch.Tensor:
    """Add the partial sums of all ranks to the residual, and return its norm, a new tensor.

    Args:
        peers: Memory of the partial sums, each of the shape and dtype of `residual`.
        residual: Contiguous `[num_tokens, size]`, overwritten; the same on all ranks.
        weight: `[size]`.
        is_centered: See `rms_norm`.
    """
    assert residual.is_contiguous() and residual.dtype in (torch.bfloat16, torch.float32)
    rows, size = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    per_word = 4 // residual.element_size()
    shape = {
        "RANK": peers.rank, "RANKS": peers.size, "SIZE": size, "BLOCK": block,
        "CENTERED": is_centered, "num_warps": min(16, max(1, block // 512)),
        **early_start(residual),
    }  # fmt: skip
    # Each 64-bit word of the buffer carries 32 bits of the row.
    is_short = size % per_word == 0 and size * 8 // per_word <= LOW_LATENCY_ROW_BYTES
    if rows <= LOW_LATENCY_ROWS and is_short:
        _sent_norm_kernel[(rows,)](
            peers.memories, peers.low_latency, residual, weight, out, peers.offset, eps,
            PER_WORD=per_word, **shape,
        )  # fmt: skip
        return out
    _summed_norm_kernel[(min(rows, MOST_PROGRAMS),)](
        peers.memories, peers.flags, residual, weight, out, rows, peers.offset, eps, **shape
    )
    return out
