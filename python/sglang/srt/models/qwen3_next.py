"""Qwen3-Next and Qwen3.5: delta-net layers and some layers of full attention.

Qwen3.5 has separate projections, and is dense or has experts. It is text only: a checkpoint may
have a vision tower too. The sections of its rotation (mrope) differ only in the positions of
images, so for text they form one plain rotation.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.linear_attention.delta_layer import (
    DeltaNetHeads,
    DeltaNetOptions,
    state_spec,
)
from sglang.srt.layers.linear_attention.delta_net import GatedDeltaNet
from sglang.srt.layers.moe.sparse_moe import SharedExpertOptions, SparseMoeOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.rotary_embedding import apply_rotary
from sglang.srt.layers.triton_ops.arguments import RoundedRows
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.models.llama import (
    DecoderOptions,
    LayerSpec,
    LlamaAttention,
    LlamaForCausalLM,
)
from sglang.srt.models.mtp import DraftNames
from sglang.srt.models.qwen import sparse_layers, sparse_options


class GatedAttention(LlamaAttention):
    """Grouped-query attention with normed heads and partial rotation, whose output is scaled by the
    sigmoid of a projection."""

    # Each head's query is followed by its gate.
    outputs_per_query = 2

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        own, eps = layer.placement.at("self_attn"), layer.config.rms_norm_eps
        self.q_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=own.at("q_norm"))
        self.k_norm = ZeroCenteredRMSNorm(self.head_dim, eps, placement=own.at("k_norm"))
        self._kernels = fused_kernels(own.device)

    def attend(self, x: torch.Tensor | RoundedRows, step: LayerStep) -> torch.Tensor:
        attn, rotation, batch = self.attn, step.rotation, step.batch
        qkv = self.qkv_proj.forward(x).view(len(x), -1, self.head_dim)
        sizes = [2 * attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
        queries, k, v = torch.split(qkv, sizes, dim=1)
        q, gates = queries[:, ::2], queries[:, 1::2]
        if self._kernels is not None:
            # The kernel also changes the keys in place, and stores keys and values.
            q = self._kernels.prepare_gated_qkv_(
                qkv,
                (self.q_norm.weight, self.k_norm.weight),
                self.q_norm.eps,
                (rotation.cos, rotation.signed_sin),
                batch.out_cache_loc,
                *batch.token_to_kv_pool.kv_buffer_to_write(attn.layer_id),
            )
        else:
            q = apply_rotary(self.q_norm.forward(q), rotation)
            k = apply_rotary(self.k_norm.forward(k), rotation)
        is_stored = self._kernels is not None
        return attn.forward(q, k, v, batch, not is_stored, step.rows, gates=gates)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    has_grouped_projections = True
    """See `DeltaNetOptions.is_grouped`."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        options = self._linear_options(config)
        heads = DeltaNetHeads.of(options, placement)
        layers = config.linear_attention_layers
        self._states = state_spec(options, heads, layers, config.ssm_dtype, config.dtype)

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        sparse = cls.sparse_layers(config)
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        return DecoderOptions(
            qkv_bias=bias,
            out_bias=bias,
            sparse_layers=sparse,
            sparse=cls.sparse_options(config) if sparse else None,
            attention=cls._make_attention,
            norm=ZeroCenteredRMSNorm,
        )

    @classmethod
    def sparse_layers(cls, config: ModelConfig) -> frozenset[int]:
        """Indices of the layers with experts. The draft layer has experts if any layer has."""
        if config.hf_config.num_experts == 0:
            return frozenset()
        return sparse_layers(config) | set(range(config.num_hidden_layers, config.num_layers))

    @classmethod
    def sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        """Options of the sparse layers' experts."""
        return gated_experts(config, renormalize=bool(config.hf_config.norm_topk_prob))

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of keys and values of the full-attention layers, and of states of the others."""
        return (*super().state_specs(kv_dtype), self._states)

    @classmethod
    def draft_names(cls, config: ModelConfig) -> DraftNames:
        """Names of draft layers: under "mtp" at the top level, even if the model has a prefix."""
        count = getattr(config.hf_config, "mtp_num_hidden_layers", None)
        return DraftNames.as_model("mtp", count if isinstance(count, int) else 1)

    @classmethod
    def _make_attention(cls, layer: LayerSpec) -> GatedAttention | GatedDeltaNet:
        """Full or linear attention, according to config.json."""
        if layer.layer_id in layer.config.linear_attention_layers:
            linear = cls._linear_options(layer.config)
            return GatedDeltaNet(linear, layer.placement.at("linear_attn"), layer.layer_id)
        return GatedAttention(layer)

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


def gated_experts(config: ModelConfig, *, renormalize: bool) -> SparseMoeOptions:
    """Options of the family's experts, including a gated expert that every token uses."""
    shared = SharedExpertOptions(
        intermediate_size=positive_int(config.hf_config, "shared_expert_intermediate_size"),
        name="shared_expert",
        has_gate=True,
    )
    return sparse_options(config, renormalize=renormalize, shared=shared)


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
        return frozenset(range(config.num_layers))

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
