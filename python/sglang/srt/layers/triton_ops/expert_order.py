"""Uses of experts in the order of the experts, cut into tiles, without a sort.

A use is a token's choice of one expert. Uses are numbered like the ids: `token * top_k + place`. A
tile is up to `tile_rows` uses of one expert, which a program multiplies with the same weights.

The order within an expert may differ from run to run. No result depends on it: a row's product is
the same in every row of every tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 1024
"""Uses that a program orders at a time."""
_FEW_USES: Final = 4096
"""Up to here, one program that orders all uses is faster than three launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Ordered uses, and their tiles: int32 on the device."""

    order: torch.Tensor
    """`[num_uses]`: uses in the order of the experts."""
    table: torch.Tensor
    """`[bound, 3]`: expert of each tile, begin in `order`, number of uses; only `count` are set."""
    count: torch.Tensor
    """`[1]`: number of tiles."""
    top_k: int
    rows: int
    """Most uses of a tile."""

    @property
    def bound(self) -> int:
        """Most tiles that this number of uses and experts can have."""
        return len(self.table)


@triton.jit
def _rank(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    begin: tl.tensor,
    total: tl.tensor,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Give BLOCK uses their numbers among the uses of the same expert, and count them. OTHERS: uses
    of experts from EXPERTS on are left out."""
    uses = begin + tl.arange(0, BLOCK)
    is_use = uses < total
    experts = tl.load(ids_ptr + uses, mask=is_use, other=0)
    if OTHERS:
        is_use &= experts < EXPERTS
    ones = tl.full([BLOCK], 1, tl.int32)
    ranks = tl.atomic_add(counts_ptr + experts, ones, mask=is_use)
    tl.store(ranks_ptr + uses, ranks, mask=is_use)


@triton.jit(do_not_specialize=["tile_bits"])
def _lay_out(
    counts_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    count_ptr: tl.tensor,
    tile_bits: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Store where each expert's uses and tiles begin, and the number of tiles. Also a kernel by
    itself, of grid `(1)`.

    `tile_bits`, here and below: a tile has at most `1 << tile_bits` uses. It is no constant, so
    that numbers of tokens do not select a kernel.
    """
    experts = tl.arange(0, BLOCK_E)
    inside = experts < EXPERTS
    # Counts come from atomics, which leave the L1 cache as it was.
    counts = tl.load(counts_ptr + experts, mask=inside, other=0, cache_modifier=".cg")
    tiles = (counts + (1 << tile_bits) - 1) >> tile_bits
    tl.store(begins_ptr + experts, tl.cumsum(counts, axis=0) - counts, mask=inside)
    tl.store(tiles_ptr + experts, tl.cumsum(tiles, axis=0) - tiles, mask=inside)
    tl.store(count_ptr, tl.sum(tiles, axis=0))


@triton.jit
def _put(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    begin: tl.tensor,
    total: tl.tensor,
    tile_bits: tl.tensor,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Put BLOCK uses into the order. The first use of each tile enters the tile in the table."""
    uses = begin + tl.arange(0, BLOCK)
    is_use = uses < total
    experts = tl.load(ids_ptr + uses, mask=is_use, other=0)
    if OTHERS:
        is_use &= experts < EXPERTS
    ranks = tl.load(ranks_ptr + uses, mask=is_use, other=1)
    count = tl.load(counts_ptr + experts, mask=is_use, other=0, cache_modifier=".cg")
    at = tl.load(begins_ptr + experts, mask=is_use, other=0) + ranks
    tile = tl.load(tiles_ptr + experts, mask=is_use, other=0) + (ranks >> tile_bits)
    tl.store(order_ptr + at, uses, mask=is_use)
    is_first = is_use & ((ranks >> tile_bits) << tile_bits == ranks)
    tl.store(table_ptr + tile * 3, experts.to(tl.int32), mask=is_first)
    tl.store(table_ptr + tile * 3 + 1, at, mask=is_first)
    tl.store(table_ptr + tile * 3 + 2, tl.minimum(count - ranks, 1 << tile_bits), mask=is_first)


@triton.jit(do_not_specialize=["total", "tile_bits"])
def _order_few_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    total: tl.tensor,
    tile_bits: tl.tensor,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The three steps in one program."""
    experts = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + experts, tl.zeros([BLOCK_E], tl.int32), mask=experts < EXPERTS)
    tl.debug_barrier()
    for begin in range(0, total, BLOCK):
        _rank(ids_ptr, counts_ptr, ranks_ptr, begin, total, EXPERTS, OTHERS, BLOCK)
    tl.debug_barrier()
    _lay_out(counts_ptr, begins_ptr, tiles_ptr, count_ptr, tile_bits, EXPERTS, BLOCK_E)
    tl.debug_barrier()
    for begin in range(0, total, BLOCK):
        _put(
            ids_ptr, counts_ptr, ranks_ptr, begins_ptr, tiles_ptr, order_ptr, table_ptr, begin,
            total, tile_bits, EXPERTS, OTHERS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total"])
def _rank_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    total: tl.tensor,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(uses / BLOCK)`; see `_rank`."""
    begin = tl.program_id(0) * BLOCK
    _rank(ids_ptr, counts_ptr, ranks_ptr, begin, total, EXPERTS, OTHERS, BLOCK)


@triton.jit(do_not_specialize=["total", "tile_bits"])
def _put_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    total: tl.tensor,
    tile_bits: tl.tensor,
    EXPERTS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(uses / BLOCK)`; see `_put`."""
    begin = tl.program_id(0) * BLOCK
    _put(
        ids_ptr, counts_ptr, ranks_ptr, begins_ptr, tiles_ptr, order_ptr, table_ptr, begin, total,
        tile_bits, EXPERTS, OTHERS, BLOCK,
    )  # fmt: skip


def most_tiles(uses: int, num_experts: int, tile_rows: int) -> int:
    """Most tiles that so many uses can have: each expert that is used has one, and one more for
    each `tile_rows` further uses."""
    used = min(uses, num_experts)
    return used + (uses - used) // tile_rows


def order_by_expert(
    ids: torch.Tensor, num_experts: int, tile_rows: int, *, has_others: bool = False
) -> ExpertTiles:
    """Order the uses of experts, and cut them into tiles, without reading back to the CPU.

    Args:
        ids: Contiguous `[num_tokens, top_k]`, any integer dtype, from 0.
        num_experts: Experts of this rank.
        tile_rows: Most uses of a tile, a power of two.
        has_others: True if some ids are `num_experts` or more: their uses are in no tile.
    """
    assert ids.is_contiguous()
    total, tile_bits = ids.numel(), tile_rows.bit_length() - 1
    assert tile_rows == 1 << tile_bits
    bound = most_tiles(total, num_experts, tile_rows)
    # Separate tensors, because kernels are compiled again for pointers that are not aligned.
    ranks, order, counts, begins, tiles, table, count = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (total, total, num_experts, num_experts, num_experts, (bound, 3), 1)
    )
    block_e = triton.next_power_of_2(num_experts)
    if total <= _FEW_USES:
        _order_few_kernel[(1,)](
            ids, counts, ranks, begins, tiles, order, table, count, total, tile_bits,
            EXPERTS=num_experts, OTHERS=has_others, BLOCK_E=block_e, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    else:
        counts.zero_()
        grid = (triton.cdiv(total, _BLOCK),)
        _rank_kernel[grid](
            ids, counts, ranks, total,
            EXPERTS=num_experts, OTHERS=has_others, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        _lay_out[(1,)](
            counts, begins, tiles, count, tile_bits,
            EXPERTS=num_experts, BLOCK_E=block_e, num_warps=4,
        )  # fmt: skip
        _put_kernel[grid](
            ids, counts, ranks, begins, tiles, order, table, total, tile_bits,
            EXPERTS=num_experts, OTHERS=has_others, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return ExpertTiles(order=order, table=table, count=count, top_k=ids.shape[1], rows=tile_rows)
