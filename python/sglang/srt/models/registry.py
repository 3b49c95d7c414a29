"""Model classes by the architecture that a checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: Mapping[str, type[LlamaForCausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
    }
)
"""`configs.config_file.SUPPORTED_ARCHITECTURES` has the same names."""
