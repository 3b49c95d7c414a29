"""Keys of groups of tokens for an indexer, in one kernel; `layers/mla/pooled_indexer.py` has the
rule.

A program makes the key of one group of a request, of tokens of the step and of tokens that earlier
steps left in the pool of open groups. Or it leaves tokens of the step there. No launch depends on
lengths, so graphs can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import OpenedGroups, PooledKeyWeights
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start


@triton.jit
def _token_of_group(
    keys_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    opened: tl.tensor,
    at: tl.tensor,
    place: tl.tensor,
    is_new: tl.tensor,
    is_old: tl.tensor,
    norm: tl.tensor,
    norm_bias: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and gates `[places, BLOCK_D]` of a group: of new tokens at `at` of the step, whose keys
    are normalised here, and of old tokens by their places."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < DIM)[None, :]
    new, old = is_new[:, None] & is_dim, is_old[:, None] & is_dim
    of_step = at[:, None] * DIM + dims[None, :]
    key = tl.load(keys_ptr + of_step, mask=new, other=0.0)
    gate = tl.load(gates_ptr + of_step, mask=new, other=0.0)
    wide = key.to(tl.float32)
    mean = tl.sum(wide, axis=1) / DIM
    centred = tl.where(new, wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / DIM + eps)
    key = (centred * scale[:, None] * norm[None, :] + norm_bias[None, :]).to(key.dtype)
    own = opened + place[:, None] * (2 * DIM) + dims[None, :]
    key = tl.where(old, tl.load(own, mask=old, other=0.0), key)
    gate = tl.where(old, tl.load(own + DIM, mask=old, other=0.0), gate)
    return key, gate


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "slots_ptr", "bounds_ptr"])
def _pool_kernel(
    keys_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    norm_bias_ptr: tl.tensor,
    position_ptr: tl.tensor,
    opened_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    pooled_ptr: tl.tensor,
    eps: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUNDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(bs, groups)`: one program has one group of a request. The program of a request's first
    group also has the one that stays open, because it reads the tokens that this one overwrites.

    BOUNDS: `bounds_ptr` has the begin and end of each request's tokens; else each has one.
    """
    request = tl.program_id(0)
    nth = tl.program_id(1)
    place = tl.arange(0, BLOCK_R)
    is_place = place < RATIO
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    norm = tl.load(norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    norm_bias = tl.load(norm_bias_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    in_tile = is_place[:, None] & is_dim[None, :]
    await_kernels_before(EARLY)
    begin = request.to(tl.int64)
    end = begin + 1
    if BOUNDS:
        begin = tl.load(bounds_ptr + request)
        end = tl.load(bounds_ptr + request + 1)
    if begin >= end:
        return
    prefix = tl.load(positions_ptr + begin)
    total = prefix + end - begin
    opened = opened_ptr + tl.load(rows_ptr + request) * ((RATIO - 1) * 2 * DIM)
    group = prefix // RATIO + nth
    if (group + 1) * RATIO <= total:
        position = group * RATIO + place
        key, gate = _token_of_group(
            keys_ptr, gates_ptr, opened, begin + position - prefix, place,
            is_place & (position >= prefix), is_place & (position < prefix), norm, norm_bias, eps,
            DIM, BLOCK_D,
        )  # fmt: skip
        of_place = tl.load(
            position_ptr + place[:, None] * DIM + dims[None, :], mask=in_tile, other=0.0
        )
        score = tl.where(is_place[:, None], gate.to(tl.float32) + of_place, float("-inf"))
        weight = tl.exp(score - tl.max(score, axis=0)[None, :])
        pooled = tl.sum(weight * key.to(tl.float32), axis=0) / tl.sum(weight, axis=0)
        item = tl.load(slots_ptr + begin + (group + 1) * RATIO - 1 - prefix) // RATIO
        to = pooled_ptr + item * DIM + dims
        tl.store(to, pooled.to(pooled_ptr.dtype.element_ty), mask=is_dim)
    if nth == 0:
        # All threads have read the old tokens.
        tl.debug_barrier()
        position = total // RATIO * RATIO + place
        is_new = is_place & (position >= prefix) & (position < total)
        key, gate = _token_of_group(
            keys_ptr, gates_ptr, opened, begin + position - prefix, place, is_new, place < 0,
            norm, norm_bias, eps, DIM, BLOCK_D,
        )  # fmt: skip
        own = opened + place[:, None] * (2 * DIM) + dims[None, :]
        is_kept = is_new[:, None] & is_dim[None, :]
        tl.store(own, key, mask=is_kept)
        tl.store(own + DIM, gate, mask=is_kept)


def store_pooled_keys(
    keys: torch.Tensor,
    gates: torch.Tensor,
    weights: PooledKeyWeights,
    opened: OpenedGroups,
    positions: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor | None,
    most_new: int,
    pooled: torch.Tensor,
) -> None:
    """Store the keys of the groups that a step finishes, and the tokens of those that stay open.

    Args:
        keys: Contiguous `[num_tokens, dim]`, not yet normalised; `gates` likewise.
        opened: Read and overwritten.
        positions: int64 `[num_tokens]`.
        slots: int64 `[num_tokens]`: slots of the tokens; a group's last one divided by its size is
            its item.
        bounds: int64 `[bs + 1]`: begin and end of each request's tokens; None: each has one.
        most_new: Upper bound of the tokens of a request, which decides the launch.
        pooled: Contiguous `[items, dim]`, written.
    """
    ratio, dim = weights.position.shape
    assert keys.is_contiguous() and gates.is_contiguous() and pooled.is_contiguous()
    assert opened.tokens.is_contiguous() and opened.tokens.dtype == keys.dtype
    assert opened.tokens.shape[1:] == (ratio - 1, 2 * dim) and pooled.shape[1] == dim
    # Tokens of a step that begins within a group end in one group more.
    groups = 1 if bounds is None else triton.cdiv(most_new, ratio) + 1
    _pool_kernel[(len(opened.rows), groups)](
        keys, gates, weights.norm, weights.norm_bias, weights.position, opened.tokens, opened.rows,
        positions, slots, slots if bounds is None else bounds, pooled, weights.eps,
        RATIO=ratio, DIM=dim, BLOCK_R=triton.next_power_of_2(ratio),
        BLOCK_D=triton.next_power_of_2(dim), BOUNDS=bounds is not None, num_warps=4,
        **early_start(keys),
    )  # fmt: skip
