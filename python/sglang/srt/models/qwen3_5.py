"""Qwen3.5, text alone: Qwen3-Next with a projection for each kind, dense or with experts."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.gated_mlp import GatedMLP
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM, sparse_options


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """See `Qwen3NextForCausalLM`. Every feed-forward layer is dense."""

    has_grouped_projections = False

    def make_mlp(
        self, config: ModelConfig, layer_id: int, placement: TensorPlacement
    ) -> GatedMLP | SparseMoeBlock:
        return GatedMLP(
            config.hidden_size, config.intermediate_size, bias=False, placement=placement
        )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """See `Qwen3NextForCausalLM`. Every feed-forward layer has experts."""

    def make_mlp(
        self, config: ModelConfig, layer_id: int, placement: TensorPlacement
    ) -> GatedMLP | SparseMoeBlock:
        return SparseMoeBlock(sparse_options(config, renormalize=True), placement)
