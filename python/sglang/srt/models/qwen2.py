"""Qwen2 and Qwen2.5: llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import DecoderOptions, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        return DecoderOptions(qkv_bias=True)
