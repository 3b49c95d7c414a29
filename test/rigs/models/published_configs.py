"""Sizes of published checkpoints, as their config.json states them, and their published number of
parameters. No weights and no other files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rigs.checkpoints import deepseek_v4

_FP8: Final = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_INT4: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}
_COMMON: Final = {"dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6}
_DEEPSEEK: Final = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "quantization_config": _FP8,
}
_KIMI: Final = {
    **_DEEPSEEK,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
}
_KIMI_K25: Final = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "dtype": "bfloat16",
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "text_config": {
        **_KIMI,
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "quantization_config": _INT4,
    },
    "vision_config": {
        "mm_projector_type": "patchmerger",
        "text_hidden_size": 7168,
        "vt_hidden_size": 1152,
        "vt_num_hidden_layers": 27,
    },
}
_GLM5: Final = {
    **_DEEPSEEK,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "max_position_embeddings": 202752,
}
_GLM5_3: Final = {
    **_GLM5,
    "rms_norm_eps": 1e-5,
    "head_dim": 192,
    "qk_head_dim": 256,
    "rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
}
_GLM4: Final = {
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 202752,
}
_MINIMAX: Final = {
    **_COMMON,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "mlp_intermediate_size": 8192,
    "shared_intermediate_size": 0,
    "num_hidden_layers": 62,
    "attn_type_list": [1] * 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_theta": 5000000,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 196608,
    "quantization_config": {
        **_FP8,
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}
_KIMI_LINEAR: Final = {
    **_COMMON,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "rms_norm_eps": 1e-5,
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "model_max_length": 1048576,
}
_QWEN3: Final = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE: Final = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN3_NEXT: Final = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "max_position_embeddings": 262144,
}
_QWEN3_6: Final = {
    **_QWEN3_NEXT,
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "tie_word_embeddings": False,
}
"""Text model of Qwen3.6-35B-A3B, and most of Qwen3.8-27B's."""
_BESIDE_VISION: Final = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "language_model_only": False,
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen3_5_vision", "depth": 27, "hidden_size": 1152},
}
_EXPERTS: Final = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
)
_QWEN3_5: Final = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}

_NEMOTRON: Final = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 131072,
    "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 262144,
}  # fmt: skip
_GPT_OSS: Final = {
    **_COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip
_MXFP4: Final = {"quantization_config": {
    "quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}}  # fmt: skip
_GPT_OSS_120B: Final = {
    **_GPT_OSS, **_MXFP4, "num_hidden_layers": 36, "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """One checkpoint.

    Attributes:
        billions: Parameters that its publisher names, in billions.
        config: config.json.
    """

    billions: float
    config: dict[str, Any]

    def write(self, directory: Path) -> Path:
        """Write config.json into `directory`, and return it."""
        (directory / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return directory


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


PUBLISHED: Final = {
    # Publishers count in billions; those of GLM-5 and GLM-4.5 count their draft layer too.
    # Kimi-Linear's name says 48, its files have 49.1.
    "DeepSeek-V3": Published(671, _DEEPSEEK),
    "DeepSeek-V3.2": Published(
        671,
        {
            **_without(_DEEPSEEK, "scoring_func", "topk_method"),
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
        },
    ),
    "DeepSeek-V4-Flash": Published(284, {**_COMMON, **deepseek_v4.FLASH}),
    "Kimi-K2-Instruct": Published(1026, _KIMI),
    "Kimi-K2.5": Published(1026, _KIMI_K25),
    "Kimi-Linear-48B-A3B": Published(49.1, _KIMI_LINEAR),
    "GLM-5": Published(744, _without(_GLM5, "quantization_config")),
    "GLM-5-FP8": Published(744, _GLM5),
    "GLM-5.3": Published(744, _GLM5_3),
    "GLM-4.6": Published(355, _GLM4),
    "MiniMax-M2": Published(230, _MINIMAX),
    "gpt-oss-20b": Published(20.9, _GPT_OSS | _MXFP4),
    "gpt-oss-20b-BF16": Published(20.9, _GPT_OSS),
    "gpt-oss-120b": Published(116.8, _GPT_OSS_120B),
    "Qwen3-8B": Published(
        8.2,
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
    ),
    "Qwen3-235B-A22B": Published(
        235,
        {
            **_QWEN3_MOE,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
    ),
    "Qwen3-Next-80B-A3B": Published(80, _QWEN3_NEXT),
    "Qwen3.5-397B-A17B": Published(397, {**_without(_QWEN3_NEXT, "intermediate_size"), **_QWEN3_5}),
    "Qwen3.6-35B-A3B": Published(
        35,
        {
            **_BESIDE_VISION,
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {
                **_without(_QWEN3_6, "intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
                "model_type": "qwen3_5_moe_text",
                "num_hidden_layers": 40,
                "num_experts": 256,
                "num_experts_per_tok": 8,
            },
        },
    ),
    "Qwen3.8-27B": Published(
        27,
        {
            **_BESIDE_VISION,
            "text_config": {
                **_without(_QWEN3_6, *_EXPERTS),
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 64,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "linear_num_value_heads": 48,
                "output_gate_type": "swish",
            },
        },
    ),
    "Nemotron-3-Nano-30B-A3B": Published(31.6, _NEMOTRON),
}
"""Checkpoints by name. Kimi-K2's own `model_type` needs code of the checkpoint; it has
DeepSeek-V3's architecture, whose `model_type` stands here."""
