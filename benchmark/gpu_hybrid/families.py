"""Shapes of models with more state than KV, and prompts for them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from transformers import DeepseekV32Config, Qwen3NextConfig
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

from benchmark.prompts import random_prompt
from rigs.models.qwen3_8b import WEIGHTS
from sglang.srt.configs.config_fields import FIELDS


def _glm5_next(**fields: Any) -> Glm5NextConfig:
    """A configuration with a vision tower, which is not read."""
    return Glm5NextConfig(text_config=fields, vision_config={"depth": 1})


LENGTH: Final = 8192
LENGTHS: Final = {"deepseek_v4": 32768, "glm5_next": 32768}
"""Tokens of a long prompt of families with another length than LENGTH."""
PAGES: Final = {"deepseek_v4": 256}
"""Tokens of a page of families that do not take 64."""
STEPS: Final = 32
VOCABULARY: Final = 129_280
PATTERN: Final = "hybrid_override_pattern"
"""A letter for each layer, in the shapes whose class counts them."""
_OF_LAYERS: Final = ("layer_types", "mlp_layer_types")
"""Fields with an item for each layer."""
SHAPES: Final[dict[str, tuple[Any, str, dict[str, Any]]]] = {
    "qwen3_next": (
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 12,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "kimi_linear": (
        KimiLinearConfig,
        "KimiLinearForCausalLM",
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
            "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
            "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "moe_intermediate_size": 1024, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
    "deepseek_v32": (
        DeepseekV32Config,
        "DeepseekV32ForCausalLM",
        {
            "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 6,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128,
            "index_topk": 2048, "n_routed_experts": 64, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v4": (
        DeepseekV4Config,
        "DeepseekV4ForCausalLM",
        {
            "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 64,
            "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8,
            "o_lora_rank": 1024, "sliding_window": 128,
            "layer_types": [
                "sliding_attention", "sliding_attention",
                *(["compressed_sparse_attention", "heavily_compressed_attention"] * 5),
            ],
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 9, "index_n_heads": 64,
            "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "expert_dtype": "fp4",
            "quantization_config": {**WEIGHTS["fp8"], "scale_fmt": "ue8m0"},
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
    "nemotron_h": (
        NemotronHConfig,
        "NemotronHForCausalLM",
        {
            "hidden_size": 2688,
            PATTERN: "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
            "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "chunk_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        "GptOssForCausalLM",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
            "attention_bias": True, "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
    "glm5_next": (
        _glm5_next,
        "Glm5NextForConditionalGeneration",
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 12,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256,
            "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 16,
            "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4,
            "n_routed_experts": 96, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "pad_token_id": None,
        },
    ),
}  # fmt: skip
"""Qwen3-Next-80B-A3B with 12 of 48 layers, the whole Kimi-Linear-48B-A3B, DeepSeek-V3.2 with 6 of
61 layers (1 dense) and 64 of 256 experts, DeepSeek-V4-Flash with 12 of 43 layers (5 sparse, 5
heavily compressed) as published: experts in MXFP4, the rest in fp8; the whole
Nemotron-3-Nano-30B-A3B, the whole gpt-oss-120b with experts in MXFP4, and transformers' sizes of
GLM-5.3-Flash with 12 of 45 layers (3 dense, 3 of attention) and 96 of 288 experts. Values: class of
the configuration, class of the model, fields."""
EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the field with the number of experts."""
STATEFUL: Final = ("qwen3_next", "kimi_linear", "nemotron_h", "glm5_next", "deepseek_v4")
"""Families with large states: servers keep few in L1, so L2 has room for four times as many."""


def add_families(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="+", choices=list(SHAPES), default=list(SHAPES))


def first_layers(shape: dict[str, Any], count: int) -> dict[str, Any]:
    """The fields of a shape that say its number of layers, for its first `count` layers."""
    if PATTERN in shape:
        return {PATTERN: shape[PATTERN][:count]}
    lists: dict[str, Any] = {name: shape[name][:count] for name in _OF_LAYERS if name in shape}
    return {"num_hidden_layers": count, **lists}


def length_of(family: str) -> int:
    """Tokens of a long prompt."""
    return LENGTHS.get(family, LENGTH)


def page_of(family: str) -> int:
    """Tokens of a page."""
    return PAGES.get(family, 64)


@contextmanager
def model_of(
    family: str, *, drafts: bool = False, weights: str = "bf16", layers: int | None = None
) -> Iterator[str]:
    """A temporary directory with only the configuration.

    Args:
        layers: Number of layers; None: that of the shape.
        drafts: Whether there is a layer that drafts.
        weights: A format in `WEIGHTS`.
    """
    config_class, architecture, shape = SHAPES[family]
    with tempfile.TemporaryDirectory() as directory:
        fields = shape | ({} if layers is None else first_layers(shape, layers))
        config = config_class(vocab_size=VOCABULARY, max_position_embeddings=40960, **fields)
        config.architectures = [architecture]
        config.dtype = "bfloat16"
        if WEIGHTS[weights]:
            config.quantization_config = WEIGHTS[weights]
        if drafts:
            field = FIELDS[architecture].of_text.num_draft_layers
            assert field is not None, f"{architecture} has no layer that drafts"
            setattr(config, field, 1)
        config.save_pretrained(directory)
        yield directory


def prompt(seed: int, length: int) -> list[int]:
    return random_prompt(seed, length, 0, VOCABULARY)
