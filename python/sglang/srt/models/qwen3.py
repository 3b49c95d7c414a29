"""Qwen3, dense: llama's decoder with per-head norms on queries and keys."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import DecoderOptions, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        return DecoderOptions(qkv_bias=bias, out_bias=bias, qk_norm=True)
