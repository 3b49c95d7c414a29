"""Settings of DeepSeek-V4: of a tiny model, and of DeepSeek-V4-Flash as published."""

from __future__ import annotations

from typing import Any, Final

TINY: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 24,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "sliding_window": 12,
    "o_groups": 2,
    "o_lora_rank": 20,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 5,
    "hc_sinkhorn_iters": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    # Many gates and ups of random weights exceed it.
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
FLASH: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "sliding_window": 128, "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "compress_rope_theta": 160000, "rope_theta": 10000, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "swiglu_limit": 10.0, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576, "attention_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
    },
}  # fmt: skip
