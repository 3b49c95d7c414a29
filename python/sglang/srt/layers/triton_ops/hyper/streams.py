"""Hyper-connections between two blocks, in two kernels; `layers/compressed/hyper_connection.py`
has the formulas.

1. `_join_kernel` adds the output of the block before to the streams, mixes them, and multiplies the
   new streams with the projection of the block behind. A program reads the same columns of all
   streams once; if there are few tokens, programs divide the columns. `_join_each_kernel` does the
   same for a token or two, without tensor cores.
2. `_split_kernel` adds up the products, and makes the weights and the normalised input of the block
   behind. Sinkhorn's steps, which only the next join needs, have programs of their own.
   Behind the last block, `_head_kernel` makes the input of the output head.

Streams are read twice and written once. Sums are in fp32; products have three parts in bf16 or
TF32, as exact as fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    EnteredBlock,
    StreamsJoin,
    StreamsSplit,
)
from sglang.srt.layers.triton_ops.early_start import (
    await_kernels_before,
    early_start,
)
from sglang.srt.layers.triton_ops.hyper.split import make_input, make_weights, output_at

PROGRAMS: Final = 1024
"""Programs of a join that fill the device."""
EACH: Final = 2
"""Up to this many tokens are joined apart."""
_EACH_COLUMNS: Final = 32
"""Columns of a program that joins all streams of a token there."""
FEW: Final = (256, (16, 64, 4))
"""Up to so many tokens have a join of these tokens, columns of each stream, and warps."""
MANY: Final = (64, 32, 4)
"""The same of more tokens."""


@triton.jit
def _multiplied(x: tl.tensor, fn: tl.tensor, products: tl.tensor) -> tl.tensor:
    """Add the products of streams `[tokens, columns]` and fp32 weights `[columns, outputs]`. Three
    numbers in bf16 are as exact as one in fp32."""
    if x.dtype == tl.bfloat16:
        # Else Triton computes the streams again for each product, in the layout of its operand.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        products = tl.dot(x, low, products)
        products = tl.dot(x, middle, products)
        return tl.dot(x, high, products)
    else:
        return tl.dot(x.to(tl.float32), fn, products, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens", "spans"])
def _join_kernel(
    streams_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    fn_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    tokens: tl.tensor,
    spans: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    JOIN: tl.constexpr,
    REST: tl.constexpr,
    SAME: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens / BLOCK_T, spans)`: one program joins all streams of some tokens in a span of
    columns, and multiplies them. Products are in the order of `totals_of`.

    JOIN: there is an output to add; REST: it has two parts. SAME: a token has one stream, which is
    stored as all of them. SPLIT: there is a block behind.
    """
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_C - 1) // BLOCK_C
    WEIGHTS: tl.constexpr = STREAMS + STREAMS * STREAMS
    begin = tl.program_id(0).to(tl.int64) * BLOCK_T
    # Offsets from the program's first token have 32 bits, which take fewer registers.
    token = tl.arange(0, BLOCK_T)
    is_token = token < tokens - begin
    streams_ptr += begin * ((1 if SAME else STREAMS) * HIDDEN)
    joined_ptr += begin * (STREAMS * HIDDEN)
    out_ptr += begin * HIDDEN
    rest_ptr += begin * HIDDEN
    within = tl.arange(0, BLOCK_C)
    outputs = tl.arange(0, BLOCK_O)
    fn_at = output_at(outputs, STREAMS)[None, :] * (STREAMS * HIDDEN) + within[:, None]
    each = (BLOCKS + spans - 1) // spans
    first = tl.program_id(1) * each
    await_kernels_before(EARLY)
    own = weights_ptr + begin * WEIGHTS + token * WEIGHTS
    factors = ()
    if JOIN:
        for place in tl.static_range(WEIGHTS):
            factors += (tl.load(own + place, mask=is_token, other=0.0),)  # type: ignore[assignment]
    products = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for block in range(first, tl.minimum(first + each, BLOCKS)):
        cols = block * BLOCK_C + within
        is_there = is_token[:, None] & (cols < HIDDEN)[None, :]
        of_out = token[:, None] * HIDDEN + cols[None, :]
        at = token[:, None] * (STREAMS * HIDDEN) + cols[None, :]
        is_weight = (cols < HIDDEN)[:, None] & (outputs <= OUTPUTS)[None, :]
        olds = ()
        if JOIN:
            added = tl.load(out_ptr + of_out, mask=is_there, other=0.0).to(tl.float32)
            if REST:
                added += tl.load(rest_ptr + of_out, mask=is_there, other=0.0).to(tl.float32)
            for source in tl.static_range(STREAMS):
                olds += (tl.load(streams_ptr + source * HIDDEN + at, mask=is_there, other=0.0),)  # type: ignore[assignment]
        elif SAME:
            rounded = tl.load(streams_ptr + of_out, mask=is_there, other=0.0)
        for stream in tl.static_range(STREAMS):
            if JOIN:
                new = added * factors[stream][:, None]
                for source in tl.static_range(STREAMS):
                    factor = factors[STREAMS + source * STREAMS + stream]  # type: ignore[var-annotated]
                    new += olds[source].to(tl.float32) * factor[:, None]
                rounded = new.to(joined_ptr.dtype.element_ty)
            elif not SAME:
                rounded = tl.load(streams_ptr + stream * HIDDEN + at, mask=is_there, other=0.0)
            if JOIN or SAME:
                tl.store(joined_ptr + stream * HIDDEN + at, rounded, mask=is_there)
            if SPLIT:
                wide = rounded.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                weights = fn_ptr + stream * HIDDEN + block * BLOCK_C + fn_at
                fn = tl.load(weights, mask=is_weight, other=0.0)
                products = _multiplied(rounded, fn, products)
    if SPLIT:
        products = tl.where(outputs[None, :] == STREAMS, squares[:, None], products)
        row = (begin + token) * spans + tl.program_id(1)
        to = parts_ptr + row[:, None] * BLOCK_O + outputs[None, :]
        tl.store(to, products, mask=is_token[:, None])


@triton.jit
def _join_each_kernel(
    streams_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    fn_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    JOIN: tl.constexpr,
    REST: tl.constexpr,
    SAME: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens, HIDDEN / BLOCK_C)`: one program joins some columns of all streams of a token,
    and multiplies them. Constants and results as of `_join_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < HIDDEN
    nth = tl.arange(0, BLOCK_S)
    is_stream = nth < STREAMS
    outputs = tl.arange(0, BLOCK_O)
    at = nth[:, None] * HIDDEN + cols[None, :]
    is_there = is_stream[:, None] & inside[None, :]
    if SPLIT:
        fn = tl.load(
            fn_ptr + output_at(outputs, STREAMS)[:, None, None] * (STREAMS * HIDDEN) + at[None],
            mask=(outputs <= OUTPUTS)[:, None, None] & is_there[None, :, :],
            other=0.0,
        )
    await_kernels_before(EARLY)
    of_token = row * STREAMS * HIDDEN
    if JOIN:
        own = weights_ptr + row * (STREAMS + STREAMS * STREAMS)
        added = tl.load(out_ptr + row * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
        if REST:
            rest = tl.load(rest_ptr + row * HIDDEN + cols, mask=inside, other=0.0)
            added += rest.to(tl.float32)
        new = tl.load(own + nth, mask=is_stream, other=0.0)[:, None] * added[None, :]
        for source in tl.static_range(STREAMS):
            factor = tl.load(own + STREAMS + source * STREAMS + nth, mask=is_stream, other=0.0)
            x = tl.load(streams_ptr + of_token + source * HIDDEN + cols, mask=inside, other=0.0)
            new += x.to(tl.float32)[None, :] * factor[:, None]
        rounded = new.to(joined_ptr.dtype.element_ty)
        tl.store(joined_ptr + of_token + at, rounded, mask=is_there)
    elif SAME:
        only = tl.load(streams_ptr + row * HIDDEN + cols, mask=inside, other=0.0)
        rounded = tl.where(is_there, only[None, :], 0.0)
        tl.store(joined_ptr + of_token + at, rounded, mask=is_there)
    else:
        rounded = tl.load(streams_ptr + of_token + at, mask=is_there, other=0.0)
    if SPLIT:
        wide = rounded.to(tl.float32)
        products = tl.sum(tl.sum(fn * wide[None, :, :], axis=2), axis=1)
        squares = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
        products = tl.where(outputs == STREAMS, squares, products)
        span = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(parts_ptr + span * BLOCK_O + outputs, products)


@triton.jit(do_not_specialize=["spans"])
def _split_kernel(
    streams_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    base_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    x_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    spans: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    input_eps: tl.tensor,
    STREAMS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPANS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(tokens, 2)`: one program makes a token's input of the block, another its weights of
    the output and of the streams."""
    row = tl.program_id(0).to(tl.int64)
    parts = parts_ptr + row * spans * BLOCK_O
    if tl.program_id(1) == 0:
        make_input(
            streams_ptr + row * (STREAMS * HIDDEN), parts, base_ptr, scale_ptr, norm_ptr,
            x_ptr + row * HIDDEN, spans, eps, norm_eps, input_eps, STREAMS, HIDDEN, BLOCK_S,
            BLOCK_H, BLOCK_O, SPANS, WIDE, EARLY,
        )  # fmt: skip
        cols = tl.arange(0, BLOCK_H)
        zeros = tl.zeros([BLOCK_H], zeros_ptr.dtype.element_ty)
        tl.store(zeros_ptr + row * HIDDEN + cols, zeros, mask=cols < HIDDEN)
    else:
        make_weights(
            parts, base_ptr, scale_ptr, weights_ptr + row * (STREAMS + STREAMS * STREAMS), spans,
            eps, norm_eps, STREAMS, HIDDEN, ITERATIONS, BLOCK_O, SPANS, EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["spans"])
def _head_kernel(
    streams_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    base_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    x_ptr: tl.tensor,
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
    """Grid `(tokens,)`: one program makes a token's only stream behind the last block."""
    row = tl.program_id(0).to(tl.int64)
    make_input(
        streams_ptr + row * (STREAMS * HIDDEN), parts_ptr + row * spans * BLOCK_O, base_ptr,
        scale_ptr, norm_ptr, x_ptr + row * HIDDEN, spans, eps, norm_eps, input_eps, STREAMS,
        HIDDEN, BLOCK_S, BLOCK_H, BLOCK_O, SPANS, WIDE, EARLY,
    )  # fmt: skip


def join_streams(streams: torch.Tensor, join: StreamsJoin) -> torch.Tensor:
    """The streams `[num_tokens, streams, hidden_size]` after a block; a new tensor."""
    joined, _, _ = _join(streams, join, None)
    return joined


def join_and_split(
    streams: torch.Tensor, join: StreamsJoin | None, split: StreamsSplit
) -> EnteredBlock:
    """Join the output of the block before, and make the input of the block behind.

    Args:
        streams: Contiguous `[num_tokens, streams, hidden_size]`; or `[num_tokens, hidden_size]` if
            all streams of a token are equal, without `join`.
        join: None: there is no block before, and the streams stay.
    """
    num_tokens, hidden = len(streams), streams.shape[-1]
    count = split.fn.shape[1] // hidden
    assert split.fn.shape == (2 * count + count * count, count * hidden)
    joined, parts, spans = _join(streams, join, split.fn)
    x, zeros = (streams.new_empty((num_tokens, hidden)) for _ in range(2))
    weights = torch.empty(
        (num_tokens, count + count * count), dtype=torch.float32, device=streams.device
    )
    _split_kernel[(num_tokens, 2)](
        joined, parts, split.base, split.scale, split.norm, x, zeros, weights, spans, split.eps,
        split.norm_eps, split.input_eps, ITERATIONS=split.iterations,
        **_sizes(joined, parts, split),
    )  # fmt: skip
    return EnteredBlock(joined, x, zeros, weights)


def join_into_one(
    streams: torch.Tensor, join: StreamsJoin | None, head: StreamsSplit
) -> torch.Tensor:
    """Join the output of the last block, and add the streams up.

    Args:
        streams: Contiguous `[num_tokens, streams, hidden_size]`.
        join: As in `join_and_split`.
        head: A weight for each stream, and the norm of the sum.

    Returns:
        `[num_tokens, hidden_size]`, normalised.
    """
    num_tokens, count, hidden = streams.shape
    assert head.fn.shape == (count, count * hidden)
    joined, parts, spans = _join(streams, join, head.fn)
    x = streams.new_empty((num_tokens, hidden))
    _head_kernel[(num_tokens,)](
        joined, parts, head.base, head.scale, head.norm, x, spans, head.eps, head.norm_eps,
        head.input_eps, **_sizes(streams, parts, head),
    )  # fmt: skip
    return x


def _sizes(streams: torch.Tensor, parts: torch.Tensor, split: StreamsSplit) -> dict[str, Any]:
    """Constants of the kernels behind `_join_kernel`."""
    _, count, hidden = streams.shape
    block = triton.next_power_of_2(hidden)
    return {
        "STREAMS": count,
        "HIDDEN": hidden,
        "BLOCK_S": triton.next_power_of_2(count),
        "BLOCK_H": block,
        "BLOCK_O": parts.shape[-1],
        "SPANS": triton.next_power_of_2(parts.shape[1]),
        "WIDE": split.is_wide,
        "num_warps": min(8, max(1, block // 1024)),
        **early_start(streams),
    }


def plan_join(num_tokens: int, hidden: int) -> tuple[tuple[int, int, int], int]:
    """Tokens and columns of a block of `_join_kernel`, its warps; and the spans of a token's
    columns. No span is empty."""
    most, launch = FEW
    tokens, columns, warps = launch if num_tokens <= most else MANY
    columns = min(columns, max(16, triton.next_power_of_2(hidden)))
    blocks = triton.cdiv(hidden, columns)
    wanted = max(1, PROGRAMS // triton.cdiv(num_tokens, tokens))
    spans = triton.cdiv(blocks, triton.cdiv(blocks, min(blocks, wanted)))
    return (tokens, columns, warps), spans


def _join(
    streams: torch.Tensor, join: StreamsJoin | None, fn: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The joined streams; fp32 `[num_tokens, spans, width]`, the products of each span of columns
    with `fn`; and the number of spans."""
    num_tokens, hidden = len(streams), streams.shape[-1]
    outputs, is_same = 0 if fn is None else len(fn), streams.dim() == 2
    assert streams.is_contiguous() and (fn is None or fn.is_contiguous())
    joined, parts = streams, streams
    if is_same:
        assert join is None and fn is not None
        joined = streams.new_empty((num_tokens, fn.shape[1] // hidden, hidden))
    elif join is not None:
        assert join.out.is_contiguous() and join.weights.is_contiguous()
        assert join.rest is None or join.rest.is_contiguous()
        joined = torch.empty_like(streams)
    count = joined.shape[1]
    width = max(16, triton.next_power_of_2(outputs + 1))
    is_each = num_tokens <= EACH
    (block_t, block_c, warps), spans = plan_join(num_tokens, hidden)
    if is_each:
        block_c, warps, spans = _EACH_COLUMNS, 4, triton.cdiv(hidden, _EACH_COLUMNS)
    if fn is not None:
        shape = num_tokens, spans, width
        parts = torch.empty(shape, dtype=torch.float32, device=streams.device)
    tensors = (
        streams,
        streams if join is None else join.out,
        streams if join is None or join.rest is None else join.rest,
        streams if join is None else join.weights,
        joined,
        streams if fn is None else fn,
        parts,
    )
    constants = {
        "STREAMS": count, "HIDDEN": hidden, "OUTPUTS": outputs, "BLOCK_O": width,
        "BLOCK_C": block_c, "JOIN": join is not None,
        "REST": join is not None and join.rest is not None, "SAME": is_same,
        "SPLIT": fn is not None, "num_warps": warps, **early_start(streams),
    }  # fmt: skip
    if is_each:
        _join_each_kernel[(num_tokens, spans)](
            *tensors, BLOCK_S=triton.next_power_of_2(count), **constants
        )
        return joined, parts, spans
    _join_kernel[(triton.cdiv(num_tokens, block_t), spans)](
        *tensors, num_tokens, spans, BLOCK_T=block_t, num_stages=2, **constants
    )
    return joined, parts, spans
