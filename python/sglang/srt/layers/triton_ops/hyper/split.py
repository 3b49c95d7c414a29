"""A block's input and the weights of its streams, from a token's products: parts of the kernels in
`streams.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before
from sglang.srt.layers.triton_ops.norm import normed_row


@triton.jit
def output_at(column: tl.tensor, STREAMS: tl.constexpr) -> tl.tensor:
    """The output whose products are in a column; see `totals_of`."""
    return column - (column > STREAMS).to(tl.int32)


@triton.jit
def totals_of(
    parts: tl.tensor, spans: tl.tensor, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    SPANS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A token's first products `[FIRST]`, summed over the spans: those of the weights of the
    input, the sum of squares, and those of the other weights."""
    span = tl.arange(0, SPANS)[:, None]
    at = parts + span * WIDTH + tl.arange(0, FIRST)[None, :]
    return tl.sum(tl.load(at, mask=span < spans, other=0.0), axis=0)


@triton.jit
def _scalar(totals: tl.tensor, nth: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, totals.shape[0]) == nth, totals, 0.0), axis=0)


@triton.jit
def make_input(
    streams: tl.tensor,
    parts: tl.tensor,
    base_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    x: tl.tensor,
    spans: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    input_eps: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPANS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store the sum of a token's streams, weighted by the first outputs, and normalised."""
    cols = tl.arange(0, BLOCK_H)
    inside = cols < HIDDEN
    norm = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bases: tl.tuple = ()
    for stream in tl.static_range(STREAMS):
        bases += (tl.load(base_ptr + stream),)
    factor = tl.load(scale_ptr)
    await_kernels_before(EARLY)
    # No load waits for another's result.
    values: tl.tuple = ()
    for stream in tl.static_range(STREAMS):
        values += (tl.load(streams + stream * HIDDEN + cols, mask=inside, other=0.0),)
    totals = totals_of(parts, spans, 2 * BLOCK_S, BLOCK_O, SPANS)
    factor *= tl.rsqrt(_scalar(totals, STREAMS) / (STREAMS * HIDDEN) + norm_eps)
    acc = tl.zeros([BLOCK_H], tl.float32)
    for stream in tl.static_range(STREAMS):
        into = 1.0 / (1.0 + tl.exp(-(bases[stream] + _scalar(totals, stream) * factor))) + eps
        acc += values[stream].to(tl.float32) * into
    rounded = acc.to(x.dtype.element_ty)
    tl.store(x + cols, normed_row(rounded, norm, input_eps, HIDDEN, WIDE), inside)


@triton.jit
def _divided(
    mix: tl.tuple, eps: tl.tensor, STREAMS: tl.constexpr, BY_ROWS: tl.constexpr
) -> tl.tuple:
    """A matrix, row by row, whose rows or columns are divided by their sums."""
    factors: tl.tuple = ()
    for line in tl.static_range(STREAMS):
        # Two sums, so that an addition waits for fewer others.
        even, odd = mix[line * STREAMS if BY_ROWS else line], eps
        for nth in tl.static_range(1, STREAMS):
            one = mix[line * STREAMS + nth if BY_ROWS else nth * STREAMS + line]
            if nth % 2 == 0:
                even += one
            else:
                odd += one
        # A division takes six more instructions, for numbers near the ends of the range.
        root = tl.rsqrt(even + odd)
        factors += (root * root,)
    divided: tl.tuple = ()
    for place in tl.static_range(STREAMS * STREAMS):
        divided += (mix[place] * factors[place // STREAMS if BY_ROWS else place % STREAMS],)
    return divided


@triton.jit
def make_weights(
    parts: tl.tensor,
    base_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    weights: tl.tensor,
    spans: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPANS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store a token's weights of the output and of the streams.

    Every thread computes all of them, without data of others: an exchange of numbers takes longer
    than all other instructions of one of Sinkhorn's steps.
    """
    OUTPUTS: tl.constexpr = STREAMS + STREAMS * STREAMS
    bases: tl.tuple = ()
    for nth in tl.static_range(OUTPUTS):
        bases += (tl.load(base_ptr + STREAMS + nth),)
    out_factor = tl.load(scale_ptr + 1)
    mix_factor = tl.load(scale_ptr + 2)
    await_kernels_before(EARLY)
    totals = totals_of(parts, spans, BLOCK_O, BLOCK_O, SPANS)
    shrink = tl.rsqrt(_scalar(totals, STREAMS) / (STREAMS * HIDDEN) + norm_eps)
    out_factor *= shrink
    mix_factor *= shrink
    for nth in tl.static_range(STREAMS):
        logit = bases[nth] + _scalar(totals, STREAMS + 1 + nth) * out_factor
        tl.store(weights + nth, 2.0 / (1.0 + tl.exp(-logit)))
    mix: tl.tuple = ()
    for row in tl.static_range(STREAMS):
        logits: tl.tuple = ()
        peak = float("-inf")
        for nth in tl.static_range(STREAMS):
            product = _scalar(totals, 1 + (2 + row) * STREAMS + nth)
            logits += (bases[(1 + row) * STREAMS + nth] + product * mix_factor,)
            peak = tl.maximum(peak, logits[nth])
        mass = 0.0
        for nth in tl.static_range(STREAMS):
            mass += tl.exp(logits[nth] - peak)
        for nth in tl.static_range(STREAMS):
            mix += (tl.exp(logits[nth] - peak) / mass + eps,)
    mix = _divided(mix, eps, STREAMS, False)
    for _ in range(ITERATIONS - 1):
        mix = _divided(_divided(mix, eps, STREAMS, True), eps, STREAMS, False)
    for place in tl.static_range(STREAMS * STREAMS):
        tl.store(weights + STREAMS + place, mix[place])
