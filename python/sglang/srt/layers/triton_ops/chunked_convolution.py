"""The convolution of linear attention for many tokens, in chunks: inputs of the rule, and states.

`chunked_delta_net.py` has the rule.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import DeltaChunks, DeltaLayout, DeltaStates
from sglang.srt.layers.triton_ops.conv_states import CONV_PARTS, keep_conv_states

_NORM_EPS: tl.constexpr = tl.constexpr(1e-6)
STEPS: tl.constexpr = tl.constexpr(8)
"""Tokens of a run: a program convolves a token of each of its runs, then the next ones. At least
the width of a convolution less 1."""
RUNS_AT_ONCE = 8
_RUNS_OF_HEADS = 4
"""Most runs of a program; and of one that takes a head of queries, keys or values."""
INDICES = [
    "read_ptr", "write_ptr", "track_ptr", "bounds_ptr", "track_lens_ptr", "requests_ptr",
    "firsts_ptr",
]  # fmt: skip
"""Parts of one upload: where they begin must not select a kernel."""


@triton.jit
def span_of(  # type: ignore[no-untyped-def]  # noqa: ANN201
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    request: tl.tensor,
    nth: tl.tensor,
    CHUNK: tl.constexpr,
):
    """Begin of a request, begin and end of its `nth` chunk; chunks begin anew after a snapshot."""
    start = tl.load(bounds_ptr + request)
    stop = tl.load(bounds_ptr + request + 1)
    begin = start + nth * CHUNK
    end = stop
    tracked = tl.load(track_lens_ptr + request)
    before = (tracked + CHUNK - 1) // CHUNK
    if nth < before:
        end = start + tracked
    else:
        begin = start + tracked + (nth - before) * CHUNK
    return start, begin, tl.minimum(begin + CHUNK, end)


@triton.jit
def chunk_of_program(  # type: ignore[no-untyped-def]  # noqa: ANN201
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    CHUNK: tl.constexpr,
):
    """Request of the chunk that `program_id(1)` numbers, then as `span_of`."""
    chunk = tl.program_id(1)
    request = tl.load(requests_ptr + chunk)
    nth = chunk - tl.load(firsts_ptr + request)
    start, begin, end = span_of(bounds_ptr, track_lens_ptr, request, nth, CHUNK)
    return request, start, begin, end


@triton.jit
def clear_padding(
    out_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    requests: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    cols: tl.tensor,
    is_col: tl.tensor,
    stride: tl.tensor,
) -> None:
    """Write zeros to columns of those `tokens` that come after the tokens of all requests.

    No chunk computes them, and stale memory would spread to later layers. The chunks of a padded
    step reach over all its tokens.
    """
    known = tl.load(bounds_ptr + requests)
    mask = ((tokens >= known) & (tokens < num_tokens))[:, None] & is_col[None, :]
    at = out_ptr + tokens[:, None] * stride + cols[None, :]
    tl.store(at, 0.0, mask=mask)


@triton.jit
def window_of(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    start: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    cols: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    stride: tl.tensor,
    KERNEL: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Inputs of ROWS runs of STEPS tokens from `begin` on, and the taps.

    A tuple of inputs `[ROWS, channels]`, each of the next token of every run, from KERNEL - 1
    tokens before the runs on; 0 before `start`. A tuple of fp32 taps `[channels]`, oldest first.
    With these, a program reads an input about once, and the sums work on registers.
    """
    nth = tl.arange(0, TAPS)
    mask = is_channel[:, None] & (nth < KERNEL)[None, :]
    weight = tl.load(weight_ptr + channels[:, None] * KERNEL + nth[None, :], mask=mask, other=0.0)
    runs = begin + tl.arange(0, ROWS) * STEPS
    # Triton adds tuples, and does not unpack them.
    inputs = ()
    for back in tl.static_range(KERNEL - 1, -STEPS, -1):
        at = runs - back
        mask = ((at >= start) & (at < end))[:, None] & is_channel[None, :]
        place = x_ptr + at[:, None] * stride + cols[None, :]
        found = tl.load(place, mask=mask, other=0.0)
        inputs = inputs + (found,)  # type: ignore[assignment]  # noqa: RUF005
    taps = ()
    for tap in tl.static_range(KERNEL):
        own = tl.sum(tl.where((nth == tap)[None, :], weight, 0.0), axis=1)
        taps = taps + (own,)  # type: ignore[assignment]  # noqa: RUF005
    return inputs, taps


@triton.jit
def convolved(  # type: ignore[no-untyped-def]
    inputs,  # noqa: ANN001
    taps,  # noqa: ANN001
    acc: tl.tensor,
    old_ptr: tl.tensor,
    start: tl.tensor,
    begin: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    STEP: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """SiLU of `acc` and the convolution of the STEP-th tokens of runs, fp32 `[ROWS, channels]`.

    `old_ptr` is the state of the request, whose tokens begin at `start`. Inputs in the state are
    older than those in `x`, so they are added first.
    """
    dtype = inputs[0].dtype
    if STEP < KERNEL - 1:  # noqa: SIM102
        if begin + STEP - start < KERNEL - 1:
            tokens = begin - start + tl.arange(0, ROWS) * STEPS + STEP
            for nth in tl.static_range(KERNEL - 1):
                before = tokens + nth - (KERNEL - 1)
                place = old_ptr + channels[None, :] * (KERNEL - 1) + before[:, None] + KERNEL - 1
                mask = (before < 0)[:, None] & is_channel[None, :]
                # Stored inputs get the dtype of activations, which new tokens' inputs have.
                kept = tl.load(place, mask=mask, other=0.0).to(dtype)
                acc += kept.to(tl.float32) * taps[nth][None, :]
    for nth in tl.static_range(KERNEL):
        acc += inputs[STEP + nth].to(tl.float32) * taps[nth][None, :]
    return acc / (1.0 + tl.exp(-acc))


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _convolve_kernel(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    read_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
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
    CHUNK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Compute queries, keys or values of one head, of ROWS runs of a chunk. The heads of queries
    come first, then the heads of keys, then the heads of values."""
    head = tl.program_id(0)
    request, start, begin, end = chunk_of_program(
        bounds_ptr, track_lens_ptr, requests_ptr, firsts_ptr, CHUNK
    )
    begin += tl.program_id(2) * (ROWS * STEPS)
    if begin >= end:
        return
    dims = tl.arange(0, BLOCK_D)
    is_key = head < 2 * KEY_HEADS
    is_dim = dims < tl.where(is_key, KEY_DIM, VALUE_DIM)
    value_head = head - 2 * KEY_HEADS
    key_col = tl.where(head < KEY_HEADS, Q0, K0) + head % KEY_HEADS * QK_STEP
    value_col = V0 + value_head // REPEATS * V_STEP + value_head % REPEATS * VALUE_DIM
    cols = tl.where(is_key, key_col, value_col) + dims
    first = 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
    channels = tl.where(is_key, head * KEY_DIM, first) + dims
    heads = KEY_HEADS * REPEATS
    size = (2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM) * (KERNEL - 1)
    old = conv_ptr + tl.load(read_ptr + request) * size
    inputs, taps = window_of(
        x_ptr, weight_ptr, start, begin, end, cols, channels, is_dim, stride, KERNEL, TAPS, ROWS
    )
    kept_dtype = x_ptr.dtype.element_ty
    for step in tl.static_range(STEPS):
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        acc = convolved(inputs, taps, acc, old, start, begin, channels, is_dim, step, KERNEL, ROWS)
        out = acc.to(kept_dtype)
        tokens = begin + tl.arange(0, ROWS) * STEPS + step
        mask = (tokens < end)[:, None] & is_dim[None, :]
        if is_key:
            wide = out.to(tl.float32)
            norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + _NORM_EPS)
            norm *= tl.where(head < KEY_HEADS, scale, 1.0)
            to = (tokens[:, None] * KEY_HEADS + head % KEY_HEADS) * KEY_DIM + dims[None, :]
            unit = (wide * norm[:, None]).to(kept_dtype)
            if head < KEY_HEADS:
                tl.store(q_ptr + to, unit, mask=mask)
            else:
                tl.store(k_ptr + to, unit, mask=mask)
        else:
            to = (tokens[:, None] * heads + value_head) * VALUE_DIM + dims[None, :]
            tl.store(v_ptr + to, out, mask=mask)


@triton.jit(do_not_specialize_on_alignment=INDICES)
def _keep_kernel(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
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
) -> None:
    """Write a part of a head's convolution state, and of its snapshot's."""
    request = tl.program_id(1)
    first, slot = tl.load(read_ptr + request), tl.load(write_ptr + request)
    begin, end = tl.load(bounds_ptr + request), tl.load(bounds_ptr + request + 1)
    snapshot, track_len = tl.load(track_ptr + request), tl.load(track_lens_ptr + request)
    keep_conv_states(
        x_ptr, conv_ptr, tl.program_id(0), tl.program_id(2), first, slot, snapshot, track_len,
        begin, end, stride, Q0, K0, V0, QK_STEP, V_STEP, KEY_HEADS, REPEATS, KEY_DIM, VALUE_DIM,
        KERNEL, PAST, BLOCK_K, BLOCK_V, True,
    )  # fmt: skip


def runs_of(chunks: DeltaChunks, at_once: int = RUNS_AT_ONCE) -> tuple[int, int]:
    """Runs of a program, and programs of a chunk."""
    runs = min(at_once, chunks.size // STEPS.value)
    return runs, chunks.size // (runs * STEPS.value)


def convolve_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    layout: DeltaLayout,
    states: DeltaStates,
    chunks: DeltaChunks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve a prefill's tokens, and apply SiLU.

    Args:
        x: See `attend_in_chunks`.
        weight: fp32 `[channels, kernel]`.
        states: Must have `bounds` and `track_lens`. Only read.

    Returns:
        Queries and keys, `[num_tokens, key_heads, key_dim]`: unit vectors, queries scaled by
        key_dim^-0.5. Values, `[num_tokens, num_heads, value_dim]`. All have the dtype of `x`.
    """
    num_tokens, key_heads = len(x), layout.key_heads
    heads = key_heads * layout.repeats
    q, k = x.new_empty((2, num_tokens, key_heads, layout.key_dim))
    v = x.new_empty((num_tokens, heads, layout.value_dim))
    runs, programs = runs_of(chunks, _RUNS_OF_HEADS)
    _convolve_kernel[(2 * key_heads + heads, len(chunks.requests), programs)](
        x, states.conv, weight, q, k, v, states.read_slots, states.bounds, states.track_lens,
        chunks.requests, chunks.first_chunks, x.stride(0), layout.key_dim**-0.5, CHUNK=chunks.size,
        TAPS=triton.next_power_of_2(layout.kernel), ROWS=runs,
        BLOCK_D=triton.next_power_of_2(max(layout.key_dim, layout.value_dim)),
        num_warps=4, **_sizes(layout),
    )  # fmt: skip
    return q, k, v


def keep_convolution(x: torch.Tensor, layout: DeltaLayout, states: DeltaStates) -> None:
    """Write the convolution's states after a prefill, and those of the snapshots. The kernels that
    read the states before must have been launched."""
    track_slots = states.slots if states.track_slots is None else states.track_slots
    _keep_kernel[(layout.key_heads * layout.repeats, len(states.slots), CONV_PARTS.value)](
        x, states.conv, states.read_slots, states.slots, track_slots, states.bounds,
        states.track_lens, x.stride(0), PAST=triton.next_power_of_2(layout.kernel - 1),
        BLOCK_K=triton.next_power_of_2(layout.key_dim),
        BLOCK_V=triton.next_power_of_2(layout.value_dim), num_warps=1, **_sizes(layout),
    )  # fmt: skip


def _sizes(layout: DeltaLayout) -> dict[str, int]:
    return {
        "Q0": layout.q, "K0": layout.k, "V0": layout.v, "QK_STEP": layout.qk_step,
        "V_STEP": layout.v_step, "KEY_HEADS": layout.key_heads, "REPEATS": layout.repeats,
        "KEY_DIM": layout.key_dim, "VALUE_DIM": layout.value_dim, "KERNEL": layout.kernel,
    }  # fmt: skip
