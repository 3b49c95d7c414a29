"""States of linear attention after the accepted tokens of a verification, in one kernel for all
layers.

`fused_delta_net.py` verifies, and keeps the inputs that are replayed here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.arguments import DeltaInputs
from sglang.srt.layers.triton_ops.conv_states import CONV_PARTS, keep_conv_states
from sglang.srt.layers.triton_ops.fused_delta_net import advanced

_VALUES_AT_ONCE = 32
"""Values of a head per program."""
_WARPS = 2
_PROGRAMS = 4096
"""Enough programs to fill a device. If there is more work, a program has several layers: a commit
of snapshots skips most requests, and starting programs that have nothing to do takes longer."""


@triton.jit(do_not_specialize=["layers", "at_once"])
def _advance_kernel(
    inputs_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    temporal_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    layers: tl.tensor,
    at_once: tl.tensor,
    tokens: tl.tensor,
    temporal_stride: tl.tensor,
    conv_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALL_V: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    """Advance some values of one head's state of a request in `at_once` layers; the first program
    of a head has its conv state too. `tokens` is the number of a layer's tokens in the buffers."""
    heads: tl.constexpr = KEY_HEADS * REPEATS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    request = tl.program_id(1)
    slot = tl.load(slots_ptr + request)
    count = tl.load(counts_ptr + request)
    target = tl.load(targets_ptr + request)
    is_as_it_was = (count == 0) & (slot == target)
    if (target == 0) | is_as_it_was:
        return
    keys = tl.arange(0, BLOCK_K)
    is_key = keys < KEY_DIM
    values = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < VALUE_DIM
    inside = is_key[:, None] & is_value[None, :]
    place = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    size: tl.constexpr = heads * KEY_DIM * VALUE_DIM
    kept = temporal_ptr.dtype.element_ty
    first = tl.program_id(2).to(tl.int64) * at_once
    for layer in range(first, tl.minimum(first + at_once, layers)):
        begin = layer * tokens + request * EACH
        end = begin + count
        states = temporal_ptr + layer * temporal_stride
        state = tl.load(states + slot * size + place, mask=inside, other=0.0).to(tl.float32)
        for token in range(begin, end):
            row = token * heads + head
            own_k = k_ptr + (token * KEY_HEADS + head // REPEATS) * KEY_DIM
            k = tl.load(own_k + keys, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + row * VALUE_DIM + values, mask=is_value, other=0.0)
            g, beta = tl.load(g_ptr + row), tl.load(beta_ptr + row)
            state = advanced(state, k, v.to(tl.float32), tl.exp(g), beta)
            state = state.to(kept).to(tl.float32)
        tl.store(states + target * size + place, state.to(kept), mask=inside)
        if block == 0:
            # The kept inputs lie like conv states: all queries, all keys, all values.
            for part in range(CONV_PARTS):
                keep_conv_states(
                    inputs_ptr, conv_ptr + layer * conv_stride, head, part, slot, target, target,
                    count, begin, end, CHANNELS, 0, KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM,
                    KEY_DIM, REPEATS * VALUE_DIM, KEY_HEADS, REPEATS, KEY_DIM, VALUE_DIM, KERNEL,
                    PAST, BLOCK_K, ALL_V, False,
                )  # fmt: skip


def advance_states(
    inputs: DeltaInputs,
    num_draft_tokens: int,
    states: tuple[torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the states after the first tokens of each request; see `commit_verified`.

    Args:
        inputs: Inputs of all layers, each `[layers, most_tokens, ...]`, request by request.
        num_draft_tokens: Tokens of each request in `inputs`.
        states: Recurrent states `[layers, slots, num_heads, key_dim, value_dim]`. Convolution
            states `[layers, slots, channels, kernel - 1]`. Both contiguous.
        indices: int64 `[bs]` each: slots to read, tokens before the new state, slots to write. A
            request that writes slot 0 is left out.
    """
    temporal, conv = states
    slots, counts, targets = indices
    layers, tokens, key_heads, key_dim = inputs.k.shape
    heads, value_dim = inputs.v.shape[2:]
    kernel = conv.shape[-1] + 1
    assert temporal.is_contiguous() and conv.is_contiguous()
    assert len(slots) * num_draft_tokens <= tokens
    block_v = min(_VALUES_AT_ONCE, triton.next_power_of_2(value_dim))
    of_layer = triton.cdiv(value_dim, block_v) * heads
    at_once = min(layers, triton.cdiv(of_layer * len(slots) * layers, _PROGRAMS))
    _advance_kernel[(of_layer, len(slots), triton.cdiv(layers, at_once))](
        *inputs, temporal, conv, slots, counts, targets, layers, at_once, tokens,
        temporal.stride(0), conv.stride(0), KEY_HEADS=key_heads, REPEATS=heads // key_heads,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KERNEL=kernel,
        PAST=triton.next_power_of_2(kernel - 1), BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v, ALL_V=triton.next_power_of_2(value_dim), EACH=num_draft_tokens,
        num_warps=_WARPS,
    )  # fmt: skip
