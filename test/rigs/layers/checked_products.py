"""Products with fp8 weights that kernels compute in a model's steps, each against the definition:
the dequantized weight times the rounded input of this very call, in fp32.

Importing this module needs triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F

from rigs.models.scaled_products import dequantized, of, rounded_activations
from sglang.srt.layers.activation import clamped_gate
from sglang.srt.layers.cuda_kernels import FusedKernels
from sglang.srt.layers.triton_ops.arguments import (
    ClampedGate,
    ExpertActivation,
    ExpertBiases,
    ExpertWeights,
    RoundedRows,
    ScaledWeight,
    Weight,
)

_RULES: Final = ("activation", "biases")
"""Options of kernels that change results."""


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
            rules = {name: options[name] for name in _RULES if name in options}
            right = want(x, *args, **rules)
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


def _gated(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor | None = None,
    *,
    activation: ExpertActivation = "silu",
) -> torch.Tensor:
    """`silu(gate) * up`, or that of a clamped gate, rounded where the kernels round."""
    both = _linear(x, weight).to(x.dtype)
    if isinstance(activation, ClampedGate):
        return clamped_gate(both.float(), activation).to(x.dtype).float()
    gate, up = both.chunk(2, dim=-1)
    return (F.silu(gate.float()).to(x.dtype).float() * up.float()).to(x.dtype).float()


def _expert(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: ExpertActivation,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
) -> torch.Tensor:
    if activation == "silu" and first is None:
        inner = _gated(x, gate_up)
    else:
        assert isinstance(activation, ClampedGate), "no other experts with scales have biases"
        both = _linear(x, gate_up) + (0.0 if first is None else first.float())
        inner = clamped_gate(both.to(x.dtype).float(), activation)
    out = _linear(inner.to(x.dtype), down)
    return out if last is None else out + last.float()


def _routed(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
    num_experts: int | None = None,
) -> torch.Tensor | None:
    if isinstance(gate_up, torch.Tensor):
        return None
    first, last = biases or (None, None)
    out = torch.zeros(x.shape, device=x.device)
    for number in range(gate_up.shape[0]):
        scales = weights.where(ids == number, 0.0).sum(dim=1, keepdim=True)
        own_first, own_last = (None if one is None else one[number] for one in (first, last))
        out += scales * _expert(
            x, of(gate_up, number), of(down, number), activation, own_first, own_last
        )
    return out


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    part: torch.Tensor | None = None,
) -> torch.Tensor | None:
    top_k = ids.shape[1]
    out = _routed(
        x, weights[:, :top_k], ids, experts.gate_up, experts.down,
        activation=experts.activation, biases=experts.biases,
    )  # fmt: skip
    if out is not None and experts.shared is not None:
        out += weights[:, top_k:] * _expert(x, *experts.shared, "silu", None, None)
    return out
