"""The first half of an output projection by groups of heads (DeepSeek-V4), for few tokens.

Each group of features has a matrix of its own. Reading the weights is the bound. The tokens are one
block of a product, so that all use what a program reads.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.gemv import gemv, plan

MOST_TOKENS: Final = 64
"""Most tokens that the kernel takes; for more, a product of batches is faster."""
LAUNCH: Final = (16, 256, 4, 3)
"""Outputs and inputs of a block, warps, stages. An H200 has a program for each 60 outputs of 8
groups of 1,024."""


@triton.jit(do_not_specialize=["tokens"])
def _group_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    GROUPS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(OUTPUTS / BLOCK_O, GROUPS)`: some outputs of a group, of all tokens."""
    group = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = outputs < OUTPUTS
    token = tl.arange(0, BLOCK_T)
    is_token = token < tokens
    at = tl.arange(0, BLOCK_I)
    rows = weight_ptr + (group * OUTPUTS + outputs).to(tl.int64)[:, None] * INPUTS + at[None, :]
    own = x_ptr + (token.to(tl.int64) * GROUPS + group)[None, :] * INPUTS + at[:, None]
    await_kernels_before(EARLY)
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for begin in tl.range(0, INPUTS, BLOCK_I, num_stages=STAGES):
        inside = begin + at < INPUTS
        weight = tl.load(rows + begin, mask=is_output[:, None] & inside[None, :], other=0.0)
        x = tl.load(own + begin, mask=inside[:, None] & is_token[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="tf32x3")
    to = out_ptr + (token.to(tl.int64) * GROUPS + group)[None, :] * OUTPUTS + outputs[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


def multiply_by_group(
    x: torch.Tensor, weight: torch.Tensor, *, launch: tuple[int, int, int, int] = LAUNCH
) -> torch.Tensor:
    """Multiply each group of a token's features with the group's matrix.

    Args:
        x: Contiguous `[num_tokens, groups, inputs]`.
        weight: Contiguous `[groups, outputs, inputs]`.
        launch: In the form of `LAUNCH`.

    Returns:
        `[num_tokens, groups, outputs]`, summed in fp32.
    """
    num_tokens, groups, inputs = x.shape
    outputs = weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[::2] == (groups, inputs)
    out = x.new_empty((num_tokens, groups, outputs))
    if num_tokens > MOST_TOKENS:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
    config = plan(groups * outputs, inputs) if num_tokens == 1 and outputs % 8 == 0 else None
    if config is not None:
        gemv(x.view(1, -1), weight.view(-1, inputs), None, out.view(1, -1), config, groups=groups)
        return out
    block_o, block_i, num_warps, stages = launch
    if x.element_size() == 4:
        block_i //= 4
    _group_kernel[(triton.cdiv(outputs, block_o), groups)](
        x, weight, out, num_tokens, GROUPS=groups, OUTPUTS=outputs, INPUTS=inputs,
        BLOCK_T=max(16, triton.next_power_of_2(num_tokens)), BLOCK_O=block_o,
        BLOCK_I=min(block_i, max(16, triton.next_power_of_2(inputs))), STAGES=stages,
        num_warps=num_warps, **early_start(x),
    )  # fmt: skip
    return out
