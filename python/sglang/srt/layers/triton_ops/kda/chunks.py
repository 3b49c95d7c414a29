"""Kimi Delta Attention (KDA) of many tokens, in chunks, in eight kernels.

The chunks of `chunked_delta_net.py`, with a decay for each channel of a key. The decay between two
tokens differs by channel, so it cannot be multiplied to their product. A product of matrices needs
a factor on either side: a third token between the two divides the decay into one until it, and one
from it on. Both factors are at most 1, so strong decays do not overflow. A chunk is halved again
and again: of two tokens, the later one lies in the second half of some part of the chunk and the
earlier one in the first, and the token in the middle divides their decay.

1. `chunked_convolution.py`: convolution and SiLU; queries and keys are normalised.
2. `_gates_kernel`: the decay since the beginning of each chunk.
3. `_products_kernel`: products of queries and keys with the keys before, with the decay between.
4. `chunked_delta_net.py`: the inverse of each chunk's system.
5. `_solve_kernel`: what the systems give; decays of queries and keys.
6. `_advance_kernel`: the states, chunk after chunk, and the snapshots.
7. `_output_kernel`: the outputs of all chunks, with the gated norm.
8. `chunked_convolution.py`: the convolution's states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    DeltaChunks,
    DeltaLayout,
    DeltaStates,
    KdaProjected,
)
from sglang.srt.layers.triton_ops.chunked_convolution import (
    INDICES,
    chunk_of_program,
    clear_padding,
    convolve_chunks,
    keep_convolution,
    span_of,
)
from sglang.srt.layers.triton_ops.chunked_delta_net import invert
from sglang.srt.layers.triton_ops.kda.tokens import log_decay

_VALUES_OF_A_STATE = 32
"""Values of a head that one program moves on. Fewer fill the device with a single request."""


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _gates_kernel(
    decay_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BOUND: tl.constexpr,
) -> None:
    """Sum up the logs of one head's decays over a chunk."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    tokens = begin + tl.arange(0, CHUNK)
    is_token = (tokens < end)[:, None]
    dims = tl.arange(0, DIM)
    at = (tokens[:, None] * HEADS + head) * DIM + dims[None, :]
    a = tl.load(decay_ptr + at, mask=is_token, other=0.0).to(tl.float32)
    step = a + tl.load(dt_bias_ptr + head * DIM + dims)[None, :]
    rate = tl.exp(tl.load(a_log_ptr + head))
    total = tl.cumsum(tl.where(is_token, log_decay(step, rate, BOUND), 0.0), axis=0)
    tl.store(totals_ptr + at, total, mask=is_token)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _products_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    system_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    stride: tl.tensor,
    B0: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Multiply a chunk's keys and queries with its keys: `system`, with the rows' strengths, and
    `scores`, both `[num_tokens, heads, CHUNK]`."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    rows = tl.arange(0, CHUNK)
    tokens = begin + rows
    is_token = tokens < end
    dtype = k_ptr.dtype.element_ty
    # Rows and columns that first differ in this bit lie in halves that the same level multiplies.
    bits = tl.where(rows[:, None] > rows[None, :], rows[:, None] ^ rows[None, :], 0)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    own_scores = tl.zeros([CHUNK], tl.float32)
    for d0 in range(0, DIM, BLOCK_D):
        dims = head * DIM + d0 + tl.arange(0, BLOCK_D)
        at = tokens[:, None] * (HEADS * DIM) + dims[None, :]
        total = tl.load(totals_ptr + at, mask=is_token[:, None], other=0.0)
        k = tl.load(k_ptr + at, mask=is_token[:, None], other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at, mask=is_token[:, None], other=0.0).to(tl.float32)
        own_scores += tl.sum(q * k, axis=1)
        for level in range(LEVELS):
            # Without a middle, the second half is empty.
            middle = begin + (((rows >> level) | 1) << level)
            at = middle[:, None] * (HEADS * DIM) + dims[None, :]
            between = tl.load(totals_ptr + at, mask=(middle < end)[:, None], other=0.0)
            # Of the second half, decays since the middle; of the first half, until the middle.
            decay = tl.exp(-tl.abs(total - between))
            k_decayed = (k * decay).to(dtype)
            before = tl.trans(k_decayed)
            is_pair = bits >> level == 1
            product = tl.dot(k_decayed, before, input_precision="ieee")
            system += tl.where(is_pair, product, 0.0)
            score = tl.dot((q * decay).to(dtype), before, input_precision="ieee")
            scores += tl.where(is_pair, score, 0.0)
    scores = tl.where(rows[:, None] == rows[None, :], own_scores[:, None], scores)
    b = tl.load(x_ptr + tokens * stride + B0 + head, mask=is_token, other=0.0).to(tl.float32)
    system *= (1.0 / (1.0 + tl.exp(-b)))[:, None]
    to = (tokens[:, None] * HEADS + head) * CHUNK + rows[None, :]
    tl.store(system_ptr + to, system, mask=is_token[:, None])
    tl.store(scores_ptr + to, scores.to(dtype), mask=is_token[:, None])


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _solve_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    stride: tl.tensor,
    B0: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Solve one chunk of one head, as in `chunked_delta_net.py`. Queries get the decay since the
    chunk's beginning, keys the decay until its end; `decays` is that of the whole chunk."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    rows = tl.arange(0, CHUNK)
    tokens = begin + rows
    is_token = tokens < end
    b = tl.load(x_ptr + tokens * stride + B0 + head, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    is_past = is_token[:, None] & (rows[:, None] >= rows[None, :])
    to = (tokens[:, None] * HEADS + head) * CHUNK + rows[None, :]
    inverse = tl.load(inverse_ptr + to, mask=is_past, other=0.0)
    dtype = v_ptr.dtype.element_ty
    factors = (inverse * beta[None, :]).to(dtype)
    mask = is_token[:, None]
    chunk = tl.program_id(1).to(tl.int64)
    for d0 in range(0, DIM, BLOCK_D):
        dims = head * DIM + d0 + tl.arange(0, BLOCK_D)
        at = tokens[:, None] * (HEADS * DIM) + dims[None, :]
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        corrections = tl.dot(factors, v, input_precision="ieee")
        tl.store(v_ptr + at, corrections.to(dtype), mask=mask)
        total = tl.load(totals_ptr + at, mask=mask, other=0.0)
        since = tl.exp(total)
        k = tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32)
        reads = tl.dot(factors, (k * since).to(dtype), input_precision="ieee")
        tl.store(reads_ptr + at, reads.to(dtype), mask=mask)
        last = tl.load(totals_ptr + (end - 1) * (HEADS * DIM) + dims)
        tl.store(k_ptr + at, (k * tl.exp(last[None, :] - total)).to(dtype), mask=mask)
        q = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + at, (q * since).to(dtype), mask=mask)
        tl.store(decays_ptr + chunk * (HEADS * DIM) + dims, tl.exp(last))


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _advance_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    before_ptr: tl.tensor,
    temporal_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Move some values of one head's state over a request's chunks; see `chunked_delta_net.py`."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.load(firsts_ptr + request)
    count = tl.load(firsts_ptr + request + 1) - first
    keys = tl.arange(0, DIM)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    size: tl.constexpr = HEADS * DIM * DIM
    place = head * DIM * DIM + keys[:, None] * DIM + values[None, :]
    slots = temporal_ptr + place
    state = tl.load(slots + tl.load(read_ptr + request) * size).to(tl.float32)
    kept = temporal_ptr.dtype.element_ty
    dtype = k_ptr.dtype.element_ty
    track_len = tl.load(track_lens_ptr + request)
    for nth in range(count):
        start, begin, end = span_of(bounds_ptr, track_lens_ptr, request, nth, CHUNK)
        tokens = begin + tl.arange(0, CHUNK)
        is_token = tokens < end
        rounded = state.to(dtype)
        tl.store(before_ptr + (first + nth) * size + place, rounded)
        at = (tokens[:, None] * HEADS + head) * DIM
        mask = is_token[:, None]
        reads = tl.load(reads_ptr + at + keys[None, :], mask=mask, other=0.0)
        corrections = v_ptr + at + values[None, :]
        known = tl.load(corrections, mask=mask, other=0.0).to(tl.float32)
        known -= tl.dot(reads, rounded, input_precision="ieee")
        tl.store(corrections, known.to(dtype), mask=mask)
        at = (tokens[None, :] * HEADS + head) * DIM + keys[:, None]
        k = tl.load(k_ptr + at, mask=is_token[None, :], other=0.0)
        decay = tl.load(decays_ptr + ((first + nth) * HEADS + head) * DIM + keys)
        state = state * decay[:, None] + tl.dot(k, known.to(dtype), input_precision="ieee")
        if end - start == track_len:
            snapshot = tl.load(track_ptr + request) * size
            tl.store(slots + snapshot, state.to(kept))
            # Later tokens continue from the snapshot as stored.
            state = state.to(kept).to(tl.float32)
    tl.store(slots + tl.load(write_ptr + request) * size, state.to(kept))


@triton.jit(do_not_specialize=["num_tokens", "requests"], do_not_specialize_on_alignment=INDICES)
def _output_kernel(
    gate_ptr: tl.tensor,
    q_ptr: tl.tensor,
    v_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    before_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    requests: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute one head's outputs of a chunk, normalise and gate them; outputs of padding are 0."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    rows = tl.arange(0, CHUNK)
    dims = tl.arange(0, DIM)
    tokens = begin + rows
    cols = head * DIM + dims
    clear_padding(out_ptr, bounds_ptr, requests, tokens, num_tokens, cols, dims < DIM, HEADS * DIM)
    if begin >= end:
        return
    is_token = (tokens < end)[:, None]
    at = (tokens[:, None] * HEADS + head) * DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=is_token, other=0.0)
    chunk = tl.program_id(1).to(tl.int64)
    state = tl.load(
        before_ptr + ((chunk * HEADS + head) * DIM + dims[:, None]) * DIM + dims[None, :]
    )
    out = tl.dot(q, state, input_precision="ieee")
    to = (tokens[:, None] * HEADS + head) * CHUNK + rows[None, :]
    scores = tl.load(scores_ptr + to, mask=is_token, other=0.0)
    corrections = tl.load(v_ptr + at, mask=is_token, other=0.0)
    out += tl.dot(scores, corrections, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(out * out, axis=1) / DIM + eps)
    weight = tl.load(norm_ptr + dims).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=is_token, other=0.0)
    normed = out * scale[:, None] * weight[None, :] / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(out_ptr + at, normed.to(gate.dtype), mask=is_token)


def attend_kda_in_chunks(
    x: KdaProjected,
    layout: DeltaLayout,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    states: DeltaStates,
    chunks: DeltaChunks,
    *,
    decay_bound: float | None = None,
) -> torch.Tensor:
    """Like `attend_kda`, for prefills of many tokens.

    Temporary memory, in bytes a token and head: `2 * key_dim * value_dim / chunk` for the states
    before the chunks, `4 * key_dim` for decays, `6 * chunk` for products, `8 * key_dim` for
    queries, keys, values and reads.

    Args:
        layout: Its `key_dim` is one of `TILE_DIMS`.
        gates: See `attend_kda`, for `norm` and `decay_bound` too.
        states: Must have `bounds` and `track_lens`. Read and overwritten.

    Returns:
        `[num_tokens, num_heads * value_dim]` of the dtype of `x`; zeros after the tokens of all
        requests.
    """
    columns, decay, gate = x
    num_tokens, num_chunks, requests = len(columns), len(chunks.requests), len(states.slots)
    conv_weight, a_log, dt_bias = gates
    weight, eps = norm
    heads, dim, size = layout.key_heads, layout.key_dim, chunks.size
    bounds, track_lens = states.bounds, states.track_lens
    assert columns.stride(1) == 1 and conv_weight.is_contiguous()
    assert decay.is_contiguous() and gate.is_contiguous()
    assert bounds is not None and track_lens is not None
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    # Without snapshots the lengths are 0, and these are not read.
    track_slots = states.slots if states.track_slots is None else states.track_slots
    slots = states.read_slots, states.slots, track_slots, bounds, track_lens
    places = bounds, track_lens, chunks.requests, chunks.first_chunks
    sizes = {"HEADS": heads, "DIM": dim, "CHUNK": size}
    exact = torch.float32
    q, k, v = convolve_chunks(columns, conv_weight, layout, states, chunks)
    totals = columns.new_empty((num_tokens, heads, dim), dtype=exact)
    _gates_kernel[(heads, num_chunks)](
        decay, totals, a_log, dt_bias, *places, BOUND=decay_bound or 0.0, num_warps=4, **sizes
    )
    system = columns.new_empty((num_tokens, heads, size), dtype=exact)
    scores = columns.new_empty((num_tokens, heads, size))
    _products_kernel[(heads, num_chunks)](
        columns, q, k, totals, system, scores, *places, columns.stride(0), B0=layout.b,
        LEVELS=size.bit_length() - 1, BLOCK_D=min(64, dim), num_warps=8, num_stages=3, **sizes,
    )  # fmt: skip
    invert(system, chunks, places)
    reads = columns.new_empty((num_tokens, heads, dim))
    decays = columns.new_empty((num_chunks, heads, dim), dtype=exact)
    _solve_kernel[(heads, num_chunks)](
        columns, q, k, v, totals, system, reads, decays, *places, columns.stride(0), B0=layout.b,
        BLOCK_D=min(32, dim), num_warps=4, num_stages=1, **sizes,
    )  # fmt: skip
    before = columns.new_empty((num_chunks, heads, dim, dim))
    at_once = min(_VALUES_OF_A_STATE, dim)
    _advance_kernel[(dim // at_once, heads, requests)](
        k, v, reads, decays, before, states.temporal, *slots, chunks.first_chunks,
        BLOCK_V=at_once, num_warps=4, num_stages=2, **sizes,
    )  # fmt: skip
    out = columns.new_empty((num_tokens, heads * dim))
    _output_kernel[(heads, num_chunks)](
        gate, q, v, scores, before, weight, out, *places, num_tokens, requests, eps, num_warps=4,
        **sizes,
    )  # fmt: skip
    keep_convolution(columns, layout, states)
    return out
