"""The feed-forward block of a sparse layer: choice of experts, routed experts, optional shared
expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import PendingSum, ToAdd
from sglang.srt.layers.activation import GatedMLP, SquaredReluMLP
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import MergedColumnParallelLinear, apply_linear
from sglang.srt.layers.moe.distributed_experts import DistributedExperts
from sglang.srt.layers.moe.experts import EXPERT_NAMES, ExpertNames, RoutedExperts
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import (
    ExpertActivation,
    ExpertChoice,
    ExpertWeights,
    RoundedRows,
    Weight,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The rule by which a model family scores and chooses experts, by the numbers of config.json.

    Qwen3-MoE, Qwen3-Next: softmax, no groups. DeepSeek-V2's `greedy` and `group_limited_greedy`:
    softmax, `group_score="max"`. DeepSeek-V3's `noaux_tc`: sigmoid, `group_score="top2_sum"`, and a
    correction bias. DeepSeek-V4: square root of softplus, no groups; some layers choose by token.

    Raises:
        ValueError: The numbers contradict one another.
    """

    num_experts: int
    top_k: int
    """Experts for each token."""
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalize: bool = True
    """If true, the weights of a token are divided by their sum."""
    num_groups: int = 1
    """Groups of neighbouring experts, of equal size."""
    topk_groups: int = 1
    """Number of groups that a token may use: the best by `group_score`."""
    group_score: Literal["max", "top2_sum"] = "max"
    routed_scaling_factor: float = 1.0
    """Factor of all weights, applied last."""

    def __post_init__(self) -> None:
        if (why := self._contradiction()) is not None:
            raise ValueError(f"config.json: {why}")

    def _contradiction(self) -> str | None:
        if not 1 <= self.top_k <= self.num_experts:
            return f"a token cannot use {self.top_k} of {self.num_experts} experts"
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            return (
                f"{self.num_experts} experts cannot be divided into {self.num_groups} equal groups"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            return f"a token cannot use {self.topk_groups} of {self.num_groups} groups"
        if self.top_k > self.topk_groups * self.group_size:
            return (
                f"{self.topk_groups} groups of {self.group_size} experts are fewer than the "
                f"{self.top_k} experts of a token"
            )
        if self.is_grouped and self.group_score == "top2_sum" and self.group_size < 2:
            return "groups of one expert have no two best experts: group_score 'max'"
        return None

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @property
    def is_grouped(self) -> bool:
        """True if a token may use only some groups of experts."""
        return self.topk_groups < self.num_groups


def select_experts(
    logits: torch.Tensor,
    options: RouterOptions,
    correction_bias: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, best first; among equals the lower id comes first.

    It reads nothing back from the device, and shapes do not depend on the values.

    Args:
        logits: fp32 `[num_tokens, num_experts]`.
        correction_bias: fp32 `[num_experts]`, added to the scores for the choice, but not for the
            weights.
        ids: int64 `[num_tokens, top_k]`: the choice, if it is known.

    Returns:
        Weights, fp32 `[num_tokens, top_k]`, and ids, int64 `[num_tokens, top_k]`.
    """
    match options.scoring:
        case "sigmoid":
            scores = logits.sigmoid()
        case "sqrt_softplus":
            scores = F.softplus(logits).sqrt_()
        case _:
            scores = logits.softmax(dim=-1)
    if ids is None:
        ranking = scores if correction_bias is None else scores + correction_bias
        if options.is_grouped:
            ranking = _within_best_groups(ranking, options)
        ids = _best(ranking, options.top_k)
    weights = scores.gather(-1, ids)
    if options.renormalize:
        # Sigmoids can all be 0. The addition changes no other sum.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * options.routed_scaling_factor, ids


def _within_best_groups(ranking: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """The ranking `[num_tokens, num_experts]`, -inf outside each token's best groups."""
    groups = ranking.view(-1, options.num_groups, options.group_size)
    if options.group_score == "max":
        group_scores = groups.amax(dim=-1)
    else:
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
    best = _best(group_scores, options.topk_groups)
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values, int64 `[..., count]`.

    The sort is stable; `torch.topk` does not define the order of equal values.
    """
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order.narrow(-1, 0, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertOptions:
    """An expert that every token uses."""

    intermediate_size: int
    name: str = "shared_experts"
    """The expert's name in a checkpoint."""
    names: ExpertNames = EXPERT_NAMES
    """Names of its projections there."""
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
    name: str = "mlp"
    """The block's name in a checkpoint, below its layer's."""
    expert_names: ExpertNames = EXPERT_NAMES
    bias_name: str = "gate.e_score_correction_bias"
    """Name of the router's correction bias, below the block's."""
    activation: ExpertActivation = "silu"
    """Of all experts."""
    table_size: int | None = None
    """Tokens of the vocabulary, if a table `tid2eid` has the experts of each; None: scores choose.
    """
    router_name: str = "gate"
    """Name of the router, below the block's."""
    has_bias: bool = False
    """True if router and routed experts have biases."""
    has_alternating_stacks: bool = False
    """See `RoutedExperts`."""
    latent_size: int | None = None
    """Features of the projection that the routed experts read and write instead of the hidden
    state; router and shared expert see the hidden state. None: there is no such projection."""


class Router(WeightedLayer):
    """Scores the experts for each token and chooses some; replicated on every rank."""

    def __init__(self, options: SparseMoeOptions, placement: TensorPlacement) -> None:
        """Args:
        placement: The sparse block's.
        """
        super().__init__(placement.at(options.router_name))
        self._bias_name = placement.at(options.bias_name).prefix
        self.options = options.router
        count, dtype = self.options.num_experts, options.router_dtype or placement.dtype
        self.weight = replace(placement, dtype=dtype).empty(count, options.hidden_size)
        self.bias = replace(placement, dtype=dtype).empty(count) if options.has_bias else None
        self.correction_bias = (
            replace(placement, dtype=torch.float32).empty(count)
            if options.has_correction_bias
            else None
        )
        self.table: torch.nn.Parameter | None = None
        """int64 `[table_size, top_k]`: the experts of each token."""
        if options.table_size is not None:
            shape = options.table_size, self.options.top_k
            self.table = placement.empty(*shape, dtype=torch.int64)

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_tokens, hidden_size]` to weights and ids; see `select_experts`.

        Args:
            tokens: int64 `[num_tokens]`, for a router with a table.
        """
        ids = None
        if self.table is not None:
            assert tokens is not None, "the table is by token"
            ids = self.table[tokens]
        return select_experts(self.logits(x).float(), self.options, self.correction_bias, ids)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to `[num_tokens, num_experts]` of the weight's dtype."""
        return apply_linear(x, self.weight, self.bias)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)
        if self.bias is not None:
            yield f"{self.prefix}.bias", WeightSlot.of(self.bias)
        if self.correction_bias is not None:
            yield self._bias_name, WeightSlot.of(self.correction_bias)
        if self.table is not None:
            slot = WeightSlot.of(self.table)
            yield f"{self.prefix}.tid2eid", replace(slot, below=self.options.num_experts)


class SparseMoeBlock(torch.nn.Module):
    """The feed-forward part of a sparse layer, called like the dense `GatedMLP`."""

    first_weight = None
    """The input is multiplied by several weights."""

    def __init__(self, options: SparseMoeOptions, placement: TensorPlacement) -> None:
        """Raises ValueError: the ranks do not divide the intermediate sizes."""
        super().__init__()
        hidden_size, shared = options.hidden_size, options.shared
        self._group = placement.tp_group
        self.gate = Router(options, placement)
        make_experts = RoutedExperts if placement.experts is None else DistributedExperts
        self.experts = make_experts(
            options.router.num_experts,
            options.latent_size or hidden_size,
            options.intermediate_size,
            placement=placement.at("experts"),
            names=options.expert_names,
            activation=options.activation,
            has_bias=options.has_bias,
            has_alternating_stacks=options.has_alternating_stacks,
        )
        self.to_latent: MergedColumnParallelLinear | None = None
        self.from_latent: MergedColumnParallelLinear | None = None
        """Projections around the routed experts; the same on every rank."""
        if options.latent_size is not None:
            size = options.latent_size
            self.to_latent = MergedColumnParallelLinear(
                hidden_size,
                [("fc1_latent_proj", Share(0, size, size))],
                bias=False,
                placement=placement,
            )
            self.from_latent = MergedColumnParallelLinear(
                size,
                [("fc2_latent_proj", Share(0, hidden_size, hidden_size))],
                bias=False,
                placement=placement,
            )
        self.shared_expert: GatedMLP | SquaredReluMLP | None = None
        self.shared_expert_gate: MergedColumnParallelLinear | None = None
        """The sigmoid of its output scales the shared expert's; the same on every rank."""
        if shared is not None:
            sizes = hidden_size, shared.intermediate_size
            own = placement.at(shared.name)
            if options.activation == "squared_relu":
                self.shared_expert = SquaredReluMLP(*sizes, bias=False, placement=own)
            else:
                self.shared_expert = GatedMLP(
                    *sizes,
                    bias=False,
                    placement=own,
                    names=shared.names,
                    activation=options.activation,
                )
            if shared.has_gate:
                gate = (f"{shared.name}_gate", Share(0, 1, 1))
                # A single output, which is dequantized if a checkpoint quantizes it.
                self.shared_expert_gate = MergedColumnParallelLinear(
                    hidden_size, [gate], bias=False, placement=replace(placement, formats=None)
                )
        self._kernels = fused_kernels(placement.device)
        self._choice = self._plan_choice()
        self._few = self._plan_few()

    def _plan_choice(self) -> ExpertChoice:
        """Argument of the kernel that chooses experts."""
        router, gate = self.gate.options, self.shared_expert_gate
        shared_gate = None if gate is None else gate.weight
        assert shared_gate is None or isinstance(shared_gate, torch.Tensor)
        return ExpertChoice(
            top_k=router.top_k,
            scoring=router.scoring,
            renormalize=router.renormalize,
            factor=router.routed_scaling_factor,
            groups=router.num_groups,
            top_groups=router.topk_groups,
            two_of_group=router.group_score == "top2_sum",
            correction_bias=self.gate.correction_bias,
            has_shared=self.shared_expert is not None,
            shared_gate=shared_gate,
            table=self.gate.table,
        )

    def _plan_few(self) -> ExpertWeights | None:
        """Argument of the kernels for few tokens; None: they do not support this layer."""
        experts, shared = self.experts, self.shared_expert
        both: tuple[Weight, Weight] | None = None
        if not experts.is_gated or self.to_latent is not None:
            return None
        if isinstance(experts, DistributedExperts):
            return None  # Others' tokens come, or some experts are elsewhere.
        if shared is not None:
            assert isinstance(shared, GatedMLP), "of the same kind as the others"
            both = shared.gate_up_proj.weight, shared.down_proj.weight
            if both[1].shape[1] != experts.features.size:
                return None
        return ExpertWeights(
            gate_up=experts.gate_up,
            down=experts.down,
            shared=both,
            activation=experts.activation,
            biases=experts.biases,
        )

    def exchange_bytes(self) -> int:
        """See `DistributedExperts.exchange_bytes`."""
        experts = self.experts
        if not isinstance(experts, DistributedExperts):
            return 0
        return experts.exchange_bytes(self.gate.options.top_k)

    def run_idle(self) -> None:
        """Take part in a step in which this rank's DP group has no tokens."""
        assert isinstance(self.experts, DistributedExperts), "else the group runs by itself"
        self.experts.run_idle(self.gate.options.top_k)

    def forward(
        self,
        x: torch.Tensor | RoundedRows,
        residual: torch.Tensor,
        tokens: torch.Tensor | None = None,
    ) -> tuple[ToAdd, torch.Tensor]:
        """Run router and experts.

        Args:
            x: `[num_tokens, hidden_size]`.
            residual: `[num_tokens, hidden_size]`; its memory may be used.
            tokens: int64 `[num_tokens]`, for a router with a table.

        Returns:
            The tensor that remains to be added to the residual (None: nothing), and the residual.
        """
        assert isinstance(x, torch.Tensor), "there is no first weight"
        shared_weight: torch.Tensor | None = None
        if self._kernels is None:
            weights, ids = self.gate.forward(x, tokens)
            if self.shared_expert_gate is not None:
                shared_weight = self.shared_expert_gate.forward(x).sigmoid_()
        else:
            top_k = self._choice.top_k
            if self._few is not None and self.experts.takes_few(len(x), top_k):
                return self._group.sum_later(self._run_few(x, tokens, self._few)), residual
            weights, ids = self._choose(x, tokens)
            if self.shared_expert_gate is not None:
                shared_weight = weights[:, top_k:].to(x.dtype)
            weights = weights[:, :top_k]
        latent = x if self.to_latent is None else self.to_latent.forward(x)
        out = self.experts.forward(latent, weights, ids)
        if self.from_latent is not None:
            # The projection of a rank's partial sum is a part of the whole's.
            out = self.from_latent.forward(out)
        if self.shared_expert is None:
            return self._group.sum_later(out), residual
        is_split = self._group.size > 1
        if is_split or shared_weight is not None:
            # One sum over the ranks for routed and shared experts.
            both = self._group.empty_part(out.shape, out) if is_split else out
            shared = self.shared_expert.part(x)
            if shared_weight is None:
                torch.add(out, shared, out=both)
            else:
                torch.addcmul(out, shared_weight, shared, out=both)
            return self._group.sum_later(both), residual
        rest, residual = self.shared_expert.forward(x, residual)
        assert not isinstance(rest, PendingSum), "one rank has all"
        return (out if rest is None else out.add_(rest)), residual

    def _choose(
        self, x: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids by the kernels; see `FusedKernels.choose_experts`."""
        assert self._kernels is not None
        return self._kernels.choose_experts(self.gate.logits(x), self._choice, x, tokens)

    def _run_few(
        self, x: torch.Tensor, tokens: torch.Tensor | None, experts: ExpertWeights
    ) -> torch.Tensor:
        """This rank's part of the sum of all experts by the kernels for few tokens."""
        assert self._kernels is not None
        beside = None
        if self.gate.bias is None:
            beside = self._kernels.choose_beside_shared(
                x, self.gate.weight, self._choice, experts, tokens
            )
        if beside is None:
            return self._kernels.run_experts(x, *self._choose(x, tokens), experts)
        weights, ids, part = beside
        return self._kernels.run_experts(x, weights, ids, experts, part)


def exchange_bytes_of(model: torch.nn.Module) -> int:
    """Most bytes that a layer of the model exchanges at once with other DP groups, for each token
    of a group's step; 0: none does."""
    blocks = (part for part in model.modules() if isinstance(part, SparseMoeBlock))
    return max((block.exchange_bytes() for block in blocks), default=0)
