"""Linear layers whose weights have scales: the best product for each number of tokens."""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.scaled_gemv import scaled_gemv
from sglang.srt.layers.triton_ops.scaled_product import multiply_fp8, multiply_fp8_by_library

_FEW_TOKENS: Final = 128
"""Up to here the kernels of this project are faster than the library's."""


def multiply_scaled(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in fp32.

    If the weight is fp8, `x` is rounded as by `quantize_activations`, whatever the number of
    tokens.

    Args:
        x: `[num_tokens, inputs]`, dense rows of any stride, bf16 or fp16.
        weight: `[outputs, inputs]`; an fp8 weight's groups are of 128 inputs or whole rows.
        bias: `[outputs]`.
        out: Contiguous tensor for the result, `[num_tokens, outputs]`; None: a new one.
        out_dtype: Dtype of a new result; None: that of `x`.
    """
    tokens, outputs = len(x), weight.shape[0]
    dtype = out.dtype if out is not None else out_dtype or x.dtype
    if tokens > _FEW_TOKENS and x.is_cuda:
        result = multiply_fp8_by_library(x, weight, bias, dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if tokens == 1:
        scaled_gemv(x, weight, bias, out)
    elif tokens:
        multiply_fp8(x, weight, bias, out)
    return out
