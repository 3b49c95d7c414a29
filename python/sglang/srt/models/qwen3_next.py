"""Qwen3-Next: delta-net layers and some layers of full attention. Qwen3.5 shares code with it."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.linear_attention.delta_net import (
    DeltaNetHeads,
    DeltaNetOptions,
    GatedDeltaNet,
)
from sglang.srt.layers.moe.sparse_moe import SharedExpertOptions, SparseMoeOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.state_spec import RankSplit, StateSpec
from sglang.srt.models.gated_attention import GatedAttention
from sglang.srt.models.llama import DecoderOptions, LlamaForCausalLM, MakeAttention
from sglang.srt.models.qwen3_moe import sparse_layers, sparse_options


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    has_grouped_projections = True
    """See `DeltaNetOptions.is_grouped`."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        options = self._linear_options(config)
        heads = DeltaNetHeads.of(options, placement)
        self._linear = options.on_rank(heads)
        self._state_share = heads.values.of_state(RankSplit.HEADS)
        self._linear_layers = config.linear_attention_layers
        self._dtypes = config.ssm_dtype, config.dtype

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        sparse = cls.sparse_layers(config)
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        return DecoderOptions(
            qkv_bias=bias,
            out_bias=bias,
            sparse_layers=sparse,
            sparse=cls.sparse_options(config) if sparse else None,
            attention=_full_or_linear(cls._linear_options(config)),
            norm=ZeroCenteredRMSNorm,
        )

    @classmethod
    def sparse_layers(cls, config: ModelConfig) -> frozenset[int]:
        """Indices of the layers with experts."""
        return sparse_layers(config) if config.hf_config.num_experts > 0 else frozenset()

    @classmethod
    def sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        """Options of the sparse layers' experts."""
        return gated_experts(config, renormalize=bool(config.hf_config.norm_topk_prob))

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of keys and values of the full-attention layers, and of states of the others."""
        ssm_dtype, conv_dtype = self._dtypes
        states = self._linear.state_spec(
            self._linear_layers, ssm_dtype, conv_dtype, self._state_share
        )
        return (*super().state_specs(kv_dtype), states)

    def is_redundant(self, name: str) -> bool:
        """Also true of tensors that predict several tokens at once."""
        return super().is_redundant(name) or name.startswith("mtp.")

    @classmethod
    def _linear_options(cls, config: ModelConfig) -> DeltaNetOptions:
        hf = config.hf_config
        return DeltaNetOptions(
            hidden_size=config.hidden_size,
            num_key_heads=positive_int(hf, "linear_num_key_heads"),
            num_heads=positive_int(hf, "linear_num_value_heads"),
            key_dim=positive_int(hf, "linear_key_head_dim"),
            value_dim=positive_int(hf, "linear_value_head_dim"),
            kernel=positive_int(hf, "linear_conv_kernel_dim"),
            eps=config.rms_norm_eps,
            is_grouped=cls.has_grouped_projections,
        )


def _full_or_linear(linear: DeltaNetOptions) -> MakeAttention:
    """Make linear attention with these options, or full attention, according to config.json."""

    def make(
        config: ModelConfig, options: DecoderOptions, placement: TensorPlacement, layer_id: int
    ) -> GatedAttention | GatedDeltaNet:
        if layer_id in config.linear_attention_layers:
            return GatedDeltaNet(linear, placement.at("linear_attn"), layer_id)
        return GatedAttention(config, options, placement, layer_id)

    return make


def gated_experts(config: ModelConfig, *, renormalize: bool) -> SparseMoeOptions:
    """Options of the family's experts, including a gated expert that every token uses."""
    shared = SharedExpertOptions(
        intermediate_size=positive_int(config.hf_config, "shared_expert_intermediate_size"),
        name="shared_expert",
        has_gate=True,
    )
    return sparse_options(config, renormalize=renormalize, shared=shared)
