"""Qwen3.5, text only: Qwen3-Next with separate projections, dense or with experts.

A checkpoint has only the text model, or a vision tower too. The sections of its rotation (mrope)
differ only in the positions of images, so for text they form one plain rotation.
"""

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


class _BesideVision(Qwen3_5ForCausalLM):
    """The text model of a checkpoint with a vision tower, whose tensors are not read."""

    model_prefix = "model.language_model"

    def is_redundant(self, name: str) -> bool:
        """Also true of the vision tower's tensors."""
        return super().is_redundant(name) or name.startswith("model.visual.")


class Qwen3_5ForConditionalGeneration(_BesideVision):
    """See `Qwen3_5ForCausalLM`."""


class Qwen3_5MoeForConditionalGeneration(_BesideVision, Qwen3_5MoeForCausalLM):
    """See `Qwen3_5MoeForCausalLM`."""
