"""Qwen3-MoE: Qwen3's decoder with experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.moe.sparse_moe import SharedExpertOptions, SparseMoeOptions
from sglang.srt.layers.moe.topk import RouterOptions
from sglang.srt.models.llama import DecoderOptions
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """See `LlamaForCausalLM`."""

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
    try:
        router = RouterOptions(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error
    return SparseMoeOptions(
        hidden_size=config.hidden_size,
        intermediate_size=positive_int(hf, "moe_intermediate_size"),
        router=router,
        shared=shared,
    )
