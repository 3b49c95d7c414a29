"""Qwen3.5, text alone: Qwen3-Next with a projection for each kind, dense or with experts."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.sparse_moe import SparseMoeOptions
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM, gated_experts


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """See `Qwen3NextForCausalLM`. Every feed-forward layer is dense."""

    has_grouped_projections = False

    @classmethod
    def sparse_layers(cls, config: ModelConfig) -> frozenset[int]:
        return frozenset()


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """See `Qwen3NextForCausalLM`. Every feed-forward layer has experts."""

    @classmethod
    def sparse_layers(cls, config: ModelConfig) -> frozenset[int]:
        return frozenset(range(config.num_hidden_layers))

    @classmethod
    def sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        return gated_experts(config, renormalize=True)
