"""Linear layers whose weights have scales: the best product for each number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight, Weight
from sglang.srt.layers.triton_ops.gemv import plan
from sglang.srt.layers.triton_ops.norm import rounded_norm_
from sglang.srt.layers.triton_ops.rounding import (
    empty_rounded,
    quantize_activations,
    quantize_gated,
)
from sglang.srt.layers.triton_ops.scaled.gemv import PlainProduct, scaled_gemv
from sglang.srt.layers.triton_ops.scaled.int4 import dequantize_int4
from sglang.srt.layers.triton_ops.scaled.product import (
    more_rows_of_library,
    multiply_fp8_by_library,
    multiply_on_tensor_cores,
)

_FEW_TOKENS: Final = 64
_FEW_OUTPUTS: Final = 4096
_FEW_TOKENS_OF_INT4: Final = 256
"""For fp8 weights, the kernels of this project take up to `_FEW_TOKENS` tokens, and twice that for
at most `_FEW_OUTPUTS` outputs; for 4-bit weights up to `_FEW_TOKENS_OF_INT4`. For more tokens a
library is faster, even if it has to dequantize 4-bit weights first."""


def round_rows(x: torch.Tensor, weight: ScaledWeight, *, is_gated: bool = False) -> RoundedRows:
    """Round activations for a product with `weight`, which is fp8.

    Args:
        x: `[num_tokens, inputs]`, dense rows of any stride, bf16 or fp16.
        is_gated: If true, `x` is contiguous `[num_tokens, 2 * inputs]`, gate, then up, and the
            activations are `silu_and_mul(x)`.
    """
    round_ = quantize_gated if is_gated else quantize_activations
    elements, scales = round_(x, weight.group, more_rows=_more_rows(len(x), weight))
    return RoundedRows(elements=elements, scales=scales, num_tokens=len(x), dtype=x.dtype)


def empty_rows(tokens: int, weight: ScaledWeight, dtype: torch.dtype) -> RoundedRows | None:
    """Memory for `round_rows`, for a kernel that rounds its own result; None: the product needs
    rows of zeros after the tokens."""
    if _more_rows(tokens, weight):
        return None
    device = weight.elements.device
    elements, scales = empty_rounded(tokens, weight.shape[1], weight.group, device)
    return RoundedRows(elements=elements, scales=scales, num_tokens=tokens, dtype=dtype)


def add_and_round_(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: ScaledWeight,
    is_centered: bool = False,
) -> RoundedRows:
    """`residual += x`, and its norm as `round_rows` rounds it, in one launch; see
    `rounded_norm_`."""
    tokens, features = residual.shape
    rows = tokens + _more_rows(tokens, weight)
    elements, scales = empty_rounded(rows, features, weight.group, residual.device)
    out = RoundedRows(elements=elements, scales=scales, num_tokens=tokens, dtype=residual.dtype)
    rounded_norm_(x, residual, norm_weight, eps, out, is_centered)
    return out


def multiply_scaled(
    x: torch.Tensor | RoundedRows,
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
        x: `[num_tokens, inputs]`, dense rows of any stride, bf16 or fp16; or the result of
            `round_rows` with this weight, for several tokens.
        weight: `[outputs, inputs]`; an fp8 weight's groups are of 128 inputs or whole rows.
        bias: `[outputs]`.
        out: Contiguous tensor for the result, `[num_tokens, outputs]`; None: a new one.
        out_dtype: Dtype of a new result; None: that of `x`.
    """
    tokens, outputs = len(x), weight.shape[0]
    assert x.dtype in (torch.bfloat16, torch.float16), x.dtype
    dtype = out.dtype if out is not None else out_dtype or x.dtype
    if not isinstance(x, RoundedRows):
        if tokens > _FEW_TOKENS_OF_INT4 and not weight.is_fp8:
            return _dequantize_and_multiply(x, weight, bias, out, dtype)
        if weight.is_fp8 and tokens > 1:
            x = round_rows(x, weight)
    if isinstance(x, RoundedRows) and _by_library(tokens, weight):
        result = multiply_fp8_by_library(x, weight, bias, dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((tokens, outputs), dtype=dtype, device=weight.elements.device)
    if tokens == 1 and not isinstance(x, RoundedRows):
        scaled_gemv(x, weight, bias, out)
    elif tokens:
        multiply_on_tensor_cores(x, weight, bias, out)
    return out


def multiply_together(x: torch.Tensor, weights: Sequence[Weight]) -> list[torch.Tensor] | None:
    """`x @ weight.T` of one token and each weight, in one launch.

    Args:
        x: `[num_tokens, inputs]`, dense rows, bf16 or fp16.
        weights: `[outputs, inputs]` each.

    Returns:
        `[1, outputs]` of the dtype of `x`; None: there are several tokens, or other weights than
        one with scales and one plain.
    """
    if len(x) != 1:
        return None
    scaled = [weight for weight in weights if isinstance(weight, ScaledWeight)]
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(scaled) != 1 or len(plain) != 1 or plan(*plain[0].shape) is None:
        return None
    outs = [x.new_empty((1, weight.shape[0])) for weight in weights]
    of_scaled, of_plain = outs if weights[0] is scaled[0] else outs[::-1]
    scaled_gemv(x, scaled[0], None, of_scaled, beside=PlainProduct(plain[0], of_plain))
    return outs


def _more_rows(tokens: int, weight: ScaledWeight) -> int:
    """Rows of zeros that the product of so many tokens needs after them."""
    return more_rows_of_library(tokens, weight) if _by_library(tokens, weight) else 0


def _by_library(tokens: int, weight: ScaledWeight) -> bool:
    """True if a library multiplies so many tokens and an fp8 weight."""
    outputs, inputs = weight.shape
    few = _FEW_TOKENS * (2 if outputs <= _FEW_OUTPUTS else 1)
    fits = outputs % 16 == 0 and inputs % 16 == 0
    return tokens > few and weight.elements.is_cuda and fits


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
