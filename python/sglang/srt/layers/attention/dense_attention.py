"""Attention of long runs of new tokens by cuDNN, the fastest kernels on Hopper.

`benchmark/results/` has the measurements. cuDNN makes a plan for each new shape, which takes the
CPU about 35 ms, longer than the attention of a layer. So it gets few shapes: all lengths are
multiples of `UNIT`. `plan_dense` cuts a request to fit, and Triton kernels compute the other
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.attention.partial_attention import heads_first

UNIT = 1024
"""Lengths are multiples of this many tokens. From this length on, cuDNN is faster than Triton."""


@dataclass(frozen=True, slots=True)
class DensePlan:
    """How the attention of one request's new tokens is cut.

    Keys `[0, whole)` are read in pieces, which every query sees completely. Keys from `whole` to
    the plan's last new token are read causally. If these begin in the prefix, `pad` query rows,
    whose output is dropped, are put first, so that row i sees keys up to i.
    """

    pieces: list[tuple[int, int]]
    """Ascending ranges of tokens, of lengths `UNIT` times a power of 2."""
    whole: int
    """Tokens read in pieces, a multiple of `UNIT`."""
    pad: int
    """Rows put before the first query: tokens of the prefix from `whole` on."""
    count: int
    """New tokens that cuDNN computes, or 0; `pad + count` is a multiple of `UNIT`."""


def plan_dense(prefix: int, num_new: int) -> DensePlan:
    """Cut a request that computes `num_new` tokens after `prefix`."""
    pad = prefix % UNIT
    whole = prefix - pad
    count = (pad + num_new) // UNIT * UNIT - pad
    if count < UNIT // 2:
        return DensePlan([], 0, 0, 0)
    return DensePlan(cut_prefix(whole), whole, pad, count)


def cut_prefix(whole: int, most_units: int | None = None) -> list[tuple[int, int]]:
    """Ascending ranges of the first `whole` tokens, of lengths `UNIT` times a power of 2.

    Args:
        whole: A multiple of `UNIT`.
        most_units: Longest piece, in `UNIT`s; None: no limit.
    """
    pieces, begin = [], 0
    while begin < whole:
        units = (whole - begin) // UNIT
        if most_units is not None:
            units = min(units, most_units)
        end = begin + (UNIT << units.bit_length() - 1)
        pieces.append((begin, end))
        begin = end
    return pieces


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to all keys; with `causal`, from row i to the keys up to i.

    Args:
        q: bf16 or fp16 `[num_tokens, num_heads, head_dim]` on a CUDA device.
        k: `[num_keys, num_kv_heads, head_dim]`; `v` likewise, with `v_head_dim`.

    Returns:
        Contiguous `[num_tokens, num_heads, v_head_dim]`, and the scores' log-sum-exp (natural),
        contiguous fp32 `[num_heads, num_tokens]`.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        heads_first(q), heads_first(k), heads_first(v), None, True, 0.0, causal, scale=scaling
    )
    out: torch.Tensor = found[0][0].transpose(0, 1)
    lse: torch.Tensor = found[1].reshape(q.shape[1], q.shape[0])
    return out.contiguous(), lse.contiguous()
