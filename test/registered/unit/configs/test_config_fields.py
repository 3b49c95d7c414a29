"""Each field of a config.json is read, harmless, or refused by name where it asks for more."""

from __future__ import annotations

import json
import sys
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from rigs.models import published_configs
from rigs.models.tiny_models import tiny_config
from sglang.srt.configs.config_fields import (
    FIELDS,
    READ_OF_ALL,
    TEXT_CONFIG,
    ConfigFields,
    check_fields,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import build_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

SRT: Final = "/sglang/srt/"

# Fields besides `model_type`, `architectures`, sizes and token ids that published checkpoints have.
YARN: Final = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
COMMON: Final[dict[str, Any]] = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "torch_dtype": "bf16",
    "initializer_range": 0.02, "transformers_version": "4.51.0", "use_cache": True,
    "mlp_bias": False,
}  # fmt: skip
DEEPSEEK: Final[dict[str, Any]] = {
    **COMMON, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "n_group": 8,
    "moe_layer_freq": 1, "n_routed_experts": 64, "norm_topk_prob": True, "pretraining_tp": 1,
    "num_nextn_predict_layers": 1, "rope_scaling": YARN, "rope_theta": 10000, "seq_aux": True,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "q_lora_rank": None,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}  # fmt: skip
QWEN: Final[dict[str, Any]] = {
    **COMMON, "max_window_layers": 36, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "use_sliding_window": False, "_name_or_path": "x",
}  # fmt: skip
QWEN_MOE: Final[dict[str, Any]] = {
    **QWEN, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
LINEAR: Final[dict[str, Any]] = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
QWEN3_5_TEXT: Final[dict[str, Any]] = {
    **COMMON, **LINEAR, "model_type": "qwen3_5_text", "attn_output_gate": True,
    "layer_types": ["linear_attention", "full_attention"], "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
NEMOTRON: Final[dict[str, Any]] = {
    **{name: value for name, value in COMMON.items() if name != "hidden_act"},
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "chunk_size": 128,
    "conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0, "hybrid_override_pattern": "MEM*E-",
    "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32",
    "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "num_logits_to_keep": 1, "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True,
    "use_mamba_kernels": True,
}  # fmt: skip
KIMI_LINEAR: Final[dict[str, Any]] = {
    "model_type": "kimi_linear", "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "dtype": "bfloat16", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "rope_scaling": None, "rope_theta": 10000.0, "model_max_length": 1048576,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "routed_scaling_factor": 2.446, "topk_group": 1,
    "use_grouped_topk": True, "tie_word_embeddings": False, "use_cache": True,
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
}  # fmt: skip
PUBLISHED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        {**COMMON, "pretraining_tp": 1, "rope_theta": 500000.0, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    ),
    "SmolLM2": (
        "LlamaForCausalLM",
        {**COMMON, "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1,
         "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "R1-Distill-Qwen": ("Qwen2ForCausalLM", {**QWEN, "use_mrope": False, "sliding_window": 4096}),
    "Qwen3-8B with YaRN": (
        "Qwen3ForCausalLM",
        {**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                  "original_max_position_embeddings": 32768}},
    ),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", QWEN_MOE),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        {**QWEN_MOE, **LINEAR, "partial_rotary_factor": 0.25,
         "shared_expert_intermediate_size": 512},
    ),
    "Qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": QWEN3_5_TEXT, "vision_config": {"depth": 27}, "image_token_id": 1,
         "video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4,
         "tie_word_embeddings": False, "transformers_version": "4.57.0"},
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "GLM-4.7-Flash": (
        "Glm4MoeLiteForCausalLM",
        {**DEEPSEEK, "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "partial_rotary_factor": 1.0, "rope_scaling": None},
    ),
    "Kimi-K2": ("DeepseekV3ForCausalLM", {**DEEPSEEK, "model_type": "kimi_k2"}),
    "Kimi-Linear": ("KimiLinearForCausalLM", KIMI_LINEAR),
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM",
        {**DEEPSEEK, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    ),
    "DeepSeek-V3.2 saved by transformers 5.17": (
        "DeepseekV32ForCausalLM",
        {**DEEPSEEK, "index_topk": 2048, "layer_types": ["deepseek_sparse_attention"]},
    ),
    "DeepSeek-V3.2 saved by transformers 5.24": (
        "DeepseekV32ForCausalLM",
        {**DEEPSEEK, "index_topk": 2048, "layer_types": ["indexed_attention"]},
    ),
    "Nemotron-3-Nano": ("NemotronHForCausalLM", NEMOTRON),
    "Nemotron-3-Nano saved by transformers 5.24": (
        "NemotronHForCausalLM",
        {**NEMOTRON, "hybrid_override_pattern": None, "mlp_hidden_act": "relu2",
         "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
         "time_step_limit": [0.0, {"__float__": "Infinity"}]},
    ),
    "tuned by unsloth": (
        "Qwen3ForCausalLM",
        {**QWEN, "unsloth_fixed": True, "unsloth_version": "2026.1", "model_name": "x"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLISHED, *published_configs.PUBLISHED])
def test_published_checkpoints_are_accepted(name: str) -> None:
    if name in published_configs.PUBLISHED:
        raw = published_configs.PUBLISHED[name].config
        architecture = raw["architectures"][0]
    else:
        architecture, raw = PUBLISHED[name]
    check_fields(raw, architecture)


def classes() -> list[Any]:
    """Architecture, its fields, and the config class of transformers; text models count alone."""
    found = []
    for architecture, whole in FIELDS.items():
        for fields in (whole, whole.text):
            for model_type in () if fields is None else fields.model_types:
                kind = CONFIG_MAPPING[model_type]
                found.append(pytest.param(fields, kind, id=f"{architecture}-{model_type}"))
    return found


@pytest.mark.parametrize(("fields", "kind"), classes())
def test_every_field_of_transformers_class_has_a_place(fields: ConfigFields, kind: Any) -> None:
    names = {field.name for field in fields_of(kind)} | kind.attribute_map.keys()
    placed = fields.known() | fields.supported().keys() | {TEXT_CONFIG}
    assert not names - placed, "place them in config_fields.py"


@pytest.mark.parametrize(("fields", "kind"), classes())
def test_the_defaults_of_the_class_are_supported(fields: ConfigFields, kind: Any) -> None:
    config = kind()
    for name, allowed in fields.supported().items():
        value = getattr(config, name, None)
        items = value if isinstance(value, list | tuple) else [value]
        assert not [item for item in items if item is not None and item not in allowed], name


FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4,
                                              "topk_group": 2}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {}),
    "DeepseekV4ForCausalLM": ("deepseek_v4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {}),
    "GptOssForCausalLM": ("gpt_oss", {}),
    "KimiLinearForCausalLM": ("kimi_linear", {}),
    "LlamaForCausalLM": ("llama", {}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {}),
    "MinistralForCausalLM": ("ministral", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3ForCausalLM": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}),
    "Qwen3NextForCausalLM": ("qwen3_next", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", {}),
}  # fmt: skip
"""Architecture to a family of tiny models, and fields with which it reads all."""
BY_FILE: Final = {"architectures"}
"""Fields that are read from the file itself."""


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_called_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    family, more = FAMILIES[architecture]
    config = tiny_config(family, architectures=[architecture], **more)
    config.save_pretrained(tmp_path)
    seen: set[str] = set()
    get: Any = PretrainedConfig.__getattribute__

    def note(self: PretrainedConfig, name: str) -> Any:
        if SRT in sys._getframe(1).f_code.co_filename:
            seen.add(name)
        return get(self, name)

    monkeypatch.setattr(PretrainedConfig, "__getattribute__", note)
    build_model(ModelConfig.from_path(str(tmp_path)), LoadConfig())
    monkeypatch.undo()
    assert (READ_OF_ALL | FIELDS[architecture].read) - seen - BY_FILE == set()


def test_a_field_that_changes_the_mathematics_is_refused_by_name() -> None:
    raw = {**DEEPSEEK, "index_topk": 2048}
    check_fields({**raw, "indexer_rope_interleave": False}, "DeepseekV32ForCausalLM")
    with pytest.raises(ValueError, match="indexer_rope_interleave=True is not supported for Deep"):
        check_fields({**raw, "indexer_rope_interleave": True}, "DeepseekV32ForCausalLM")
    check_fields({**raw, "indexer_rope_interleave": True}, "GlmMoeDsaForCausalLM")
    # transformers does not read it for this class, and takes layer 0 alone as dense.
    with pytest.raises(ValueError, match="first_k_dense_replace=3 is not supported for Glm4MoeLi"):
        check_fields({**DEEPSEEK, "first_k_dense_replace": 3}, "Glm4MoeLiteForCausalLM")
    with pytest.raises(ValueError, match="indexer_rope_interleave=False is not supported for Glm"):
        check_fields({**raw, "indexer_rope_interleave": False}, "GlmMoeDsaForCausalLM")


def kda(**changes: Any) -> dict[str, Any]:
    """The settings of Kimi-Linear's states, with changes."""
    settings = {**KIMI_LINEAR["linear_attn_config"], **changes}
    return {"num_hidden_layers": 27, "linear_attn_config": settings}


LLAMA, KIMI, QWEN2, QWEN3, QWEN3_5, V3, V32, V4, M2 = (
    f"{name}ForCausalLM"
    for name in (
        "Llama",
        "KimiLinear",
        "Qwen2",
        "Qwen3",
        "Qwen3_5",
        "DeepseekV3",
        "DeepseekV32",
        "DeepseekV4",
        "MiniMaxM2",
    )
)
NEMOTRON_H = "NemotronHForCausalLM"
TWO: Final[dict[str, Any]] = {"num_hidden_layers": 2}
WINDOW, SPARSE, HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (LLAMA, {"sliding_window": 4096}, "sliding_window=4096: remove the settings"),
        (LLAMA, {"attn_logit_cap": 30.0, "a": 0, "b": "x"}, "attn_logit_cap=30.0, b='x'"),
        (LLAMA, {"is_causal": False}, "is_causal=False is not supported"),
        (LLAMA, {"layer_types": ["full_attention", "chunked"]}, "layer_types='chunked'"),
        (LLAMA, {"num_experts": 8}, "num_experts=8"),
        (LLAMA, {"quantization": {"bits": 4}}, "quantization={'bits': 4}"),
        (QWEN3, {"layer_types": ["sliding_attention", "chunked"]}, "layer_types='chunked'"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk"),
        (QWEN3, {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        (QWEN3, {"mlp_bias": True}, "mlp_bias=True"),
        (QWEN3, {"rope_scaling": {"type": "yarn", "alpha": 2}}, "rope_scaling.alpha=2"),
        (QWEN3, {"rope_parameters": {"mrope_section": [1]}}, "parameters.mrope_section"),
        (QWEN3, {"text": "x" * 100}, "text='" + "x" * 59 + r"\.\.\.: remove"),
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate=False"),
        (NEMOTRON_H, {"hybrid_override_pattern": "M*X"}, r"hybrid_override_pattern='M\*X' must"),
        (NEMOTRON_H, {"hybrid_override_pattern": ["M"]}, r"pattern=\['M'\] must have a letter of"),
        (NEMOTRON_H, {"layers_block_type": ["moe", "mamba"]}, "layers_block_type='mamba'"),
        (NEMOTRON_H, {"time_step_limit": [0.01, 0.1]}, "time_step_limit=0.01 is not supported"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported"),
        (NEMOTRON_H, {"use_conv_bias": False}, "use_conv_bias=False is not supported"),
        (NEMOTRON_H, {"residual_in_fp32": True}, "residual_in_fp32=True is not supported"),
        (NEMOTRON_H, {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        (V3, {"moe_layer_freq": [1, 2]}, "moe_layer_freq=2"),
        (V3, {"n_routed_experts": 1 << 15}, "n_routed_experts=32768 must be .* from 0 to 32767"),
        (M2, {"num_local_experts": 1 << 15}, "num_local_experts=32768 must .* from 0 to 32767"),
        (KIMI, {"num_experts": 1 << 15}, "num_experts=32768 must be an .* from 0 to 32767"),
        (V3, {"index_topk": 2048}, "index_topk=2048"),
        (V32, {"indexer_types": ["full", "shared"]}, "indexer_types='shared'"),
        (V4, {"layer_types": ["full_attention"]}, "layer_types='full_attention' is not supported"),
        (V4, {**TWO, "layer_types": [SPARSE]}, "layer_types=.* must name each of .*_layers=2"),
        (V4, {**TWO, "mlp_layer_types": ["moe"]}, "mlp_layer_types=.* must name each of"),
        (V4, {**TWO, "compress_ratios": [4, 128, 0]}, "compress_ratios=.* must name each of"),
        (V4, {**TWO, "compress_ratios": [4, 8]}, "compress_ratios has 8: 0, 4, 128 are supported"),
        (V4, {**TWO, "compress_ratios": [4, True]}, "compress_ratios has True"),
        (
            V4,
            {**TWO, "compress_ratios": [4, 0], "layer_types": [SPARSE, HEAVY]},
            "compress_ratios=.* contradicts layer_types=.*: remove one",
        ),
        (
            V4,
            {**TWO, "compress_ratios": [4, 0], "compress_rate_csa": 8},
            f"compress_ratios of 4 contradicts compress_rates.{SPARSE}=8: remove one",
        ),
        (V4, {"compress_rates": {SPARSE: 4}}, "compress_rates=.* must have a number for"),
        (V4, {"compress_rates": {SPARSE: 4, HEAVY: 1}}, f"{HEAVY}=1 must be an integer from 2"),
        (
            V4,
            {"compress_rate_hca": 64, "compress_rates": {SPARSE: 4, HEAVY: 128}},
            "compress_rate_hca=64 contradicts .*=128: remove one",
        ),
        (V4, {**TWO, "num_hash_layers": 3}, "num_hash_layers=3 must be an integer from 0 to"),
        (
            V4,
            {**TWO, "num_hash_layers": 1, "mlp_layer_types": ["moe", "moe"]},
            "num_hash_layers=1 contradicts mlp_layer_types=",
        ),
        (
            V4,
            {**TWO, "num_hash_layers": 0, "mlp_layer_types": ["hash_moe", "moe"]},
            "num_hash_layers=0 contradicts mlp_layer_types=.*: remove one",
        ),
        (V4, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        (V4, {"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
        (V4, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        (
            V4,
            {"rope_parameters": {"main": {"alpha": 2}, "compress": {}}},
            "rope_parameters.main.alpha=2",
        ),
        (M2, {"attn_type_list": [1, 0]}, "attn_type_list=0 is not supported"),
        (M2, {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported"),
        (M2, {"shared_intermediate_size": 8}, "shared_intermediate_size=8: remove"),
        (M2, {"use_routing_bias": False}, "use_routing_bias=False is not supported"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        (KIMI, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
        (KIMI, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        (KIMI, {**kda(), "num_hidden_layers": None}, "num_hidden_layers is missing beside"),
        (KIMI, {"linear_head_dim": 0}, "linear_head_dim=0 must be an integer from 1 to 256"),
        (KIMI, {"linear_attn_config": 4}, "linear_attn_config must be an object"),
        (KIMI, {"linear_attn_config": None}, "linear_attn_config must be an object"),
        (KIMI, {**kda(), "linear_head_dim": 64}, "linear_head_dim=64 contradicts .*head_dim=128"),
        (KIMI, kda(head_dim=512), "_config.head_dim=512 must be an integer from 1 to 256"),
        (KIMI, kda(num_heads=True), "linear_attn_config.num_heads=True must be an integer"),
        (KIMI, kda(short_conv_kernel_size=1), "short_conv_kernel_size=1 must be an integer from 2"),
        (KIMI, kda(gate_lower_bound=-5.0), "linear_attn_config.gate_lower_bound=-5.0 is not known"),
        (KIMI, {"linear_attn_config": {"kda_layers": [1]}}, "_attn_config has kda_layers alone"),
        (KIMI, kda(kda_layers=None), "linear_attn_config.kda_layers has None: each layer"),
        (KIMI, kda(full_attn_layers=[4, 28]), "full_attn_layers has 28: each layer from 1 to 27"),
        (KIMI, kda(full_attn_layers=[0]), "full_attn_layers has 0: each layer from 1 to 27"),
        (KIMI, kda(full_attn_layers=[4, 5]), "kda_layers has 5: each layer from 1 to 27"),
        (KIMI, kda(full_attn_layers="4"), "full_attn_layers has 4: each layer"),
        (KIMI, kda(full_attn_layers=[4]), "layer 8 of 27 is in none of"),
        (KIMI, {**kda(), "layer_types": ["full_attention"] * 27}, "layer_types contradicts"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_not_supported_is_named(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_fields({**COMMON, **changes}, architecture)
    assert "\n" not in str(caught.value)


def test_settings_that_are_off_are_accepted() -> None:
    off: dict[str, Any] = {"a": None, "b": False, "c": 0.0, "d": "", "e": [], "f": {}}
    check_fields({**COMMON, **off, "hidden_act": None, "_private": 1}, "LlamaForCausalLM")


def test_a_switch_is_no_number() -> None:
    for value in (True, 2):
        with pytest.raises(ValueError, match="moe_layer_freq"):
            check_fields({**DEEPSEEK, "moe_layer_freq": value}, "DeepseekV3ForCausalLM")
    with pytest.raises(ValueError, match="is_causal=0"):
        check_fields({**COMMON, "is_causal": 0}, "LlamaForCausalLM")


def test_a_text_model_beside_others_may_be_repeated_and_is_checked() -> None:
    architecture, raw = PUBLISHED["Qwen3.5"]
    check_fields({**raw, "linear_key_head_dim": 128}, architecture)
    with pytest.raises(ValueError, match=r"architecture.* linear_key_head_dim=64|linear_key"):
        check_fields({**raw, "linear_key_head_dim": 64}, architecture)
    text = {**QWEN3_5_TEXT, "logit_scale": 0.5}
    with pytest.raises(ValueError, match=r"text_config\.logit_scale=0\.5"):
        check_fields({**raw, "text_config": text}, architecture)
    text = {**QWEN3_5_TEXT, "model_type": "qwen3_5_moe_text"}
    with pytest.raises(ValueError, match=r"text_config\.model_type='qwen3_5_moe_text' is not that"):
        check_fields({**raw, "text_config": text}, architecture)


def test_all_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    tiny_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"logit_scale": 2.0}))
    with pytest.raises(ValueError, match=f"{tmp_path}: config.json has settings .*logit_scale=2.0"):
        ModelConfig.from_path(str(tmp_path))
