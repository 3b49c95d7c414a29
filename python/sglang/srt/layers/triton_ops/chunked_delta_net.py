"""Linear attention of many tokens, in chunks, in seven kernels.

The gated delta rule of `gated_delta_rule.py`: within a chunk, the corrections of all tokens solve a
triangular system, so a state moves on by products of matrices. Products take the activations'
dtype and sum in fp32; decays, the system and the states are fp32.

1. `chunked_convolution.py`: convolution and SiLU; queries and keys are normalised.
2. `_system_kernel`: gates, and each chunk's system.
3. `_invert_kernel`: the inverse of each system.
4. `_solve_kernel`: the corrections if the states were zero, and what states change of them.
5. `_advance_kernel`: the states, chunk after chunk, and the snapshots.
6. `_output_kernel`: the outputs of all chunks, with the gated norm.
7. `chunked_convolution.py`: the convolution's states.

A chunk never reaches over a snapshot, so what follows one is computed as if it were a request's
begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import DeltaChunks, DeltaLayout, DeltaStates
from sglang.srt.layers.triton_ops.chunked_convolution import (
    INDICES,
    chunk_of_program,
    clear_padding,
    convolve_chunks,
    keep_convolution,
    span_of,
)
from sglang.srt.layers.triton_ops.fused_delta_net import softplus

_PART: tl.constexpr = tl.constexpr(16)
"""Rows of the blocks of a triangular system that are inverted first."""
_VALUES_OF_A_STATE = 32
"""Values of a head that one program moves on. Fewer fill the device with a single request."""


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _invert_kernel(
    system_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Overwrite one `system` of one head with the inverse of 1 + `system`.

    Blocks on the diagonal grow to twice their size: the inverse of two neighbours A and B, with
    the block L below A and beside B, is A^-1 and B^-1 and, in place of L, -B^-1 L A^-1. No number
    gets larger than those of the inverse. Above the diagonal, only what lies in its blocks of half
    a chunk is written.
    """
    tl.static_assert(CHUNK == 4 * _PART, "the last two steps are written out")
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    nth = tl.arange(0, _PART)
    own = tl.arange(0, 4)[:, None, None] * _PART
    rows, cols = own + nth[None, :, None], own + nth[None, None, :]
    mask = begin + rows < end
    at = system_ptr + ((begin + rows) * HEADS + head) * CHUNK + cols
    blocks = tl.load(at + cols * 0, mask=mask, other=0.0)
    odd_rows = tl.arange(0, 2)[:, None, None] * (2 * _PART) + _PART + nth[None, :, None]
    at = system_ptr + ((begin + odd_rows) * HEADS + head) * CHUNK
    at += odd_rows - _PART - nth[None, :, None] + nth[None, None, :]
    beside = tl.load(at, mask=begin + odd_rows < end, other=0.0)
    half = tl.arange(0, 2 * _PART)
    upper = system_ptr + ((begin + half[:, None]) * HEADS + head) * CHUNK + half[None, :]
    lower = upper + 2 * _PART * HEADS * CHUNK
    is_lower = (begin + 2 * _PART + half < end)[:, None]
    corner = tl.load(lower, mask=is_lower, other=0.0)
    # Rows and columns that first differ in this bit lie in blocks that this step joins.
    bits = nth[:, None] ^ nth[None, :]
    bits = bits[None, :, :]
    solved = tl.where(bits == 0, 1.0, 0.0) - tl.where(bits == 1, blocks, 0.0)
    for level in tl.static_range(1, 4):
        joined = tl.where((bits >> level) == 1, blocks, 0.0)
        change = tl.dot(solved, joined, input_precision="ieee")
        solved -= tl.dot(change, solved, input_precision="ieee")
    pairs = tl.permute(tl.reshape(solved, [2, 2, _PART, _PART]), (0, 2, 3, 1))
    even, odd = tl.split(pairs)
    change = tl.dot(odd, beside, input_precision="ieee")
    below = -tl.dot(change, even, input_precision="ieee")
    quarters = tl.join(tl.join(even, below), tl.join(tl.zeros_like(odd), odd))
    whole = tl.reshape(tl.permute(quarters, (3, 1, 4, 2, 0)), [2 * _PART, 2 * _PART, 2])
    first, second = tl.split(whole)
    change = tl.dot(second, corner, input_precision="ieee")
    last = -tl.dot(change, first, input_precision="ieee")
    # All must be read before any of it is overwritten.
    tl.debug_barrier()
    tl.store(upper, first, mask=(begin + half < end)[:, None])
    tl.store(lower, last, mask=is_lower)
    tl.store(lower + 2 * _PART, second, mask=is_lower)


def invert(system: torch.Tensor, chunks: DeltaChunks, places: tuple[torch.Tensor, ...]) -> None:
    """Overwrite each chunk's `system` with the inverse of 1 + `system`.

    Args:
        system: fp32 `[num_tokens, heads, chunk]`, 0 on the diagonal and above it. Entries of the
            result above it are undefined.
        places: Bounds, lengths before snapshots, and requests and first chunks of the chunks.
    """
    _, heads, size = system.shape
    _invert_kernel[(heads, len(chunks.requests))](
        system, *places, HEADS=heads, CHUNK=size, num_warps=4
    )


@triton.jit
def _decays(total: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Decay from each token (columns) to each later one of its chunk (rows); 0 to earlier ones."""
    nth = tl.arange(0, CHUNK)
    is_past = nth[:, None] >= nth[None, :]
    # Masked before exp, because decay over a negative time may overflow.
    return tl.exp(tl.where(is_past, total[:, None] - total[None, :], float("-inf")))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _system_kernel(
    x_ptr: tl.tensor,
    k_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    system_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    B0: tl.constexpr,
    A0: tl.constexpr,
    BA_STEP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Sum up the logs of one head's decays over a chunk, and compute its system."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    rows = tl.arange(0, CHUNK)
    tokens = begin + rows
    is_token = tokens < end
    key_head = head // REPEATS
    gates = x_ptr + tokens * stride + key_head * BA_STEP + head % REPEATS
    a = tl.load(gates + A0, mask=is_token, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    rate = tl.exp(tl.load(a_log_ptr + head))
    total = tl.cumsum(tl.where(is_token, -rate * softplus(a), 0.0), axis=0)
    tl.store(totals_ptr + head * num_tokens + tokens, total, mask=is_token)
    b = tl.load(gates + B0, mask=is_token, other=0.0).to(tl.float32)
    beta = 1.0 / (1.0 + tl.exp(-b))
    keys = tl.arange(0, BLOCK_K)
    at = (tokens[:, None] * KEY_HEADS + key_head) * KEY_DIM + keys[None, :]
    k = tl.load(k_ptr + at, mask=is_token[:, None] & (keys < KEY_DIM)[None, :], other=0.0)
    products = tl.dot(k, tl.trans(k), input_precision="ieee")
    system = products * beta[:, None] * _decays(total, CHUNK)
    system = tl.where(rows[:, None] > rows[None, :], system, 0.0)
    to = (tokens[:, None] * (KEY_HEADS * REPEATS) + head) * CHUNK + rows[None, :]
    tl.store(system_ptr + to, system, mask=is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _solve_kernel(
    x_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    B0: tl.constexpr,
    BA_STEP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Solve one chunk of one head: its values become corrections if the state were zero, and
    `reads` is what times the state is to be subtracted from them."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    if begin >= end:
        return
    rows = tl.arange(0, CHUNK)
    tokens = begin + rows
    is_token = tokens < end
    key_head = head // REPEATS
    heads = KEY_HEADS * REPEATS
    at = x_ptr + tokens * stride + key_head * BA_STEP + head % REPEATS + B0
    b = tl.load(at, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    total = tl.load(totals_ptr + head * num_tokens + tokens, mask=is_token, other=0.0)
    at = (tokens[:, None] * heads + head) * CHUNK + rows[None, :]
    is_past = is_token[:, None] & (rows[:, None] >= rows[None, :])
    inverse = tl.load(inverse_ptr + at, mask=is_past, other=0.0)
    keys = tl.arange(0, BLOCK_K)
    own_keys = is_token[:, None] & (keys < KEY_DIM)[None, :]
    at = (tokens[:, None] * KEY_HEADS + key_head) * KEY_DIM + keys[None, :]
    k = tl.load(k_ptr + at, mask=own_keys, other=0.0)
    to = (tokens[:, None] * heads + head) * KEY_DIM + keys[None, :]
    factors = (inverse * (beta * tl.exp(total))[None, :]).to(k.dtype)
    reads = tl.dot(factors, k, input_precision="ieee")
    tl.store(reads_ptr + to, reads.to(k.dtype), mask=own_keys)
    values = tl.arange(0, BLOCK_V)
    own_values = is_token[:, None] & (values < VALUE_DIM)[None, :]
    to = (tokens[:, None] * heads + head) * VALUE_DIM + values[None, :]
    v = tl.load(v_ptr + to, mask=own_values, other=0.0)
    corrections = tl.dot((inverse * beta[None, :]).to(v.dtype), v, input_precision="ieee")
    tl.store(v_ptr + to, corrections.to(v.dtype), mask=own_values)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _advance_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    before_ptr: tl.tensor,
    temporal_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Move some values of one head's state over a request's chunks: keep the state before each in
    `before`, complete the corrections, write state and snapshot."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.load(firsts_ptr + request)
    count = tl.load(firsts_ptr + request + 1) - first
    heads = KEY_HEADS * REPEATS
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    size = KEY_DIM * VALUE_DIM
    place = head * size + keys[:, None] * VALUE_DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    slots = temporal_ptr + place
    old = tl.load(read_ptr + request) * heads * size
    state = tl.load(slots + old, mask=inside, other=0.0).to(tl.float32)
    kept = temporal_ptr.dtype.element_ty
    dtype = k_ptr.dtype.element_ty
    track_len = tl.load(track_lens_ptr + request)
    for nth in range(count):
        start, begin, end = span_of(bounds_ptr, track_lens_ptr, request, nth, CHUNK)
        tokens = begin + tl.arange(0, CHUNK)
        is_token = tokens < end
        rounded = state.to(dtype)
        tl.store(before_ptr + (first + nth) * heads * size + place, rounded, mask=inside)
        at = tokens[:, None] * heads + head
        mask = is_token[:, None] & is_key[None, :]
        reads = tl.load(reads_ptr + at * KEY_DIM + keys[None, :], mask=mask, other=0.0)
        corrections = v_ptr + at * VALUE_DIM + values[None, :]
        mask = is_token[:, None] & is_value[None, :]
        known = tl.load(corrections, mask=mask, other=0.0).to(tl.float32)
        known -= tl.dot(reads, rounded, input_precision="ieee")
        tl.store(corrections, known.to(dtype), mask=mask)
        totals = totals_ptr + head * num_tokens
        total = tl.load(totals + tokens, mask=is_token, other=0.0)
        last = tl.load(totals + end - 1)
        scaled = (known * tl.exp(last - total)[:, None]).to(dtype)
        at = tokens[None, :] * KEY_HEADS + head // REPEATS
        mask = is_token[None, :] & is_key[:, None]
        k = tl.load(k_ptr + at * KEY_DIM + keys[:, None], mask=mask, other=0.0)
        state = state * tl.exp(last) + tl.dot(k, scaled, input_precision="ieee")
        if end - start == track_len:
            snapshot = tl.load(track_ptr + request) * heads * size
            tl.store(slots + snapshot, state.to(kept), mask=inside)
            # Later tokens continue from the snapshot as stored.
            state = state.to(kept).to(tl.float32)
    tl.store(slots + tl.load(write_ptr + request) * heads * size, state.to(kept), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "requests"], do_not_specialize_on_alignment=INDICES)
def _output_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    before_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    requests: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    Z0: tl.constexpr,
    V_STEP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Compute one head's outputs of a chunk, normalise and gate them; outputs of padding are 0."""
    head = tl.program_id(0)
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    tokens = begin + tl.arange(0, CHUNK)
    is_token = tokens < end
    key_head, heads = head // REPEATS, KEY_HEADS * REPEATS
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    cols = head * VALUE_DIM + values
    clear_padding(
        out_ptr, bounds_ptr, requests, tokens, num_tokens, cols, is_value, heads * VALUE_DIM
    )
    if begin >= end:
        return
    at = (tokens[:, None] * KEY_HEADS + key_head) * KEY_DIM + keys[None, :]
    mask = is_token[:, None] & is_key[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    total = tl.load(totals_ptr + head * num_tokens + tokens, mask=is_token, other=0.0)
    state = tl.load(
        before_ptr
        + ((tl.program_id(1).to(tl.int64) * heads + head) * KEY_DIM + keys[:, None]) * VALUE_DIM
        + values[None, :],
        mask=is_key[:, None] & is_value[None, :],
        other=0.0,
    )
    out = tl.dot(q, state, input_precision="ieee") * tl.exp(total)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * _decays(total, CHUNK)
    mask = is_token[:, None] & is_value[None, :]
    at = (tokens[:, None] * heads + head) * VALUE_DIM + values[None, :]
    corrections = tl.load(v_ptr + at, mask=mask, other=0.0)
    out += tl.dot(scores.to(q.dtype), corrections, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(out * out, axis=1) / VALUE_DIM + eps)
    weight = tl.load(norm_ptr + values, mask=is_value, other=0.0).to(tl.float32)
    cols = Z0 + key_head * V_STEP + head % REPEATS * VALUE_DIM + values
    gate = tl.load(x_ptr + tokens[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    normed = out * scale[:, None] * weight[None, :] * (wide / (1.0 + tl.exp(-wide)))
    tl.store(out_ptr + at, normed.to(gate.dtype), mask=mask)


def attend_in_chunks(
    x: torch.Tensor,
    layout: DeltaLayout,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    states: DeltaStates,
    chunks: DeltaChunks,
) -> torch.Tensor:
    """Like `attend_linearly`, for prefills of many tokens.

    The kernels take `2 * key_dim * value_dim / chunk` bytes a token and value head for the states
    before the chunks and `4 * chunk` for the systems, in addition to queries, keys and values, and
    the keys of each value head.

    Args:
        x: `[num_tokens, columns]` with dense rows: the projections of the layer's input.
        gates: See `attend_linearly`, for `norm` too.
        states: Must have `bounds` and `track_lens`. Read and overwritten.

    Returns:
        `[num_tokens, num_heads * value_dim]` of the dtype of `x`; zeros after the tokens of all
        requests.
    """
    num_tokens, num_chunks, requests = len(x), len(chunks.requests), len(states.slots)
    conv_weight, a_log, dt_bias = gates
    weight, eps = norm
    key_heads, key_dim, value_dim = layout.key_heads, layout.key_dim, layout.value_dim
    heads = key_heads * layout.repeats
    bounds, track_lens = states.bounds, states.track_lens
    assert x.stride(1) == 1 and conv_weight.is_contiguous()
    assert bounds is not None and track_lens is not None
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    reads = x.new_empty((num_tokens, heads, key_dim))
    totals = x.new_empty((heads, num_tokens), dtype=torch.float32)
    before = x.new_empty((num_chunks, heads, key_dim, value_dim))
    out = x.new_empty((num_tokens, heads * value_dim))
    # Without snapshots the lengths are 0, and these are not read.
    track_slots = states.slots if states.track_slots is None else states.track_slots
    slots = states.read_slots, states.slots, track_slots, bounds, track_lens
    places = bounds, track_lens, chunks.requests, chunks.first_chunks
    block_k, block_v = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    sizes = {
        "KEY_HEADS": key_heads, "REPEATS": layout.repeats, "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }  # fmt: skip
    blocks = {"CHUNK": chunks.size, "BLOCK_K": block_k, "BLOCK_V": block_v}
    stride = x.stride(0)
    q, k, v = convolve_chunks(x, conv_weight, layout, states, chunks)
    system = x.new_empty((num_tokens, heads, chunks.size), dtype=torch.float32)
    of_scalars = {"B0": layout.b, "BA_STEP": layout.ba_step}
    _system_kernel[(heads, num_chunks)](
        x, k, totals, system, a_log, dt_bias, *places, num_tokens, stride, A0=layout.a,
        KEY_HEADS=key_heads, REPEATS=layout.repeats, KEY_DIM=key_dim, CHUNK=chunks.size,
        BLOCK_K=block_k, num_warps=4, **of_scalars,
    )  # fmt: skip
    invert(system, chunks, places)
    _solve_kernel[(heads, num_chunks)](
        x, k, v, reads, totals, system, *places, num_tokens, stride, num_warps=4, **of_scalars,
        **blocks, **sizes,
    )  # fmt: skip
    at_once = min(_VALUES_OF_A_STATE, block_v)
    _advance_kernel[(triton.cdiv(value_dim, at_once), heads, requests)](
        k, v, reads, totals, before, states.temporal, *slots, chunks.first_chunks, num_tokens,
        num_warps=4, num_stages=2, **{**blocks, "BLOCK_V": at_once}, **sizes,
    )  # fmt: skip
    _output_kernel[(heads, num_chunks)](
        x, q, k, v, totals, before, weight, out, *places, num_tokens, requests, stride, eps,
        Z0=layout.z, V_STEP=layout.v_step, num_warps=4, **blocks, **sizes,
    )  # fmt: skip
    keep_convolution(x, layout, states)
    return out
