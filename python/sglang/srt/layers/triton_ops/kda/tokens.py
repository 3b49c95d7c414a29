"""Kimi Delta Attention (KDA) of few tokens in two kernels, as `fused_delta_net.py` has them for one
decay a head: convolution, gates and rule; norm and conv states.

Each channel of a key has its own decay. There are as many heads of queries and keys as of values. A
sigmoid gates the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    MOST_TAPS,
    DeltaLayout,
    DeltaStates,
    KdaProjected,
)
from sglang.srt.layers.triton_ops.conv_states import CONV_PARTS, keep_conv_states
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.fused_delta_net import (
    activated,
    advanced,
    convolution,
    softplus,
)

_FEW_REQUESTS = 2
_VALUES_AT_ONCE = (16, 32)
"""Values of a head per program, by the number of requests; see `fused_delta_net.py`."""
_WARPS = 2
_NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def log_decay(step: tl.tensor, rate: tl.tensor, BOUND: tl.constexpr) -> tl.tensor:
    """Log of the decay of time steps, bias included; BOUND is its least value, 0: it has none."""
    if BOUND < 0:
        log = BOUND / (1.0 + tl.exp(-rate * step))
    else:
        log = -rate * softplus(step)
    return log


@triton.jit
def _rule_kernel(
    x_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    temporal_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    Q0: tl.constexpr,
    K0: tl.constexpr,
    V0: tl.constexpr,
    B0: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    BOUND: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute some values of one head of one request, token after token. `EACH` is the number of
    its tokens; 0: `bounds_ptr` has it."""
    request = tl.program_id(2)
    head = tl.program_id(1)
    channels: tl.constexpr = 3 * HEADS * DIM
    keys = tl.arange(0, BLOCK_K)
    is_key = keys < DIM
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < DIM
    # These reads precede the wait; see `fused_delta_net.py`.
    first = tl.load(read_ptr + request)
    slot = tl.load(write_ptr + request)
    conv = conv_ptr + first * channels * (KERNEL - 1)
    place = keys[:, None] * DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    size = DIM * DIM
    state = tl.load(temporal_ptr + (first * HEADS + head) * size + place, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    own = head * DIM + keys
    bias = tl.load(dt_bias_ptr + own, mask=is_key, other=0.0)
    k_channels = HEADS * DIM + own
    v_channels = 2 * HEADS * DIM + head * DIM + values
    qt0, qt1, qt2, qt3, q_1st, q_2nd, q_3rd = convolution(conv, weight_ptr, own, is_key, KERNEL)
    kt0, kt1, kt2, kt3, k_1st, k_2nd, k_3rd = convolution(
        conv, weight_ptr, k_channels, is_key, KERNEL
    )
    vt0, vt1, vt2, vt3, v_1st, v_2nd, v_3rd = convolution(
        conv, weight_ptr, v_channels, is_value, KERNEL
    )
    await_kernels_before(EARLY)
    if EACH > 0:
        begin = request.to(tl.int64) * EACH
        end = begin + EACH
    else:
        begin = tl.load(bounds_ptr + request)
        end = tl.load(bounds_ptr + request + 1)
        if begin >= end:
            return
    state = state.to(tl.float32)
    kept = temporal_ptr.dtype.element_ty
    track_len = begin * 0
    if TRACK:
        track_len = tl.load(track_lens_ptr + request)
    v_cols = V0 + head * DIM + values
    row = x_ptr + begin * stride
    xq = tl.load(row + Q0 + own, mask=is_key, other=0.0)
    xk = tl.load(row + K0 + own, mask=is_key, other=0.0)
    xv = tl.load(row + v_cols, mask=is_value, other=0.0)
    b = tl.load(row + B0 + head).to(tl.float32)
    a = tl.load(decay_ptr + begin * HEADS * DIM + own, mask=is_key, other=0.0).to(tl.float32)
    for token in range(begin, end):
        q = activated(xq, q_1st, qt0)
        k = activated(xk, k_1st, kt0)
        v = activated(xv, v_1st, vt0)
        beta = 1.0 / (1.0 + tl.exp(-b))
        g = log_decay(a + bias, rate, BOUND)
        if EACH != 1:
            q_1st, q_2nd, q_3rd = q_2nd + xq * qt1, q_3rd + xq * qt2, xq * qt3
            k_1st, k_2nd, k_3rd = k_2nd + xk * kt1, k_3rd + xk * kt2, xk * kt3
            v_1st, v_2nd, v_3rd = v_2nd + xv * vt1, v_3rd + xv * vt2, xv * vt3
            # The next token's inputs are loaded while this one is computed.
            following = tl.minimum(token + 1, end - 1)
            row = x_ptr + following * stride
            xq = tl.load(row + Q0 + own, mask=is_key, other=0.0)
            xk = tl.load(row + K0 + own, mask=is_key, other=0.0)
            xv = tl.load(row + v_cols, mask=is_value, other=0.0)
            b = tl.load(row + B0 + head).to(tl.float32)
            a = tl.load(decay_ptr + following * HEADS * DIM + own, mask=is_key, other=0.0)
            a = a.to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _NORM_EPS) * scale
        state = advanced(state, k, v, tl.exp(g)[:, None], beta)
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (token * HEADS + head) * DIM + values, out, mask=is_value)
        if TRACK:  # noqa: SIM102 - known when this is compiled
            if token - begin + 1 == track_len:
                snapshot = tl.load(track_ptr + request)
                rounded = state.to(kept)
                tl.store(temporal_ptr + (snapshot * HEADS + head) * size + place, rounded, inside)
                # Later tokens continue from the snapshot as stored.
                state = rounded.to(tl.float32)
    tl.store(temporal_ptr + (slot * HEADS + head) * size + place, state.to(kept), mask=inside)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _finish_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    attended_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    Q0: tl.constexpr,
    K0: tl.constexpr,
    V0: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise and gate one head of a token. Rows after the tokens write a part of a head's conv
    state, because all programs of `_rule_kernel` read it."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    values = tl.arange(0, BLOCK)
    is_value = values < DIM
    weight = tl.load(norm_ptr + values, mask=is_value, other=0.0).to(tl.float32)
    after = tl.maximum(row - tokens, 0)
    request, part = after // CONV_PARTS, after % CONV_PARTS
    first = tl.load(read_ptr + request)
    slot = tl.load(write_ptr + request)
    await_kernels_before(EARLY)
    if row < tokens:
        known = row * 0 + tokens
        if EACH == 0:
            known = tl.load(bounds_ptr + requests)
        at = (row * HEADS + head) * DIM + values
        # Padding tokens were not computed, and must not spread stale memory.
        x = tl.load(attended_ptr + at, mask=is_value, other=0.0)
        x = tl.where(row < known, x, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps)
        gate = tl.load(gate_ptr + at, mask=is_value, other=0.0)
        normed = x * scale * weight / (1.0 + tl.exp(-gate.to(tl.float32)))
        tl.store(out_ptr + at, normed.to(gate.dtype), mask=is_value)
        return
    if EACH > 0:
        begin = request * EACH
        end = begin + EACH
    else:
        begin = tl.load(bounds_ptr + request)
        end = tl.load(bounds_ptr + request + 1)
        if begin >= end:
            return
    snapshot = slot * 0
    track_len = slot * 0
    if TRACK:
        snapshot = tl.load(track_ptr + request)
        track_len = tl.load(track_lens_ptr + request)
    keep_conv_states(
        x_ptr, conv_ptr, head, part, first, slot, snapshot, track_len, begin, end, stride,
        Q0, K0, V0, DIM, DIM, HEADS, 1, DIM, DIM, KERNEL, PAST, BLOCK, BLOCK, TRACK,
    )  # fmt: skip


def attend_kda(
    x: KdaProjected,
    layout: DeltaLayout,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    states: DeltaStates,
    *,
    decay_bound: float | None = None,
) -> torch.Tensor:
    """Update the states of all requests, and compute the output projection's input.

    Args:
        gates: The convolution's weight `[channels, kernel]`; the log of the decay rate
            `[num_heads]`; the bias of the time step `[num_heads * key_dim]`; all fp32.
        norm: Weight `[value_dim]` and epsilon of the gated norm.
        states: Read and overwritten; not of a verification. Without `bounds`, `num_tokens` is a
            multiple of `bs`.
        decay_bound: Least log of a token's decay, negative: it is this bound times the sigmoid of
            rate times step; None: minus rate times the softplus of the step.

    Returns:
        `[num_tokens, num_heads * value_dim]` of the dtype of `x`; zeros after the tokens of all
        requests.
    """
    columns, decay, gate = x
    num_tokens = len(columns)
    conv_weight, a_log, dt_bias = gates
    weight, eps = norm
    tracks, requests = states.track_lens is not None, len(states.slots)
    each = num_tokens // requests if states.bounds is None else 0
    heads, dim = layout.key_heads, layout.key_dim
    assert columns.stride(1) == 1 and conv_weight.is_contiguous()
    assert decay.is_contiguous() and gate.is_contiguous()
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    assert states.bounds is not None or requests * each == num_tokens
    assert states.kept is None, "no layer drafts tokens"
    assert layout.kernel <= MOST_TAPS
    attended = torch.empty((num_tokens, heads, dim), dtype=torch.float32, device=columns.device)
    out = columns.new_empty((num_tokens, heads * dim))
    indices = states.indices
    block = triton.next_power_of_2(dim)
    has_more = each == 0 or requests > _FEW_REQUESTS
    block_v = min(_VALUES_AT_ONCE[has_more], block)
    shape = {
        "Q0": layout.q, "K0": layout.k, "V0": layout.v, "HEADS": heads, "DIM": dim,
        "KERNEL": layout.kernel, "EACH": each, "TRACK": tracks, **early_start(columns),
    }  # fmt: skip
    _rule_kernel[(triton.cdiv(dim, block_v), heads, requests)](
        columns, decay, states.conv, states.temporal, conv_weight, a_log, dt_bias, attended,
        *indices, columns.stride(0), dim**-0.5, B0=layout.b, BLOCK_K=block, BLOCK_V=block_v,
        BOUND=decay_bound or 0.0, num_warps=_WARPS, **shape,
    )  # fmt: skip
    _finish_kernel[(heads, num_tokens + requests * CONV_PARTS.value)](
        columns, gate, states.conv, attended, weight, out, *indices, num_tokens, requests,
        columns.stride(0), eps, PAST=triton.next_power_of_2(layout.kernel - 1), BLOCK=block,
        num_warps=1, **shape,
    )  # fmt: skip
    return out
