"""Conv states of a delta-net layer: the last inputs of each channel's convolution."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

CONV_PARTS: Final = tl.constexpr(3)
"""Parts of a head's conv state: values, query, key. In decode steps a program writes one part; all
parts in turn would take three times as long."""


@triton.jit
def _inputs_before(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    at: tl.tensor,
    begin: tl.tensor,
    stride: tl.tensor,
    cols: tl.tensor,
    channels: tl.tensor,
    inside: tl.tensor,
    KERNEL: tl.constexpr,
) -> tl.tensor:
    """Inputs at `at`, `[channels, KERNEL - 1]`; those before `begin` are read from the state."""
    is_old = (at < begin)[None, :] & inside
    old = channels[:, None] * (KERNEL - 1) + (at - begin + KERNEL - 1)[None, :]
    kept = conv_ptr.dtype.element_ty
    got = tl.load(conv_ptr + old, mask=is_old, other=0.0)
    new = x_ptr + at[None, :] * stride + cols[:, None]
    seen = tl.load(new, mask=(at >= begin)[None, :] & inside, other=0.0).to(kept)
    return tl.where(is_old, got, seen)


@triton.jit
def _move_conv(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    first: tl.tensor,
    slot: tl.tensor,
    snapshot: tl.tensor,
    track_len: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    cols: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    TRACK: tl.constexpr,
) -> None:
    """Write the conv state of some channels after a request's tokens, and its snapshot's."""
    past = tl.arange(0, PAST)
    inside = is_channel[:, None] & (past < KERNEL - 1)[None, :]
    size = CHANNELS * (KERNEL - 1)
    before = conv_ptr + first * size
    to = channels[:, None] * (KERNEL - 1) + past[None, :]
    at = end - (KERNEL - 1) + past
    final = _inputs_before(x_ptr, before, at, begin, stride, cols, channels, inside, KERNEL)
    if TRACK:
        at = begin + track_len - (KERNEL - 1) + past
        inside_too = inside & (past * 0 + track_len > 0)[None, :]
        kept = _inputs_before(x_ptr, before, at, begin, stride, cols, channels, inside_too, KERNEL)
        tl.store(conv_ptr + snapshot * size + to, kept, mask=inside_too)
    # The whole state must be read before any of it is overwritten.
    tl.debug_barrier()
    tl.store(conv_ptr + slot * size + to, final, mask=inside)


@triton.jit
def keep_conv_states(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    head: tl.tensor,
    part: tl.tensor,
    first: tl.tensor,
    slot: tl.tensor,
    snapshot: tl.tensor,
    track_len: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    Q0: tl.constexpr,
    K0: tl.constexpr,
    V0: tl.constexpr,
    QK_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TRACK: tl.constexpr,
) -> None:
    """Write a request's conv states, after its tokens and of its snapshot: the channels of one
    value head (part 0), of the query (part 1) or of the key (part 2) of its key head. Queries and
    keys are written by the first value head of a key head."""
    key_head, nth = head // REPEATS, head % REPEATS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + KEY_HEADS * REPEATS * VALUE_DIM
    if part == 0:
        values = tl.arange(0, BLOCK_V)
        _move_conv(
            x_ptr, conv_ptr, first, slot, snapshot, track_len, begin, end, stride,
            V0 + key_head * V_STEP + nth * VALUE_DIM + values,
            2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values,
            values < VALUE_DIM, CHANNELS, KERNEL, PAST, TRACK,
        )  # fmt: skip
    elif nth == 0:
        keys = tl.arange(0, BLOCK_K)
        _move_conv(
            x_ptr, conv_ptr, first, slot, snapshot, track_len, begin, end, stride,
            tl.where(part == 1, Q0, K0) + key_head * QK_STEP + keys,
            ((part - 1) * KEY_HEADS + key_head) * KEY_DIM + keys,
            keys < KEY_DIM, CHANNELS, KERNEL, PAST, TRACK,
        )  # fmt: skip
