"""Linear layers whose weights have scales: the best product for each number of tokens."""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.triton_ops.scaled.gemv import scaled_gemv
from sglang.srt.layers.triton_ops.scaled.int4 import dequantize_int4
from sglang.srt.layers.triton_ops.scaled.product import (
    multiply_fp8_by_library,
    multiply_on_tensor_cores,
)

_FEW_TOKENS: Final = 64
_FEW_OUTPUTS: Final = 4096
_FEW_TOKENS_OF_INT4: Final = 256
"""For fp8 weights, the kernels of this project take up to `_FEW_TOKENS` tokens, and twice that for
at most `_FEW_OUTPUTS` outputs; for 4-bit weights up to `_FEW_TOKENS_OF_INT4`. For more tokens the
library is faster, even if it has to dequantize 4-bit weights first."""


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
    assert x.dtype in (torch.bfloat16, torch.float16), x.dtype
    dtype = out.dtype if out is not None else out_dtype or x.dtype
    few = _FEW_TOKENS * (2 if outputs <= _FEW_OUTPUTS else 1)
    is_many = tokens > (few if weight.is_fp8 else _FEW_TOKENS_OF_INT4)
    if is_many and not weight.is_fp8:
        return _dequantize_and_multiply(x, weight, bias, out, dtype)
    if is_many and x.is_cuda and outputs % 16 == 0 and weight.shape[1] % 16 == 0:
        result = multiply_fp8_by_library(x, weight, bias, dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if tokens == 1:
        scaled_gemv(x, weight, bias, out)
    elif tokens:
        multiply_on_tensor_cores(x, weight, bias, out)
    return out


def _dequantize_and_multiply(
    x: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`multiply_scaled` for many tokens and 4-bit weights."""
    plain = dequantize_int4(weight, x.dtype).t()
    if dtype == x.dtype:
        if bias is None:
            return torch.mm(x, plain) if out is None else torch.mm(x, plain, out=out)
        return torch.addmm(bias, x, plain) if out is None else torch.addmm(bias, x, plain, out=out)
    result = torch.mm(x, plain, out_dtype=dtype) if x.is_cuda else torch.mm(x, plain).to(dtype)
    if bias is not None:
        result.add_(bias)
    return result if out is None else out.copy_(result)
