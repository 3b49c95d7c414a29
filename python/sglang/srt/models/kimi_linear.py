"""Kimi-Linear: layers of Kimi Delta Attention (KDA), some of latent attention, and DeepSeek-V3's
experts. Positions are in the states alone: latent attention rotates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.linear_attention.delta_layer import (
    DeltaNetHeads,
    DeltaNetOptions,
    state_spec,
)
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SparseMoeOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.models.deepseek_v2 import (
    DeepseekV2AttentionMLA,
    DeepseekV3ForCausalLM,
    grouped_router,
    layers_with_experts,
)
from sglang.srt.models.llama import DecoderOptions, LayerSpec


class KimiLinearForCausalLM(DeepseekV3ForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        if config.rope.rope_type != "default":
            raise ValueError(
                f"config.json: rope_scaling of type {config.rope.rope_type!r}: Kimi-Linear rotates "
                "nothing: remove it"
            )
        super().__init__(config, placement)
        options = linear_options(config)
        heads = DeltaNetHeads.of(options, placement)
        layers = config.linear_attention_layers
        self._states = state_spec(options, heads, layers, config.ssm_dtype, config.dtype)

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        return replace(super().decoder_options(config), attention=_make_attention)

    @classmethod
    def _sparse_layers(cls, config: ModelConfig) -> Iterable[int]:
        return layers_with_experts(config)

    @classmethod
    def _sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        options = super()._sparse_options(config)
        return replace(options, name="block_sparse_moe", expert_names=("w1", "w3", "w2"))

    @classmethod
    def _router(cls, config: ModelConfig) -> RouterOptions:
        return grouped_router(config.hf_config, "num_experts")

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of latent rows of the full-attention layers, and of states of the others."""
        return (*super().state_specs(kv_dtype), self._states)


def _make_attention(layer: LayerSpec) -> DeepseekV2AttentionMLA | KimiDeltaAttention:
    """Latent or linear attention, according to config.json."""
    config, layer_id = layer.config, layer.layer_id
    if layer_id in config.linear_attention_layers:
        placement = layer.placement.at("self_attn")
        return KimiDeltaAttention(linear_options(config), placement, layer_id)
    return DeepseekV2AttentionMLA(layer)


def linear_options(config: ModelConfig) -> DeltaNetOptions:
    """Options of the layers of linear attention, from fields that all families with KDA have."""
    hf = config.hf_config
    heads, size = positive_int(hf, "linear_num_heads"), positive_int(hf, "linear_head_dim")
    return DeltaNetOptions(
        hidden_size=config.hidden_size,
        num_key_heads=heads,
        num_heads=heads,
        key_dim=size,
        value_dim=size,
        kernel=positive_int(hf, "linear_conv_kernel_dim"),
        eps=config.rms_norm_eps,
        is_grouped=False,
    )
