"""MiniMax-M2: llama's decoder with experts in all layers, whose attention normalises all heads of a
token at once."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.layernorm import ProjectionQKNorm
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SparseMoeOptions
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.models.llama import DecoderOptions, LayerSpec, LlamaAttention, LlamaForCausalLM


class MiniMaxM2Attention(LlamaAttention):
    """Grouped-query attention with norms over the whole projections of queries and of keys."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        config, placement = layer.config, layer.placement.at("self_attn")
        self.norm = ProjectionQKNorm(
            placement.share(config.num_attention_heads, "attention heads"),
            placement.kv_head_share(config.num_key_value_heads),
            config.head_dim,
            config.rms_norm_eps,
            placement=placement,
        )

    def _prepare(
        self, qkv: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.norm.normalise_(qkv[:, : self.attn.num_heads + self.attn.num_kv_heads])
        return super()._prepare(qkv, step)


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        hf = config.hf_config
        count = positive_int(hf, "num_local_experts")
        top_k = positive_int(hf, "num_experts_per_tok")
        router = RouterOptions(num_experts=count, top_k=top_k, scoring="sigmoid")
        experts = SparseMoeOptions(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            router=router,
            router_dtype=torch.float32,
            has_correction_bias=True,
            name="block_sparse_moe",
            expert_names=("w1", "w3", "w2"),
            bias_name="e_score_correction_bias",
        )
        return DecoderOptions(
            sparse=experts,
            sparse_layers=frozenset(range(config.num_hidden_layers)),
            attention=MiniMaxM2Attention,
        )
