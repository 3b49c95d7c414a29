"""Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE: llama's decoder with a few options."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SharedExpertOptions, SparseMoeOptions
from sglang.srt.models.llama import DecoderOptions, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's decoder with a bias on queries, keys and values."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        return DecoderOptions(qkv_bias=True)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama's decoder with per-head norms on queries and keys."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        return DecoderOptions(qkv_bias=bias, out_bias=bias, qk_norm=True)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3's decoder with experts in some or all layers."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        """Raises ValueError: config.json's numbers of experts contradict one another."""
        return replace(
            Qwen3ForCausalLM.decoder_options(config),
            sparse_layers=sparse_layers(config),
            sparse=sparse_options(config, renormalize=bool(config.hf_config.norm_topk_prob)),
        )


def sparse_layers(config: ModelConfig) -> frozenset[int]:
    """Layers that have experts: one in every `decoder_sparse_step`, except `mlp_only_layers`."""
    hf = config.hf_config
    step = positive_int(hf, "decoder_sparse_step")
    every = range(step - 1, config.num_hidden_layers, step)
    return frozenset(every) - frozenset(hf.mlp_only_layers or ())


def sparse_options(
    config: ModelConfig, *, renormalize: bool, shared: SharedExpertOptions | None = None
) -> SparseMoeOptions:
    """Options of the Qwen families' experts, scored by a softmax over all of them.

    Args:
        renormalize: If true, the weights of a token's experts are divided by their sum.
        shared: The expert that every token uses; None: no such expert.

    Raises:
        ValueError: config.json's numbers of experts contradict one another.
    """
    hf = config.hf_config
    num_experts, top_k = positive_int(hf, "num_experts"), positive_int(hf, "num_experts_per_tok")
    router = RouterOptions(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
    return SparseMoeOptions(
        hidden_size=config.hidden_size,
        intermediate_size=positive_int(hf, "moe_intermediate_size"),
        router=router,
        shared=shared,
    )
