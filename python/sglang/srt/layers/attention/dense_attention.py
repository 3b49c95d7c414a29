"""Attention of long runs of new tokens by cuDNN, which on Hopper outruns every other way here.

`benchmark/results/` has the table. cuDNN makes a plan for each new shape, which takes some 35 ms
of the CPU, more than the attention of a layer. So it is asked for few shapes only: all lengths
are multiples of `UNIT`. `plan_dense` cuts a request to fit; what is left over goes elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.attention.partial_attention import heads_first

UNIT = 1024
"""Tokens that lengths are multiples of; from this length on cuDNN is faster than Triton."""


@dataclass(frozen=True, slots=True)
class DensePlan:
    """How the attention of one request's new tokens is cut.

    Its keys, in token order: `[0, whole)` in pieces that every query sees all of; then those up
    to the last new token that takes part, causally. The first of these may be a prefix's end:
    the queries then get rows before them that mean nothing, so that row i sees keys to i.
    """

    pieces: list[tuple[int, int]]
    """Ascending ranges of tokens, of lengths `UNIT` times a power of 2."""
    whole: int
    pad: int
    """Rows before the first query: tokens of the prefix behind `whole`."""
    count: int
    """New tokens that take part; `pad + count` is a multiple of `UNIT`. 0: none does."""


def plan_dense(prefix: int, num_new: int) -> DensePlan:
    """Cut a request that computes `num_new` tokens after `prefix`."""
    pad = prefix % UNIT
    whole = prefix - pad
    count = (pad + num_new) // UNIT * UNIT - pad
    if count < UNIT // 2:
        return DensePlan([], 0, 0, 0)
    pieces, begin = [], 0
    while begin < whole:
        size = 1 << ((whole - begin) // UNIT).bit_length() - 1
        pieces.append((begin, begin + size * UNIT))
        begin += size * UNIT
    return DensePlan(pieces, whole, pad, count)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to all keys, or causally where both are the same tokens.

    Args:
        q: bf16 or fp16 `[num_tokens, num_heads, head_dim]` on a CUDA device.
        k: `[num_keys, num_kv_heads, head_dim]`; `v` likewise, but for its `v_head_dim`.

    Returns:
        Contiguous `[num_tokens, num_heads, v_head_dim]`, and natural logarithms of the masses,
        contiguous fp32 `[num_heads, num_tokens]`.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        heads_first(q), heads_first(k), heads_first(v), None, True, 0.0, causal, scale=scaling
    )
    out: torch.Tensor = found[0][0].transpose(0, 1)
    lse: torch.Tensor = found[1].reshape(q.shape[1], q.shape[0])
    return out.contiguous(), lse.contiguous()
