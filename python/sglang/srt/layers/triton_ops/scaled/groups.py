"""fp8 products on tensor cores, as parts of kernels: each group of inputs has a sum of its own,
which the scales of both operands multiply in fp32.

Tokens that fill the rows of tensor cores are the left operand (LEFT): a thread then needs the
scales of two of them, and not of sixteen. Fewer tokens are the right operand, because weights have
rows enough.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

ROWS_OF_LEFT: Final = tl.constexpr(64)
"""Rows of the left operand that tensor cores multiply at once."""


@triton.jit
def by_output(values: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """Values of outputs, over a tile. LEFT: tokens are its rows."""
    return values[None, :] if LEFT else values[:, None]


@triton.jit
def by_token(values: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    """Values of tokens, over a tile. LEFT: tokens are its rows."""
    return values[:, None] if LEFT else values[None, :]


@triton.jit
def load_scales(
    x_scales_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    used: tl.tensor,
    block: tl.tensor,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tuple:
    """For each of DEPTH groups of inputs, from `first` on: the scales of tokens and of outputs. The
    last of GROUPS stands for those after it. Empty if all inputs are one group.

    A kernel loads the scales a step before it needs them: unlike the operands of tensor cores, the
    compiler does not load them ahead.

    Args:
        x_scales_ptr: fp32 `[GROUPS, tokens]`.
        scales_ptr: fp32 `[blocks, GROUPS]`.
        rows: The tokens, of which those that are not `used` have scale 0.
        block: The block of each output, or the one of all.
    """
    both: tl.tuple = ()
    for n in tl.static_range(DEPTH if GROUPS > 1 else 0):
        group = tl.minimum(first + n, GROUPS - 1)
        x_scales = tl.load(x_scales_ptr + group * tokens + rows, mask=used, other=0.0)
        both += ((x_scales, tl.load(scales_ptr + block * GROUPS + group)),)
    return both


@triton.jit
def add_products_(
    acc: tl.tensor,
    parts: tl.tuple,
    scales: tl.tuple,
    GROUPS: tl.constexpr,
    ONE: tl.constexpr,
    LEFT: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Add the products of DEPTH pairs of weights `[outputs, inputs]` and tokens `[tokens, inputs]`.

    Args:
        scales: From `load_scales`. If all inputs are one group, its scales multiply the total.
        ONE: All outputs share a scale.
    """
    sums: tl.tuple = ()
    for n in tl.static_range(DEPTH):
        weights, x = parts[n]
        sums += (tl.dot(x, weights.T) if LEFT else tl.dot(weights, x.T),)
    for n in tl.static_range(DEPTH):
        if GROUPS == 1:
            acc += sums[n]
        elif ONE:
            x_scales, scale = scales[n]
            acc += sums[n] * by_token(x_scales * scale, LEFT)
        else:
            x_scales, scale = scales[n]
            acc += sums[n] * (by_output(scale, LEFT) * by_token(x_scales, LEFT))
    return acc


def shared_memory_of(rows: int, inputs: int) -> int:
    """Bytes of shared memory of a program that has so many inputs of `rows` rows on their way, with
    the KiB that each program takes."""
    return rows * inputs + 1024
