"""Products with fp8 weights that kernels compute in a model's steps, each against the definition:
the dequantized weight times the rounded input of this very call, in fp32.

Importing this module needs triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from rigs.models.scaled_products import dequantized, of, rounded_activations
from sglang.srt.layers.cuda_kernels import FusedKernels
from sglang.srt.layers.triton_ops.arguments import (
    ExpertWeights,
    RoundedRows,
    ScaledWeight,
    Weight,
)


@dataclass(frozen=True, slots=True)
class ProductError:
    """Error of one call of a kernel, relative to the norm of the right result."""

    kernel: str
    num_tokens: int
    error: float


@contextmanager
def checked_products(*, replaces: bool = False) -> Iterator[list[ProductError]]:
    """The errors of all calls meanwhile. No step may run as a graph.

    Args:
        replaces: If true, the model goes on with the right results.
    """
    found: list[ProductError] = []

    def check(name: str, want: Callable[..., torch.Tensor | None]) -> Any:
        run = getattr(FusedKernels, name)

        def checked(x: torch.Tensor | RoundedRows, *args: Any, **options: Any) -> Any:
            # The reference comes first, because the call may overwrite its input.
            right = want(x, *args)
            got = run(x, *args, **options)
            if right is None:
                return got
            result = args[1] if got is None else got
            error = (result.float() - right).norm() / right.norm()
            found.append(ProductError(name, len(x), float(error)))
            if replaces:
                result.copy_(right)
            return got

        return mock.patch.object(FusedKernels, name, staticmethod(checked))

    with ExitStack() as stack:
        for name, want in (
            ("multiply_scaled", _linear_with_bias),
            ("scaled_gated_gemv", _gated),
            ("run_experts", _experts),
            ("run_routed_experts", _routed),
        ):
            stack.enter_context(check(name, want))
        yield found


def _linear(x: torch.Tensor | RoundedRows, weight: Weight) -> torch.Tensor:
    """`x @ weight.T` in fp32."""
    if isinstance(weight, torch.Tensor):
        assert isinstance(x, torch.Tensor)
        return F.linear(x.float(), weight.float())
    if isinstance(x, RoundedRows):
        scales = x.scales[: len(x)].repeat_interleave(weight.group, dim=1)
        operand = x.elements[: len(x)].float() * scales
    else:
        operand = rounded_activations(x, weight.group) if weight.is_fp8 else x.float()
    return F.linear(operand, dequantized(weight))


def _linear_with_bias(
    x: torch.Tensor | RoundedRows, weight: ScaledWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    product = _linear(x, weight)
    return product if bias is None else product + bias.float()


def _gated(x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up`, rounded where the kernels round."""
    gate, up = _linear(x, weight).to(x.dtype).chunk(2, dim=-1)
    return (F.silu(gate.float()).to(x.dtype).float() * up.float()).to(x.dtype).float()


def _expert(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    return _linear(_gated(x, gate_up).to(x.dtype), down)


def _routed(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: Weight, down: Weight
) -> torch.Tensor | None:
    if isinstance(gate_up, torch.Tensor):
        return None
    out = torch.zeros(x.shape, device=x.device)
    for number in range(gate_up.shape[0]):
        scales = weights.where(ids == number, 0.0).sum(dim=1, keepdim=True)
        out += scales * _expert(x, of(gate_up, number), of(down, number))
    return out


def _experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor | None:
    top_k = ids.shape[1]
    out = _routed(x, weights[:, :top_k], ids, experts.gate_up, experts.down)
    if out is not None and experts.shared is not None:
        out += weights[:, top_k:] * _expert(x, *experts.shared)
    return out
