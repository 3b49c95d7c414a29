"""The end of a Mamba-2 layer's step: gate and norm of each group, and the convolution's states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import DeltaStates, StateSpaceLayout
from sglang.srt.layers.triton_ops.conv_states import _move_conv
from sglang.srt.layers.triton_ops.early_start import EarlyStart, await_kernels_before

_CHANNELS_AT_ONCE = 256
"""Channels of a convolution's state that a program writes."""
INDICES = ["read_ptr", "write_ptr", "track_ptr", "bounds_ptr", "track_lens_ptr"]
"""Parts of one upload: where they begin must not select a kernel."""


@triton.jit(do_not_specialize=["tokens", "requests"], do_not_specialize_on_alignment=INDICES)
def _finish_kernel(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    scanned_ptr: tl.tensor,
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
    GROUPS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAST: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    TRACK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Gate and normalise one group of a token. Rows after the tokens write some channels of a
    request's conv states, because all programs before read them."""
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = VALUES // GROUPS
    nth = tl.arange(0, BLOCK_V)
    is_value = nth < size
    values = group * size + nth
    weight = tl.load(norm_ptr + values, mask=is_value, other=0.0).to(tl.float32)
    after = tl.maximum(row - tokens, 0)
    request, part = after // PARTS, after % PARTS
    first = tl.load(read_ptr + request)
    slot = tl.load(write_ptr + request)
    await_kernels_before(EARLY)
    if row < tokens:
        known = row * 0 + tokens
        if EACH == 0:
            known = tl.load(bounds_ptr + requests)
        # Padding tokens were not computed, and must not spread stale memory.
        scanned = tl.load(scanned_ptr + row * VALUES + values, mask=is_value, other=0.0)
        scanned = tl.where(row < known, scanned.to(tl.float32), 0.0)
        gate = tl.load(x_ptr + row * stride + values, mask=is_value, other=0.0)
        wide = gate.to(tl.float32)
        gated = scanned * (wide / (1.0 + tl.exp(-wide)))
        scale = tl.rsqrt(tl.sum(gated * gated, axis=0) / size + eps)
        to = out_ptr + row * VALUES + values
        tl.store(to, (gated * scale * weight).to(gate.dtype), mask=is_value)
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
    channels = (part * GROUPS + group) * BLOCK_C + tl.arange(0, BLOCK_C)
    _move_conv(
        x_ptr, conv_ptr, first, slot, snapshot, track_len, begin, end, stride, VALUES + channels,
        channels, channels < CHANNELS, CHANNELS, KERNEL, PAST, TRACK,
    )  # fmt: skip


def finish(
    x: torch.Tensor,
    scanned: torch.Tensor,
    layout: StateSpaceLayout,
    norm: tuple[torch.Tensor, float],
    states: DeltaStates,
    early: EarlyStart,
) -> torch.Tensor:
    """Gate and normalise the groups of all tokens, and write the convolution's states. The kernels
    that read these must have been launched.

    Args:
        x: `[num_tokens, columns]` with dense rows: the projections of the layer's input.
        scanned: `[num_tokens, values]`: outputs of the rule; those after the tokens of all requests
            are not read.
        norm: Weight `[values]` and epsilon.
        early: Arguments from `early_start`, if the kernel before makes its call.

    Returns:
        `[num_tokens, values]` of the dtype of `x`; zeros after the tokens of all requests.
    """
    num_tokens, requests = len(x), len(states.slots)
    weight, eps = norm
    each = num_tokens // requests if states.bounds is None else 0
    out = torch.empty((num_tokens, layout.values), dtype=x.dtype, device=x.device)
    block_v = triton.next_power_of_2(layout.values // layout.groups)
    parts = triton.cdiv(layout.channels, _CHANNELS_AT_ONCE * layout.groups)
    _finish_kernel[(layout.groups, num_tokens + requests * parts)](
        x, states.conv, scanned, weight, out, *states.indices, num_tokens, requests, x.stride(0),
        eps, GROUPS=layout.groups,
        VALUES=layout.values, CHANNELS=layout.channels, KERNEL=layout.kernel, BLOCK_V=block_v,
        BLOCK_C=_CHANNELS_AT_ONCE, PAST=triton.next_power_of_2(layout.kernel - 1), PARTS=parts,
        EACH=each, TRACK=states.track_lens is not None, num_warps=max(1, min(8, block_v // 256)),
        **early,
    )  # fmt: skip
    return out
