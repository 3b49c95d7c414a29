"""Settings of GLM-5.3-Flash: of a tiny model, and as published."""

from __future__ import annotations

from typing import Any, Final

VISION: Final[dict[str, Any]] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "projection_intermediate_size": 16,
}  # fmt: skip
TINY: Final[dict[str, Any]] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "head_dim": 0,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 20,
    "layer_types": [
        "linear_attention", "indexed_attention", "linear_attention", "indexed_attention",
        "indexed_attention",
    ],
    "indexer_types": ["full", "full", "full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    "index_topk": 32,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "hc_sinkhorn_iters": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    # Many gates and ups of random weights exceed it.
    "swiglu_limit": 1.5,
    "pad_token_id": None,
}  # fmt: skip
