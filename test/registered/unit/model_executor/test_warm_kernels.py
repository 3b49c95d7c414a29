"""No kernel is compiled in service: whatever selects one, the start has run it."""

from __future__ import annotations

from typing import Any, Final

import pytest

pytest.importorskip("triton")

from rigs.checkpoints import glm5_next
from rigs.layers.warm_engine import late_kernels
from rigs.models.qwen3_8b import WEIGHTS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

Fields = dict[str, Any]

_FP8: Final[Fields] = {"quantization_config": WEIGHTS["fp8"]}
_DRAFTS: Final[Fields] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
_HEADS: Final[Fields] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
_EXPERTS: Final[Fields] = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
"""Of 32 experts: the plans for more and more uses of an expert change within the lengths drawn."""
_HYBRID: Final[Fields] = {
    **_HEADS, **_EXPERTS, "num_experts": 32, "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
_LATENT: Final[Fields] = {
    **_EXPERTS, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "head_dim": 64, "v_head_dim": 64, "n_shared_experts": 1,
}  # fmt: skip
_DEEPSEEK: Final[Fields] = {
    **_LATENT, "q_lora_rank": 128, "n_routed_experts": 32, "n_group": 4, "topk_group": 2,
}  # fmt: skip
_INDEXER: Final[Fields] = {"index_topk": 64, "index_n_heads": 16, "index_head_dim": 128}
CASES: Final[dict[str, tuple[str, Fields, Fields]]] = {
    "dense, fp8 weights": ("qwen3", {**_HEADS, **_FP8}, {}),
    "dense, int4 weights": ("qwen3", {**_HEADS, "quantization_config": WEIGHTS["int4"]}, {}),
    "dense, fp8 state": ("qwen3", _HEADS, {"kv_cache_dtype": "fp8_e4m3"}),
    "windows": ("ministral", {**_HEADS, "sliding_window": 128}, {}),
    "experts": ("qwen3_moe", {**_HEADS, **_EXPERTS, "num_experts": 32}, {}),
    "hybrid, fp8 weights": ("qwen3_next", {**_HYBRID, **_FP8}, {}),
    "hybrid, drafts": ("qwen3_next", {**_HYBRID, "mtp_num_hidden_layers": 1}, _DRAFTS),
    "mamba": (
        "nemotron_h",
        {
            "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 128, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2,
            "ssm_state_size": 64, "chunk_size": 128, "n_routed_experts": 128,
            "num_experts_per_tok": 6, "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 192, "moe_latent_size": None,
        },
        {},
    ),
    "hybrid, latent": (
        "kimi_linear",
        {
            **_LATENT, "num_experts": 32, "bos_token_id": None,
            "linear_attn_config": {
                "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        {},
    ),
    "latent, drafts": ("deepseek_v3", {**_DEEPSEEK, "num_nextn_predict_layers": 1}, _DRAFTS),
    "latent, indexer, fp8": (
        "deepseek_v32", {**_DEEPSEEK, **_INDEXER, **_FP8}, {"kv_cache_dtype": "fp8_e4m3"},
    ),
    "windows with sinks, fp4 weights": (
        "gpt_oss",
        {
            **_HEADS, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
            "sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"},
        },
        {},
    ),
    "compressed, fp4 weights": (
        "deepseek_v4",
        {
            **_EXPERTS, **_INDEXER, "hidden_size": 256, "num_attention_heads": 8,
            "num_key_value_heads": 1, "head_dim": 128, "partial_rotary_factor": 0.5,
            "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "sliding_window": 128,
            "n_routed_experts": 32, "expert_dtype": "fp4",
            "compress_rates": {
                "compressed_sparse_attention": 4, "heavily_compressed_attention": 128,
            },
            "quantization_config": {**WEIGHTS["fp8"], "scale_fmt": "ue8m0"},
        },
        {"page_size": 256},
    ),
    "keys of groups": (
        "glm5_next",
        {
            **glm5_next.TINY, **_LATENT, **_INDEXER, "qk_rope_head_dim": 0, "head_dim": 0,
            "q_lora_rank": 128, "n_routed_experts": 32, "index_kpool": 16, "linear_head_dim": 64,
            "linear_num_heads": 4,
        },
        {},
    ),
}  # fmt: skip
"""Family, fields of its configuration, and of the server's arguments."""


@pytest.mark.parametrize("name", CASES)
def test_traffic_uses_no_kernel_that_the_start_has_not_run(name: str) -> None:
    family, fields, args = CASES[name]
    late, known = late_kernels(family, fields, 16, **args)
    assert known > 30, "kernels are recorded"
    assert not late, "\n".join(map(str, late))
