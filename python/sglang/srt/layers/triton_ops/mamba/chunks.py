"""Mamba-2 of many tokens, in chunks, in five kernels.

The rule of `state_space.py`: within a chunk, outputs are products of matrices. Products take the
activations' dtype and sum in fp32; time steps, decays and the states are fp32.

1. `_steps_kernel`: time steps, and logs of the decay since the chunk's beginning.
2. `_convolve_kernel`: convolution and SiLU.
3. `_advance_kernel`: the states, chunk after chunk, and the snapshots.
4. `_output_kernel`: the outputs of all chunks.
5. `finish.py`: gated norm, and the convolution's states.

A chunk never reaches over a snapshot, so what follows one is computed as if it were a request's
begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    DeltaChunks,
    DeltaStates,
    StateSpaceLayout,
    StateSpaceWeights,
)
from sglang.srt.layers.triton_ops.chunked_convolution import (
    INDICES,
    STEPS,
    chunk_of_program,
    convolved,
    runs_of,
    span_of,
    window_of,
)
from sglang.srt.layers.triton_ops.fused_delta_net import softplus
from sglang.srt.layers.triton_ops.mamba.finish import finish

_HEADS_AT_ONCE = 16
_CHANNELS_AT_ONCE = 128
"""Heads and channels of a program of the first two kernels."""
_FEATURES_OF_A_STATE, _ROWS_OF_A_STATE = 32, 64
"""The part `[features, elements]` of a head's state that one program moves on. Smaller parts fill
the device with a single request."""
_TOKENS_AT_ONCE = 64
"""Tokens of a chunk whose outputs one program computes, and to which it attends at once."""


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _steps_kernel(
    x_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    stride: tl.tensor,
    HEADS: tl.constexpr,
    DT0: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Compute time steps of some heads in a chunk, and the logs of their decays, summed up."""
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    tokens = begin + tl.arange(0, CHUNK)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    inside = (tokens < end)[:, None] & is_head[None, :]
    at = x_ptr + tokens[:, None] * stride + DT0 + heads[None, :]
    raw = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dt = softplus(raw + tl.load(dt_bias_ptr + heads, mask=is_head, other=0.0)[None, :])
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=is_head, other=0.0))
    total = tl.cumsum(tl.where(inside, -rate[None, :] * dt, 0.0), axis=0)
    to = heads[None, :] * num_tokens + tokens[:, None]
    tl.store(steps_ptr + to, dt, mask=inside)
    tl.store(totals_ptr + to, total, mask=inside)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _convolve_kernel(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    conv_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    read_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    stride: tl.tensor,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Convolve some channels of ROWS runs of a chunk. They begin at column FIRST of
    the projections."""
    request, start, begin, end = chunk_of_program(
        bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK
    )
    begin += tl.program_id(2) * (ROWS * STEPS)
    if begin >= end:
        return
    channels = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_channel = channels < CHANNELS
    old = conv_ptr + tl.load(read_ptr + request) * CHANNELS * (KERNEL - 1)
    bias = tl.load(conv_bias_ptr + channels, mask=is_channel, other=0.0)
    inputs, taps = window_of(
        x_ptr, weight_ptr, start, begin, end, FIRST + channels, channels, is_channel, stride,
        KERNEL, TAPS, ROWS,
    )  # fmt: skip
    for step in tl.static_range(STEPS):
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32) + bias[None, :]
        out = convolved(
            inputs, taps, acc, old, start, begin, channels, is_channel, step, KERNEL, ROWS
        )
        tokens = begin + tl.arange(0, ROWS) * STEPS + step
        to = out_ptr + tokens[:, None] * CHANNELS + channels[None, :]
        mask = (tokens < end)[:, None] & is_channel[None, :]
        tl.store(to, out.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _advance_kernel(
    inputs_ptr: tl.tensor,
    steps_ptr: tl.tensor,
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
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Move a part of one head's state over a request's chunks: keep the state before each in
    `before`, write state and snapshot."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    values: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = values + 2 * GROUPS * STATE
    first = tl.load(firsts_ptr + request)
    count = tl.load(firsts_ptr + request + 1) - first
    blocks: tl.constexpr = STATE // BLOCK_N
    features = tl.program_id(0) // blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    nth = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    size: tl.constexpr = HEAD_DIM * STATE
    place = head * size + features[:, None] * STATE + nth[None, :]
    slots = temporal_ptr + place
    state = tl.load(slots + tl.load(read_ptr + request) * HEADS * size).to(tl.float32)
    kept = temporal_ptr.dtype.element_ty
    dtype = inputs_ptr.dtype.element_ty
    track_len = tl.load(track_lens_ptr + request)
    for number in range(count):
        start, begin, end = span_of(bounds_ptr, track_lens_ptr, request, number, CHUNK)
        tokens = begin + tl.arange(0, CHUNK)
        is_token = tokens < end
        tl.store(before_ptr + (first + number) * HEADS * size + place, state.to(dtype))
        dt = tl.load(steps_ptr + head * num_tokens + tokens, mask=is_token, other=0.0)
        total = tl.load(totals_ptr + head * num_tokens + tokens, mask=is_token, other=0.0)
        last = tl.load(totals_ptr + head * num_tokens + end - 1)
        rows = inputs_ptr + tokens * CHANNELS
        cols = head * HEAD_DIM + features
        x = tl.load(rows[None, :] + cols[:, None], mask=is_token[None, :], other=0.0)
        factor = tl.where(is_token, dt * tl.exp(last - total), 0.0)
        scaled = (x.to(tl.float32) * factor[None, :]).to(dtype)
        cols = values + group * STATE + nth
        b = tl.load(rows[:, None] + cols[None, :], mask=is_token[:, None], other=0.0)
        state = state * tl.exp(last) + tl.dot(scaled, b, input_precision="ieee")
        if end - start == track_len:
            snapshot = tl.load(track_ptr + request) * HEADS * size
            tl.store(slots + snapshot, state.to(kept))
            # Later tokens continue from the snapshot as stored.
            state = state.to(kept).to(tl.float32)
    tl.store(slots + tl.load(write_ptr + request) * HEADS * size, state.to(kept))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=INDICES)
def _output_kernel(
    inputs_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    before_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute one head's outputs of BLOCK_T tokens of a chunk."""
    head = tl.program_id(0)
    group = head // (HEADS // GROUPS)
    values: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = values + 2 * GROUPS * STATE
    _, _, begin, end = chunk_of_program(bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK)
    block = tl.program_id(2)
    begin_own = begin + block * BLOCK_T
    if begin_own >= end:
        return
    own = begin_own + tl.arange(0, BLOCK_T)
    is_own = own < end
    features = tl.arange(0, HEAD_DIM)
    dtype = inputs_ptr.dtype.element_ty
    total = tl.load(totals_ptr + head * num_tokens + own, mask=is_own, other=0.0)
    own_rows = inputs_ptr + own[:, None] * CHANNELS
    b0 = values + group * STATE
    c0 = b0 + GROUPS * STATE
    chunk = tl.program_id(1).to(tl.int64)
    before = before_ptr + (chunk * HEADS + head) * HEAD_DIM * STATE
    out = tl.zeros([BLOCK_T, HEAD_DIM], tl.float32)
    for n0 in tl.static_range(0, STATE, BLOCK_N):
        nth = n0 + tl.arange(0, BLOCK_N)
        c = tl.load(own_rows + c0 + nth[None, :], mask=is_own[:, None], other=0.0)
        state = tl.load(before + features[None, :] * STATE + nth[:, None])
        out += tl.dot(c, state, input_precision="ieee")
    out *= tl.exp(total)[:, None]
    for number in range(block + 1):
        begin_past = begin + number * BLOCK_T
        past = begin_past + tl.arange(0, BLOCK_T)
        is_past = past < end
        past_rows = inputs_ptr + past * CHANNELS
        scores = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        for n0 in tl.static_range(0, STATE, BLOCK_N):
            nth = n0 + tl.arange(0, BLOCK_N)
            c = tl.load(own_rows + c0 + nth[None, :], mask=is_own[:, None], other=0.0)
            cols = b0 + nth
            b = tl.load(past_rows[None, :] + cols[:, None], mask=is_past[None, :], other=0.0)
            scores += tl.dot(c, b, input_precision="ieee")
        dt = tl.load(steps_ptr + head * num_tokens + past, mask=is_past, other=0.0)
        since = tl.load(totals_ptr + head * num_tokens + past, mask=is_past, other=0.0)
        is_seen = is_own[:, None] & is_past[None, :] & (own[:, None] >= past[None, :])
        # Masked before exp, because decay over a negative time may overflow.
        decay = tl.exp(tl.where(is_seen, total[:, None] - since[None, :], float("-inf")))
        scores *= decay * dt[None, :]
        cols = head * HEAD_DIM + features
        x = tl.load(past_rows[:, None] + cols[None, :], mask=is_past[:, None], other=0.0)
        out += tl.dot(scores.to(dtype), x, input_precision="ieee")
    cols = head * HEAD_DIM + features
    x = tl.load(own_rows + cols[None, :], mask=is_own[:, None], other=0.0)
    out += x.to(tl.float32) * tl.load(skip_ptr + head)
    to = out_ptr + own[:, None] * values + cols[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_own[:, None])


def scan_in_chunks(
    x: torch.Tensor,
    layout: StateSpaceLayout,
    weights: StateSpaceWeights,
    eps: float,
    states: DeltaStates,
    chunks: DeltaChunks,
) -> torch.Tensor:
    """Like `scan_tokens`, for prefills of many tokens.

    The kernels take `2 * head_dim * state_size / chunk` bytes a token and head for the states
    before the chunks, in addition to the channels and the outputs.

    Args:
        layout: It `takes_chunks`.
        states: Must have `bounds` and `track_lens`. Read and overwritten.
    """
    num_tokens, num_chunks, requests = len(x), len(chunks.requests), len(states.slots)
    heads, head_dim, state_size = layout.heads, layout.head_dim, layout.state_size
    bounds, track_lens = states.bounds, states.track_lens
    assert x.stride(1) == 1 and weights.conv.is_contiguous() and layout.takes_chunks
    assert bounds is not None and track_lens is not None
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    steps, totals = x.new_empty((2, heads, num_tokens), dtype=torch.float32)
    inputs = x.new_empty((num_tokens, layout.channels))
    before = x.new_empty((num_chunks, heads, head_dim, state_size))
    scanned = x.new_empty((num_tokens, layout.values))
    # Without snapshots the lengths are 0, and these are not read.
    track_slots = states.slots if states.track_slots is None else states.track_slots
    places = bounds, track_lens, chunks.requests, chunks.first_chunks
    sizes = {
        "HEADS": heads, "GROUPS": layout.groups, "HEAD_DIM": head_dim, "STATE": state_size,
        "CHUNK": chunks.size,
    }  # fmt: skip
    stride = x.stride(0)
    _steps_kernel[(triton.cdiv(heads, _HEADS_AT_ONCE), num_chunks)](
        x, steps, totals, weights.a_log, weights.dt_bias, *places, num_tokens, stride, HEADS=heads,
        DT0=layout.values + layout.channels, CHUNK=chunks.size, BLOCK_H=_HEADS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    runs, programs = runs_of(chunks)
    tiles = triton.cdiv(layout.channels, _CHANNELS_AT_ONCE), num_chunks, programs
    _convolve_kernel[tiles](
        x, states.conv, weights.conv, weights.conv_bias, inputs, states.read_slots, *places, stride,
        FIRST=layout.values, CHANNELS=layout.channels, KERNEL=layout.kernel, CHUNK=chunks.size,
        TAPS=triton.next_power_of_2(layout.kernel), ROWS=runs, BLOCK_D=_CHANNELS_AT_ONCE,
        num_warps=8,
    )  # fmt: skip
    block_p, block_n = min(_FEATURES_OF_A_STATE, head_dim), min(_ROWS_OF_A_STATE, state_size)
    _advance_kernel[(head_dim // block_p * (state_size // block_n), heads, requests)](
        inputs, steps, totals, before, states.temporal, states.read_slots, states.slots,
        track_slots, bounds, track_lens, chunks.first_chunks, num_tokens, BLOCK_P=block_p,
        BLOCK_N=block_n, num_warps=4, num_stages=2, **sizes,
    )  # fmt: skip
    block_t = min(_TOKENS_AT_ONCE, chunks.size)
    _output_kernel[(heads, num_chunks, chunks.size // block_t)](
        inputs, steps, totals, before, weights.skip, scanned, *places, num_tokens, BLOCK_T=block_t,
        BLOCK_N=block_n, num_warps=4, **sizes,
    )  # fmt: skip
    return finish(x, scanned, layout, (weights.norm, eps), states, {"EARLY": 0})
