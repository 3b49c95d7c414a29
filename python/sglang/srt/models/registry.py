"""Model classes by the name of the architecture in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang.srt.models.deepseek_v2 import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaForCausalLM,
    Kimi_K25ForConditionalGeneration,
    KimiK25ForConditionalGeneration,
)
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.kimi_linear import KimiLinearForCausalLM
from sglang.srt.models.llama import (
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
)
from sglang.srt.models.minimax_m2 import MiniMaxM2ForCausalLM
from sglang.srt.models.nemotron_h import NemotronHForCausalLM
from sglang.srt.models.qwen import (
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from sglang.srt.models.qwen3_next import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)

MODEL_CLASSES: Mapping[str, type[LlamaForCausalLM]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
        "DeepseekV32ForCausalLM": DeepseekV32ForCausalLM,
        "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
        "DeepseekV4ForCausalLM": DeepseekV4ForCausalLM,
        "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
        "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
        "Glm5NextForConditionalGeneration": Glm5NextForConditionalGeneration,
        "GlmMoeDsaForCausalLM": GlmMoeDsaForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration,
        "Kimi_K25ForConditionalGeneration": Kimi_K25ForConditionalGeneration,
        "KimiLinearForCausalLM": KimiLinearForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
        "MinistralForCausalLM": MinistralForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "NemotronHForCausalLM": NemotronHForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
        "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
        "Qwen3_5ForConditionalGeneration": Qwen3_5ForConditionalGeneration,
        "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
        "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForConditionalGeneration,
    }
)
"""`configs.config_fields.FIELDS` has the same names."""
