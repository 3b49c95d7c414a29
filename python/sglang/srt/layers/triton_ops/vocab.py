"""Kernels of a vocabulary that may be split over GPUs: lookup of embeddings, and argmax of logits.

The lookup gives this rank's rows, and zeros for other ranks' rows. Argmax takes two launches: the
first finds the greatest logit of each block of columns; the second takes the greatest of all, on
several ranks after a wait for the peers. torch's argmax takes 37 us for one row of 129,280 numbers.
A key packs logit and token into one integer: the greatest key has the greatest logit, and among
equal logits the first token.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.distributed.tensor_group import MOST_PROGRAMS, TensorGroup
from sglang.srt.layers.triton_ops.ordered import ordered
from sglang.srt.layers.triton_ops.peers import barrier

_COLUMNS: Final = 4096
"""Number of columns that one key covers."""


@triton.jit
def _look_up_kernel(
    ids_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(ids, size / BLOCK)`: one program copies BLOCK columns of one row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids_ptr + token) - begin
    # A vector, because Triton's interpreter takes no scalar masks.
    places = place + tl.zeros([BLOCK], tl.int64)
    is_here = (places >= 0) & (places < count) & (cols < SIZE)
    row = tl.load(weight_ptr + place * SIZE + cols, mask=is_here, other=0.0)
    tl.store(out_ptr + token * SIZE + cols, row, mask=cols < SIZE)


def look_up_share(ids: torch.Tensor, weight: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Look up a row for each id: a new tensor `[n, size]`.

    Args:
        ids: int64 `[n]`, dense: row indices in the whole table.
        weight: Contiguous `[at least count, size]`: rows `[begin, begin + count)` of the table.
    """
    assert weight.is_contiguous() and ids.stride(0) == 1
    size = weight.shape[1]
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    block = min(2048, triton.next_power_of_2(size))
    _look_up_kernel[(len(ids), triton.cdiv(size, block))](
        ids, weight, out, begin, count, SIZE=size, BLOCK=block, num_warps=4
    )
    return out


# One binary each, for any number of rows and any place of the keys.
@triton.jit(do_not_specialize_on_alignment=["keys_ptr"])
def _find_keys_kernel(
    logits_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    begin: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the greatest key of one block of a row's columns; BLOCK covers the block."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    cols = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < size, other=float("-inf"))
    order = tl.where(x != x, 0x7FFFFFFF, ordered(x))
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - (begin + cols)).to(tl.int64)
    tl.store(keys_ptr + row * tl.num_programs(1) + chunk, tl.max(keys, axis=0))


@triton.jit(do_not_specialize=["rows", "offset"])
def _join_keys_kernel(
    memories: tl.tuple,
    flags: tl.tensor,
    tokens_ptr: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    count: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Take the greatest key of each row over all ranks; BLOCK covers one rank's keys of a row."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    barrier(memories, flags, RANK, RANKS)
    for row in range(program, rows, tl.num_programs(0)):
        best = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
        for peer in tl.static_range(RANKS):
            keys_ptr = (memories[peer] + offset).to(tl.pointer_type(tl.int64))
            keys = tl.load(
                keys_ptr + row * count + cols, mask=cols < count, other=-0x7FFFFFFFFFFFFFFF
            )
            best = tl.maximum(best, keys)
        key = tl.max(best, axis=0)
        tl.store(tokens_ptr + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))


@triton.jit
def _join_own_keys_kernel(
    keys_ptr: tl.tensor, tokens_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Take the greatest of a row's keys; BLOCK covers them."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < count
    keys = tl.load(keys_ptr + row * count + cols, mask=inside, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(tokens_ptr + row, 0x7FFFFFFF - (tl.max(keys, axis=0) & 0x7FFFFFFF))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """`VocabLogits.argmax` of a single rank: fp32 `[n, size]` with dense rows to int64 `[n]`."""
    rows, size = logits.shape
    count = triton.cdiv(size, _COLUMNS)
    assert logits.stride(1) == 1
    keys, found = (
        torch.empty(shape, dtype=torch.int64, device=logits.device)
        for shape in ((rows, count), rows)
    )
    _find_keys_kernel[(rows, count)](
        logits, keys, logits.stride(0), size, 0, BLOCK=_COLUMNS, num_warps=8
    )
    _join_own_keys_kernel[(rows,)](
        keys, found, count, BLOCK=triton.next_power_of_2(count), num_warps=1
    )
    return found


def argmax_of_ranks(
    part: torch.Tensor, begin: int, size: int, group: TensorGroup
) -> torch.Tensor | None:
    """`VocabLogits.argmax`, int64 `[n]`; None: the ranks share no memory for the keys.

    Args:
        part: fp32 `[n, width]`, dense rows.
        begin: Token of the first column.
        size: Number of columns that are tokens.
    """
    rows, width = part.shape
    count = triton.cdiv(width, _COLUMNS)
    shared = group.shared_keys(rows * count)
    if shared is None:
        return None
    keys, peers = shared
    assert part.stride(1) == 1
    _find_keys_kernel[(rows, count)](
        part, keys, part.stride(0), size, begin, BLOCK=_COLUMNS, num_warps=8
    )
    found = torch.empty(rows, dtype=torch.int64, device=part.device)
    _join_keys_kernel[(min(rows, MOST_PROGRAMS),)](
        peers.memories,
        peers.flags,
        found,
        rows,
        peers.offset,
        count,
        RANK=peers.rank,
        RANKS=peers.size,
        BLOCK=triton.next_power_of_2(count),
        num_warps=1,
    )
    return found
