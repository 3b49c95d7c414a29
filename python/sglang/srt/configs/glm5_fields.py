"""The fields of GLM-5.3-Flash in config.json, and checks of its layers. Needs no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.configs.kda_config import check_linear_attention

_TEXT: Final = "text_config"
_TYPES: Final = ("linear_attention", "indexed_attention", "full_attention")


def check_glm5_next(raw: Mapping[str, Any]) -> None:
    """Check a config.json of GLM-5.3-Flash.

    Raises:
        ValueError: A size or a list of layers is impossible, or a setting is not known. One line
            that names the field, with the remedy.
    """
    text = raw[_TEXT]
    count = text.get("num_hidden_layers") or 45
    types = text.get("layer_types")
    if types is None:
        types = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    elif not isinstance(types, list) or len(types) != count:
        raise ValueError(
            f"config.json: {_TEXT}.layer_types must name each of num_hidden_layers={count} layers: "
            "copy the checkpoint again"
        )
    if "linear_attention" not in types:
        raise ValueError(
            f"config.json: {_TEXT}.layer_types names no layer with linear_attention, which is not "
            "supported: use another checkpoint"
        )
    named = ["full_attention" if name == "indexed_attention" else name for name in types]
    settings = {**text, "num_hidden_layers": count, "layer_types": named}
    check_linear_attention(settings, ("gate_lower_bound", "safe_gate"))


GLM5_NEXT: Final[Mapping[str, Any]] = {
    "model_types": frozenset({"glm5_next"}),
    "harmless": frozenset({
        "vision_config", "image_token_id", "video_token_id", "image_start_token_id",
        "image_end_token_id", "video_start_token_id", "video_end_token_id",
    }),
    "check": check_glm5_next,
}  # fmt: skip
"""The arguments of `ConfigFields` for the whole."""
GLM5_NEXT_TEXT: Final[Mapping[str, Any]] = {
    "model_types": frozenset({"glm5_next_text"}),
    "read": frozenset({
        "attention_bias", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim",
        "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "linear_lower_bound",
        "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
        "mlp_layer_types", "routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group",
        "swiglu_limit", "hc_mult", "hc_eps", "hc_sinkhorn_iters", "index_topk", "index_head_dim",
        "index_n_heads", "index_kpool", "indexer_types",
    }),
    "read_by_class": frozenset({
        "linear_attn_config", "num_local_experts", "index_topk_pattern", "index_topk_freq",
        "index_skip_topk_offset",
    }),
    "harmless": frozenset({"head_dim", "qk_head_dim", "num_nextn_predict_layers"}),
    "fixed": {
        "layer_types": _TYPES,
        "index_kpool_always_select_tail": (True,),
        "qk_rope_head_dim": (0,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
}  # fmt: skip
"""Those of `text_config`."""
