"""Linear attention of few tokens in two kernels: convolution, gates and rule; norm and conv states.

For decoding, verification of drafts and short prefills, where launches take longer than the work.
The rule of `gated_delta_rule.py` is computed token by token, in fp32 in registers. The convolution
reads its inputs directly from the output of the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import MOST_TAPS, DeltaLayout, DeltaStates
from sglang.srt.layers.triton_ops.conv_states import CONV_PARTS, keep_conv_states
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

_FEW_REQUESTS = 2
_VALUES_AT_ONCE = (16, 32)
"""Values of a head per program: the first for decode steps of at most `_FEW_REQUESTS`, the second
otherwise. Fewer values fill the device; more values recompute key and query less often."""
_WARPS = 2
_NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def convolution(  # type: ignore[no-untyped-def]  # noqa: ANN201
    conv_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    channels: tl.tensor,
    inside: tl.tensor,
    KERNEL: tl.constexpr,
):
    """The weights of a convolution over at most four tokens, newest token first; then the
    contributions of the inputs in the state to the next three tokens."""
    taps = weight_ptr + channels * KERNEL + KERNEL - 1
    newest = conv_ptr + channels * (KERNEL - 1) + KERNEL - 2
    nothing = tl.zeros(channels.shape, tl.float32)
    t0 = tl.load(taps, mask=inside, other=0.0)
    t1, t2, t3 = nothing, nothing, nothing
    x1, x2, x3 = nothing, nothing, nothing
    if KERNEL > 1:
        t1 = tl.load(taps - 1, mask=inside, other=0.0)
        x1 = tl.load(newest, mask=inside, other=0.0).to(tl.float32)
    if KERNEL > 2:
        t2 = tl.load(taps - 2, mask=inside, other=0.0)
        x2 = tl.load(newest - 1, mask=inside, other=0.0).to(tl.float32)
    if KERNEL > 3:
        t3 = tl.load(taps - 3, mask=inside, other=0.0)
        x3 = tl.load(newest - 2, mask=inside, other=0.0).to(tl.float32)
    return t0, t1, t2, t3, x3 * t3 + x2 * t2 + x1 * t1, x2 * t3 + x1 * t2, x1 * t3


@triton.jit
def activated(x: tl.tensor, past: tl.tensor, tap: tl.tensor) -> tl.tensor:
    """SiLU of the convolution, with `past` from older inputs, in fp32 but rounded to the input's
    dtype."""
    acc = past + x.to(tl.float32) * tap
    return (acc / (1.0 + tl.exp(-acc))).to(x.dtype).to(tl.float32)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + e^x), without overflow."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def advanced(
    state: tl.tensor, k: tl.tensor, v: tl.tensor, decay: tl.tensor, beta: tl.tensor
) -> tl.tensor:
    """The state `[keys, values]` after a token with key `k` and value `v`; `decay` is a number, or
    `[keys, 1]`."""
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + _NORM_EPS)
    state *= decay
    known = tl.sum(state * k[:, None], axis=0)
    return state + k[:, None] * ((v - known) * beta)[None, :]


@triton.jit
def _rule_kernel(
    x_ptr: tl.tensor,
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
    kept_conv_ptr: tl.tensor,
    kept_k_ptr: tl.tensor,
    kept_v_ptr: tl.tensor,
    kept_g_ptr: tl.tensor,
    kept_beta_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    Q0: tl.constexpr,
    K0: tl.constexpr,
    V0: tl.constexpr,
    B0: tl.constexpr,
    A0: tl.constexpr,
    QK_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BA_STEP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    KEEP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute some values of one head of one request, token after token. `EACH` is the number of
    its tokens; 0: `bounds_ptr` has it. If `KEEP`, the tokens' inputs are stored instead of the
    state."""
    request = tl.program_id(2)
    head = tl.program_id(1)
    key_head, nth = head // REPEATS, head % REPEATS
    heads = KEY_HEADS * REPEATS
    channels = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
    keys = tl.arange(0, BLOCK_K)
    is_key = keys < KEY_DIM
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < VALUE_DIM
    # These reads precede the wait: no other kernel of the step writes the layer's states, and slots
    # were written before the embedding lookup, which does not start early.
    first = tl.load(read_ptr + request)
    slot = tl.load(write_ptr + request)
    conv = conv_ptr + first * channels * (KERNEL - 1)
    place = keys[:, None] * VALUE_DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    size = KEY_DIM * VALUE_DIM
    state = tl.load(temporal_ptr + (first * heads + head) * size + place, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)
    q_channels = key_head * KEY_DIM + keys
    k_channels = KEY_HEADS * KEY_DIM + q_channels
    v_channels = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    qt0, qt1, qt2, qt3, q_1st, q_2nd, q_3rd = convolution(
        conv, weight_ptr, q_channels, is_key, KERNEL
    )
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
    # One program of each value head writes its gates, one of each key head its query and key.
    has_gates = tl.program_id(0) == 0
    has_keys = has_gates & (nth == 0)
    state = state.to(tl.float32)
    kept = temporal_ptr.dtype.element_ty
    track_len = begin * 0
    if TRACK:
        track_len = tl.load(track_lens_ptr + request)
    q_cols = Q0 + key_head * QK_STEP + keys
    k_cols = K0 + key_head * QK_STEP + keys
    v_cols = V0 + key_head * V_STEP + nth * VALUE_DIM + values
    b_col = B0 + key_head * BA_STEP + nth
    a_col = A0 + key_head * BA_STEP + nth
    row = x_ptr + begin * stride
    xq = tl.load(row + q_cols, mask=is_key, other=0.0)
    xk = tl.load(row + k_cols, mask=is_key, other=0.0)
    xv = tl.load(row + v_cols, mask=is_value, other=0.0)
    b = tl.load(row + b_col).to(tl.float32)
    a = tl.load(row + a_col).to(tl.float32)
    for token in range(begin, end):
        q = activated(xq, q_1st, qt0)
        k = activated(xk, k_1st, kt0)
        v = activated(xv, v_1st, vt0)
        beta = 1.0 / (1.0 + tl.exp(-b))
        step = a + bias
        if KEEP:
            own_conv = kept_conv_ptr + token * channels
            own_v = kept_v_ptr + (token * heads + head) * VALUE_DIM
            tl.store(own_conv + v_channels, xv, mask=is_value)
            tl.store(own_v + values, v, mask=is_value)
            if has_keys:
                own_k = kept_k_ptr + (token * KEY_HEADS + key_head) * KEY_DIM
                tl.store(own_conv + q_channels, xq, mask=is_key)
                tl.store(own_conv + k_channels, xk, mask=is_key)
                tl.store(own_k + keys, k, mask=is_key)
        if EACH != 1:
            q_1st, q_2nd, q_3rd = q_2nd + xq * qt1, q_3rd + xq * qt2, xq * qt3
            k_1st, k_2nd, k_3rd = k_2nd + xk * kt1, k_3rd + xk * kt2, xk * kt3
            v_1st, v_2nd, v_3rd = v_2nd + xv * vt1, v_3rd + xv * vt2, xv * vt3
            # The next token's inputs are loaded while this one is computed.
            row = x_ptr + tl.minimum(token + 1, end - 1) * stride
            xq = tl.load(row + q_cols, mask=is_key, other=0.0)
            xk = tl.load(row + k_cols, mask=is_key, other=0.0)
            xv = tl.load(row + v_cols, mask=is_value, other=0.0)
            b = tl.load(row + b_col).to(tl.float32)
            a = tl.load(row + a_col).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _NORM_EPS) * scale
        g = -rate * softplus(step)
        state = advanced(state, k, v, tl.exp(g), beta)
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (token * heads + head) * VALUE_DIM + values, out, mask=is_value)
        if KEEP:
            if has_gates:
                tl.store(kept_g_ptr + token * heads + head, g)
                tl.store(kept_beta_ptr + token * heads + head, beta)
            # The next decode step would read the state as stored.
            state = state.to(kept).to(tl.float32)
        if TRACK:  # noqa: SIM102 - known when this is compiled
            if token - begin + 1 == track_len:
                snapshot = tl.load(track_ptr + request)
                rounded = state.to(kept)
                tl.store(temporal_ptr + (snapshot * heads + head) * size + place, rounded, inside)
                # Later tokens continue from the snapshot as stored.
                state = rounded.to(tl.float32)
    if not KEEP:
        tl.store(temporal_ptr + (slot * heads + head) * size + place, state.to(kept), mask=inside)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _finish_kernel(
    x_ptr: tl.tensor,
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
    Z0: tl.constexpr,
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
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise and gate one head of a token. Rows after the tokens, which a verification does not
    have, write a part of a head's conv state, because all programs of `_rule_kernel` read it."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    key_head, nth = head // REPEATS, head % REPEATS
    heads = KEY_HEADS * REPEATS
    values = tl.arange(0, BLOCK_V)
    is_value = values < VALUE_DIM
    own = nth * VALUE_DIM + values
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
        at = (row * heads + head) * VALUE_DIM + values
        # Padding tokens were not computed, and must not spread stale memory.
        x = tl.load(attended_ptr + at, mask=is_value, other=0.0)
        x = tl.where(row < known, x, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / VALUE_DIM + eps)
        gate = tl.load(
            x_ptr + row * stride + Z0 + key_head * V_STEP + own, mask=is_value, other=0.0
        )
        wide = gate.to(tl.float32)
        normed = x * scale * weight * (wide / (1.0 + tl.exp(-wide)))
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
        Q0, K0, V0, QK_STEP, V_STEP, KEY_HEADS, REPEATS, KEY_DIM, VALUE_DIM, KERNEL, PAST, BLOCK_K,
        BLOCK_V, TRACK,
    )  # fmt: skip


def attend_linearly(
    x: torch.Tensor,
    layout: DeltaLayout,
    gates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    states: DeltaStates,
) -> torch.Tensor:
    """Update the states of all requests, or keep their inputs, and compute the output projection's
    input.

    Args:
        x: `[num_tokens, columns]` with dense rows: the projections of the layer's input.
        gates: The convolution's weight `[channels, kernel]`, then the log of the decay rate and the
            bias of the time step, `[num_heads]` each; all fp32.
        norm: Weight `[value_dim]` and epsilon of the gated norm.
        states: Read and, without `kept`, overwritten. Without `bounds`, `num_tokens` is a multiple
            of `bs`.

    Returns:
        `[num_tokens, num_heads * value_dim]` of the dtype of `x`; zeros after the tokens of all
        requests.
    """
    num_tokens = len(x)
    conv_weight, a_log, dt_bias = gates
    weight, eps = norm
    tracks, requests = states.track_lens is not None, len(states.slots)
    each = num_tokens // requests if states.bounds is None else 0
    kept = states.kept
    heads, value_dim = layout.key_heads * layout.repeats, layout.value_dim
    assert x.stride(1) == 1 and conv_weight.is_contiguous()
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    assert states.bounds is not None or requests * each == num_tokens
    assert kept is None or (each > 0 and not tracks)
    assert layout.kernel <= MOST_TAPS
    attended = torch.empty((num_tokens, heads, value_dim), dtype=torch.float32, device=x.device)
    out = torch.empty((num_tokens, heads * value_dim), dtype=x.dtype, device=x.device)
    indices = states.indices
    inputs = (x,) * 5 if kept is None else kept
    has_more = each == 0 or requests > _FEW_REQUESTS
    block_v = min(_VALUES_AT_ONCE[has_more], triton.next_power_of_2(value_dim))
    block_k = triton.next_power_of_2(layout.key_dim)
    shape = {
        "Q0": layout.q, "K0": layout.k, "V0": layout.v, "QK_STEP": layout.qk_step,
        "V_STEP": layout.v_step, "KEY_HEADS": layout.key_heads, "REPEATS": layout.repeats,
        "KEY_DIM": layout.key_dim, "VALUE_DIM": value_dim, "KERNEL": layout.kernel,
        "BLOCK_K": block_k, "EACH": each, "TRACK": tracks, **early_start(x),
    }  # fmt: skip
    _rule_kernel[(triton.cdiv(value_dim, block_v), heads, requests)](
        x, states.conv, states.temporal, conv_weight, a_log, dt_bias, attended, *indices,
        *inputs, x.stride(0), layout.key_dim**-0.5, B0=layout.b, A0=layout.a,
        BA_STEP=layout.ba_step, KEEP=kept is not None, BLOCK_V=block_v, num_warps=_WARPS, **shape,
    )  # fmt: skip
    rows_of_states = requests * CONV_PARTS.value if kept is None else 0
    _finish_kernel[(heads, num_tokens + rows_of_states)](
        x, states.conv, attended, weight, out, *indices, num_tokens, requests, x.stride(0), eps,
        Z0=layout.z, PAST=triton.next_power_of_2(layout.kernel - 1),
        BLOCK_V=triton.next_power_of_2(value_dim), num_warps=1, **shape,
    )  # fmt: skip
    return out
