"""The feed-forward block of a sparse layer: router, routed experts, optional shared expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.distributed.tensor_group import PendingSum, ToAdd
from sglang.srt.layers.fused_kernels import (
    ExpertChoice,
    ExpertWeights,
    fused_kernels,
)
from sglang.srt.layers.gated_mlp import GatedMLP
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.moe.topk import RouterOptions, select_experts
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertOptions:
    """An expert that every token uses."""

    intermediate_size: int
    name: str = "shared_experts"
    """The expert's name in a checkpoint."""
    has_gate: bool = False
    """If true, its output is scaled by the sigmoid of a projection called `{name}_gate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMoeOptions:
    """Sizes of a sparse layer, and the rule that chooses its experts."""

    hidden_size: int
    intermediate_size: int
    """Features of each routed expert."""
    router: RouterOptions
    router_dtype: torch.dtype | None = None
    """Dtype of the router's weight and of its product; None: the model's dtype."""
    has_correction_bias: bool = False
    """True if the router has an `e_score_correction_bias`, kept in fp32."""
    shared: SharedExpertOptions | None = None


class Router(WeightedLayer):
    """Scores the experts for each token and chooses some; replicated on every rank."""

    def __init__(self, options: SparseMoeOptions, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.options = options.router
        count, dtype = self.options.num_experts, options.router_dtype or placement.dtype
        self.weight = replace(placement, dtype=dtype).empty(count, options.hidden_size)
        self.correction_bias = (
            replace(placement, dtype=torch.float32).empty(count)
            if options.has_correction_bias
            else None
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_tokens, hidden_size]` to weights and ids; see `select_experts`."""
        return select_experts(self.logits(x).float(), self.options, self.correction_bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to `[num_tokens, num_experts]` of the weight's dtype."""
        return apply_linear(x.to(self.weight.dtype), self.weight)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)
        if self.correction_bias is not None:
            name = f"{self.prefix}.e_score_correction_bias"
            yield name, WeightSlot.of(self.correction_bias)


class SharedExpertGate(WeightedLayer):
    """The sigmoid that scales a shared expert's output; replicated on every rank."""

    def __init__(self, hidden_size: int, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.weight = placement.empty(1, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to `[num_tokens, 1]`."""
        return apply_linear(x, self.weight).sigmoid_()

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)


class SparseMoeBlock(torch.nn.Module):
    """The feed-forward part of a sparse layer, called like the dense `GatedMLP`."""

    def __init__(self, options: SparseMoeOptions, placement: TensorPlacement) -> None:
        """Raises ValueError: the ranks do not divide the intermediate sizes."""
        super().__init__()
        hidden_size, shared = options.hidden_size, options.shared
        self._group = placement.tp_group
        self.gate = Router(options, placement.at("gate"))
        self.experts = RoutedExperts(
            options.router.num_experts,
            hidden_size,
            options.intermediate_size,
            placement=placement.at("experts"),
        )
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: SharedExpertGate | None = None
        if shared is not None:
            self.shared_expert = GatedMLP(
                hidden_size,
                shared.intermediate_size,
                bias=False,
                placement=placement.at(shared.name),
            )
            if shared.has_gate:
                gate_name = f"{shared.name}_gate"
                self.shared_expert_gate = SharedExpertGate(hidden_size, placement.at(gate_name))
        self._kernels = fused_kernels(placement.device)
        self._choice = self._plan_choice()
        self._few = self._plan_few()

    def _plan_choice(self) -> ExpertChoice:
        """Argument of the kernel that chooses experts."""
        router, gate = self.gate.options, self.shared_expert_gate
        return ExpertChoice(
            top_k=router.top_k,
            is_softmax=router.scoring == "softmax",
            renormalize=router.renormalize,
            factor=router.routed_scaling_factor,
            groups=router.num_groups,
            top_groups=router.topk_groups,
            two_of_group=router.group_score == "top2_sum",
            correction_bias=self.gate.correction_bias,
            has_shared=self.shared_expert is not None,
            shared_gate=None if gate is None else gate.weight,
        )

    def _plan_few(self) -> ExpertWeights | None:
        """Argument of the kernels for few tokens; None: they do not support this layer."""
        experts, shared = self.experts, self.shared_expert
        both: tuple[torch.Tensor, torch.Tensor] | None = None
        if shared is not None:
            both = shared.gate_up_proj.weight, shared.down_proj.weight
            if both[1].shape[1] != experts.features.size:
                return None
        return ExpertWeights(gate_up=experts.gate_up, down=experts.down, shared=both)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[ToAdd, torch.Tensor]:
        """Run router and experts.

        Args:
            x: `[num_tokens, hidden_size]`.
            residual: `[num_tokens, hidden_size]`; its memory may be used.

        Returns:
            The tensor that remains to be added to the residual (None: nothing), and the residual.
        """
        shared_weight: torch.Tensor | None = None
        if self._kernels is None:
            weights, ids = self.gate.forward(x)
            if self.shared_expert_gate is not None:
                shared_weight = self.shared_expert_gate.forward(x)
        else:
            top_k = self._choice.top_k
            weights, ids = self._kernels.choose_experts(self.gate.logits(x), self._choice, x)
            if self._few is not None and self.experts.takes_few(len(x), top_k):
                out = self._kernels.run_experts(x, weights, ids, self._few)
                return self._group.sum_later(out), residual
            if self.shared_expert_gate is not None:
                shared_weight = weights[:, top_k:].to(x.dtype)
            weights = weights[:, :top_k]
        out = self.experts.forward(x, weights, ids)
        if self.shared_expert is None:
            return self._group.sum_later(out), residual
        if shared_weight is not None:
            out.addcmul_(shared_weight, self.shared_expert.part(x))
            return self._group.sum_later(out), residual
        if self._group.size > 1:
            # One sum over the ranks for routed and shared experts.
            return self._group.sum_later(out.add_(self.shared_expert.part(x))), residual
        shared, residual = self.shared_expert.forward(x, residual)
        assert not isinstance(shared, PendingSum), "one rank has all"
        return (out if shared is None else out.add_(shared)), residual
