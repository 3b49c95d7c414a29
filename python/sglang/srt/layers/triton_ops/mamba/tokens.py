"""Mamba-2 of few tokens in two kernels: convolution, time step and rule; `finish.py`.

For decoding and short prefills, where launches take longer than the work. The rule of
`state_space.py` is computed token by token, in fp32 in registers. The convolution reads its inputs
directly from the output of the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import (
    MOST_TAPS,
    DeltaStates,
    StateSpaceLayout,
    StateSpaceWeights,
)
from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.fused_delta_net import activated, convolution, softplus
from sglang.srt.layers.triton_ops.mamba.finish import finish

_FEW_REQUESTS = 2
_FEATURES_AT_ONCE = (16, 32)
"""Features of a head per program: the first for decode steps of at most `_FEW_REQUESTS`, the second
otherwise. Fewer features fill the device; more features recompute B and C less often."""
_WARPS = (2, 4)
"""The second for several tokens of a request, whose convolutions take more registers."""


@triton.jit
def _scan_kernel(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    temporal_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    conv_bias_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    out_ptr: tl.tensor,
    read_ptr: tl.tensor,
    write_ptr: tl.tensor,
    track_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute some features of one head of one request, token after token. `EACH` is the number of
    its tokens; 0: `bounds_ptr` has it."""
    request = tl.program_id(2)
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    values: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = values + 2 * GROUPS * STATE
    nth = tl.arange(0, BLOCK_N)
    is_state = nth < STATE
    features = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_feature = features < HEAD_DIM
    # These reads precede the wait: no other kernel of the step writes the layer's states, and slots
    # were written before the embedding lookup, which does not start early.
    first = tl.load(read_ptr + request)
    slot = tl.load(write_ptr + request)
    conv = conv_ptr + first * CHANNELS * (KERNEL - 1)
    place = features[:, None] * STATE + nth[None, :]
    inside = is_feature[:, None] & is_state[None, :]
    size: tl.constexpr = HEAD_DIM * STATE
    state = tl.load(temporal_ptr + (first * HEADS + head) * size + place, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    x_channels = head * HEAD_DIM + features
    b_channels = values + group * STATE + nth
    c_channels = b_channels + GROUPS * STATE
    x_bias = tl.load(conv_bias_ptr + x_channels, mask=is_feature, other=0.0)
    b_bias = tl.load(conv_bias_ptr + b_channels, mask=is_state, other=0.0)
    c_bias = tl.load(conv_bias_ptr + c_channels, mask=is_state, other=0.0)
    xt0, xt1, xt2, xt3, x_1st, x_2nd, x_3rd = convolution(
        conv, weight_ptr, x_channels, is_feature, KERNEL
    )
    bt0, bt1, bt2, bt3, b_1st, b_2nd, b_3rd = convolution(
        conv, weight_ptr, b_channels, is_state, KERNEL
    )
    ct0, ct1, ct2, ct3, c_1st, c_2nd, c_3rd = convolution(
        conv, weight_ptr, c_channels, is_state, KERNEL
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
    row = x_ptr + begin * stride + values
    new_x = tl.load(row + x_channels, mask=is_feature, other=0.0)
    new_b = tl.load(row + b_channels, mask=is_state, other=0.0)
    new_c = tl.load(row + c_channels, mask=is_state, other=0.0)
    step = tl.load(row + CHANNELS + head).to(tl.float32)
    for token in range(begin, end):
        x = activated(new_x, x_1st + x_bias, xt0)
        b = activated(new_b, b_1st + b_bias, bt0)
        c = activated(new_c, c_1st + c_bias, ct0)
        dt = softplus(step + dt_bias)
        if EACH != 1:
            x_1st, x_2nd, x_3rd = x_2nd + new_x * xt1, x_3rd + new_x * xt2, new_x * xt3
            b_1st, b_2nd, b_3rd = b_2nd + new_b * bt1, b_3rd + new_b * bt2, new_b * bt3
            c_1st, c_2nd, c_3rd = c_2nd + new_c * ct1, c_3rd + new_c * ct2, new_c * ct3
            # The next token's inputs are loaded while this one is computed.
            row = x_ptr + tl.minimum(token + 1, end - 1) * stride + values
            new_x = tl.load(row + x_channels, mask=is_feature, other=0.0)
            new_b = tl.load(row + b_channels, mask=is_state, other=0.0)
            new_c = tl.load(row + c_channels, mask=is_state, other=0.0)
            step = tl.load(row + CHANNELS + head).to(tl.float32)
        state = state * tl.exp(-rate * dt) + (x * dt)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], axis=1) + x * skip
        tl.store(out_ptr + token * values + x_channels, out, mask=is_feature)
        if TRACK:  # noqa: SIM102 - known when this is compiled
            if token - begin + 1 == track_len:
                snapshot = tl.load(track_ptr + request)
                rounded = state.to(kept)
                tl.store(temporal_ptr + (snapshot * HEADS + head) * size + place, rounded, inside)
                # Later tokens continue from the snapshot as stored.
                state = rounded.to(tl.float32)
    tl.store(temporal_ptr + (slot * HEADS + head) * size + place, state.to(kept), mask=inside)


def scan_tokens(
    x: torch.Tensor,
    layout: StateSpaceLayout,
    weights: StateSpaceWeights,
    eps: float,
    states: DeltaStates,
) -> torch.Tensor:
    """Update the states of all requests, and compute the output projection's input.

    Args:
        x: `[num_tokens, columns]` with dense rows: the projections of the layer's input.
        eps: The norm's epsilon.
        states: Read and overwritten. Without `bounds`, `num_tokens` is a multiple of `bs`.

    Returns:
        `[num_tokens, values]` of the dtype of `x`; zeros after the tokens of all requests.
    """
    num_tokens, requests = len(x), len(states.slots)
    tracks = states.track_lens is not None
    each = num_tokens // requests if states.bounds is None else 0
    assert x.stride(1) == 1 and weights.conv.is_contiguous()
    assert states.temporal.is_contiguous() and states.conv.is_contiguous()
    assert states.bounds is not None or requests * each == num_tokens
    assert states.kept is None and layout.kernel <= MOST_TAPS
    scanned = torch.empty((num_tokens, layout.values), dtype=torch.float32, device=x.device)
    has_more = each == 0 or requests > _FEW_REQUESTS
    block_p = min(_FEATURES_AT_ONCE[has_more], triton.next_power_of_2(layout.head_dim))
    early = early_start(x)
    _scan_kernel[(triton.cdiv(layout.head_dim, block_p), layout.heads, requests)](
        x, states.conv, states.temporal, *weights[:-1], scanned, *states.indices, x.stride(0),
        HEADS=layout.heads, GROUPS=layout.groups,
        HEAD_DIM=layout.head_dim, STATE=layout.state_size, KERNEL=layout.kernel, BLOCK_P=block_p,
        BLOCK_N=triton.next_power_of_2(layout.state_size), EACH=each, TRACK=tracks,
        num_warps=_WARPS[each != 1], **early,
    )  # fmt: skip
    return finish(x, scanned, layout, (weights.norm, eps), states, early)
