"""GLM-4.5, 4.6 and 4.7: llama's attention with partial rotation, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.llama import DecoderOptions, LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        return replace(
            DeepseekV3ForCausalLM.decoder_options(config),
            attention=None,
            qkv_bias=bool(config.hf_config.attention_bias),
            qk_norm=bool(config.hf_config.use_qk_norm),
        )
