"""Qwen3-MoE: Qwen3's decoder with experts in some of its layers or in all."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.moe.sparse_moe import SparseMoeOptions
from sglang.srt.layers.moe.topk import RouterOptions
from sglang.srt.models.llama import DecoderOptions
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """See `LlamaForCausalLM`."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        """Raises ValueError: config.json asks for experts that there cannot be."""
        hf = config.hf_config
        step = positive_int(hf, "decoder_sparse_step")
        num_experts = positive_int(hf, "num_experts")
        top_k = positive_int(hf, "num_experts_per_tok")
        sparse = range(step - 1, config.num_hidden_layers, step)
        try:
            router = RouterOptions(
                num_experts=num_experts, top_k=top_k, renormalize=bool(hf.norm_topk_prob)
            )
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error
        return replace(
            Qwen3ForCausalLM.decoder_options(config),
            sparse_layers=frozenset(sparse) - frozenset(hf.mlp_only_layers),
            sparse=SparseMoeOptions(
                hidden_size=config.hidden_size,
                intermediate_size=positive_int(hf, "moe_intermediate_size"),
                router=router,
            ),
        )
