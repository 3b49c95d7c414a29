"""Checks the fields of a checkpoint's config.json. Needs neither torch nor transformers.

A field may change what the model computes, and ignoring it would give wrong words without an error.
For each architecture a field is read, harmless, or supported at stated values only. Other fields
are refused, unless they are null, false, zero or empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sglang.srt.configs.compressed_fields import DEEPSEEK_V4
from sglang.srt.configs.glm5_fields import GLM5_NEXT, GLM5_NEXT_TEXT
from sglang.srt.configs.kda_config import check_kda

TEXT_CONFIG: Final = "text_config"
"""The object of config.json that has the settings of a text model which is a part of the whole."""

_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "num_hidden_layers": (1, 1 << 12),
    "num_nextn_predict_layers": (0, 1 << 12),
    "num_mtp_layers": (0, 1 << 12),
    "mtp_num_hidden_layers": (0, 1 << 12),
    "first_k_dense_replace": (0, 1 << 12),
    "num_experts": (0, (1 << 15) - 1),
    "num_local_experts": (0, (1 << 15) - 1),
    "n_routed_experts": (0, (1 << 15) - 1),
    "n_shared_experts": (0, 1 << 16),
    "num_attention_heads": (1, 1 << 16),
    "hidden_size": (1, 1 << 24),
    "head_dim": (1, 1 << 16),
    "qk_rope_head_dim": (1, 1 << 16),
}
"""Least and greatest values of the fields with which transformers computes, or on which memory or
time depend before the weights are looked at."""
_MAX_SHOWN_CHARS: Final = 60
"""A value is cut to this length in errors."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ_OF_ALL: Final = _words("""
    architectures model_type dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    tie_word_embeddings rope_parameters eos_token_id
""")
_READ_BY_CLASS: Final = _words(
    "torch_dtype rope_scaling rope_theta partial_rotary_factor auto_map quantization_config"
)
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_sliding_window": (False,),
    "layer_types": ("full_attention",),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_rope": (True,),
}
_HARMLESS: Final = _words("""
    transformers_version name_or_path model_name tokenizer_class attn_implementation use_cache
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward is_decoder tie_encoder_decoder id2label label2id num_labels problem_type
    finetuning_task task_specific_params pad_token_id bos_token_id sep_token_id unk_token_id
    decoder_start_token_id prefix is_llama_config transformers.js_config use_mrope
    max_sequence_length unsloth_version unsloth_fixed

    initializer_range attention_dropout hidden_dropout pretraining_tp ep_size gradient_checkpointing
    output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux

    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
""")
"""Bookkeeping, settings of training, and defaults of generation, which clients choose here."""

_ROPE: Final = _words("""
    rope_type type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor
    original_max_position_embeddings beta_fast beta_slow truncate attention_factor mscale
    mscale_all_dim finetuned
""")
"""Fields of `rope_parameters` and `rope_scaling`. `RopeConfig` reads them, but `finetuned`."""

_ROPES: Final = _words("main compress")
"""Objects of `rope_parameters` that have such fields each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """The fields of one architecture, besides the fields of all architectures."""

    model_types: frozenset[str]
    """Values of `model_type` that name a config class of transformers for this architecture."""
    read: frozenset[str] = frozenset()
    read_by_class: frozenset[str] = frozenset()
    """Fields from which that class makes fields that are read."""
    harmless: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values by field, for each item where the value is a list. Null is always one."""
    letters: Mapping[str, str] = field(default_factory=dict)
    """Fields that are strings of these letters, one for each layer."""
    rope: frozenset[str] = frozenset()
    """Harmless fields of `rope_parameters`."""
    num_draft_layers: str | None = None
    """Field with the number of layers that draft tokens (MTP); None: no such layer is supported."""
    check: Callable[[Mapping[str, Any]], None] | None = None
    """Checks config.json further; raises ValueError."""
    text: ConfigFields | None = None
    """Fields of `text_config`, if the text model has its settings there; only the text model is
    served."""
    other_text_types: frozenset[str] = frozenset()
    """Further values of `text_config.model_type`, which that class reads as the text model's."""

    @property
    def of_text(self) -> ConfigFields:
        """The fields of the text model."""
        return self.text or self

    def known(self) -> frozenset[str]:
        """Fields whose values are not checked here."""
        own = self.read | self.read_by_class | self.harmless
        return READ_OF_ALL | _READ_BY_CLASS | _HARMLESS | own

    def supported(self) -> dict[str, tuple[Any, ...]]:
        """Supported values of the fields that have such."""
        own = {**_FIXED, **self.fixed}
        return {name: own[name] for name in own if name not in self.read | self.harmless}


_EXPERTS: Final = _words("num_experts num_experts_per_tok moe_intermediate_size")
_EXPERT_LAYERS: Final = _words("norm_topk_prob decoder_sparse_step mlp_only_layers")
_LINEAR: Final = _words("""
    attention_bias linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads
""")
_HYBRID_DRAFTS: Final = "mtp_num_hidden_layers"
_LATENT_DRAFTS: Final = "num_nextn_predict_layers"
_DRAFTS: Final = frozenset({_HYBRID_DRAFTS, _LATENT_DRAFTS, "mtp_use_dedicated_embeddings"})
"""Fields of layers that draft tokens. They have no effect unless these layers are loaded."""
_HYBRID_FIXED: Final = {
    "layer_types": ("linear_attention", "full_attention"),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
}
_WINDOWS: Final = _words("sliding_window max_window_layers")
"""Fields that have no effect while `use_sliding_window` is false."""
_ONE_BLOCK: Final = ("linear_attention", "full_attention", "mlp", "moe")
"""Kinds of layers that have one block each."""
_WINDOWED: Final = {"layer_types": ("full_attention", "sliding_attention")}
_SIGMOID_EXPERTS: Final = _words("""
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size
    routed_scaling_factor norm_topk_prob topk_method scoring_func n_group topk_group
    num_nextn_predict_layers
""")
_LATENT: Final = _SIGMOID_EXPERTS | _words("""
    attention_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    rope_interleave
""")
_LATENT_FIXED: Final = {"moe_layer_freq": (1,), "moe_router_dtype": ("float32",)}
_LATENT_BY_CLASS: Final = _words("num_experts num_local_experts num_mtp_layers")
_VISION: Final = _words("""
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    language_model_only
""")

_QWEN3_5: Final = ConfigFields(
    model_types=_words("qwen3_5_text"),
    read=_LINEAR,
    read_by_class=_words("full_attention_interval"),
    harmless=_DRAFTS | _WINDOWS | _words("mamba_ssm_dtype"),
    fixed=_HYBRID_FIXED,
    rope=_words("mrope_section mrope_interleaved"),
    num_draft_layers=_HYBRID_DRAFTS,
)
_QWEN3_5_MOE: Final = ConfigFields(
    model_types=_words("qwen3_5_moe_text"),
    read=_LINEAR | _EXPERTS | _words("shared_expert_intermediate_size"),
    read_by_class=_words("full_attention_interval"),
    harmless=_QWEN3_5.harmless,
    fixed={**_HYBRID_FIXED, "norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
    rope=_QWEN3_5.rope,
    num_draft_layers=_HYBRID_DRAFTS,
)

_DEEPSEEK_V3: Final = ConfigFields(
    model_types=_words("deepseek_v3"),
    read=_LATENT | _words("first_k_dense_replace"),
    read_by_class=_LATENT_BY_CLASS,
    harmless=_words("qk_head_dim"),
    fixed=_LATENT_FIXED,
    num_draft_layers=_LATENT_DRAFTS,
)

_DEEPSEEK_V32: Final = ConfigFields(
    model_types=_words("deepseek_v32"),
    read=_LATENT | _words("mlp_layer_types index_topk index_head_dim index_n_heads"),
    read_by_class=_LATENT_BY_CLASS | _words("first_k_dense_replace"),
    harmless=_words("qk_head_dim index_share_for_mtp_iteration"),
    fixed={
        **_LATENT_FIXED,
        # transformers 5.17 writes the second name, later releases the first.
        "layer_types": ("indexed_attention", "deepseek_sparse_attention"),
        "indexer_rope_interleave": (False,),
    },
    num_draft_layers=_LATENT_DRAFTS,
)
_KIMI_K25: Final = ConfigFields(
    model_types=_words("kimi_k25"),
    harmless=_VISION
    | _words("""
        projection_hidden_size projection_layer_norm_eps media_placeholder_token_id
        video_placeholder use_unified_vision_chunk ignore_index
    """),
    # No checkpoint has a layer that drafts.
    text=replace(_DEEPSEEK_V3, num_draft_layers=None),
    other_text_types=_words("kimi_k2"),
)
_SHARED_CHOICE: Final = _words("index_topk_freq index_skip_topk_offset index_topk_pattern")

FIELDS: Final[Mapping[str, ConfigFields]] = {
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_V3, model_types=_words("deepseek_v2"), num_draft_layers=None
    ),
    "DeepseekV32ForCausalLM": replace(
        _DEEPSEEK_V32,
        fixed={**_DEEPSEEK_V32.fixed, "indexer_types": ("full",), "index_topk_freq": (1,)},
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV4ForCausalLM": ConfigFields(**DEEPSEEK_V4),
    "Glm4MoeForCausalLM": ConfigFields(
        model_types=_words("glm4_moe"),
        read=_SIGMOID_EXPERTS | _words("attention_bias use_qk_norm first_k_dense_replace"),
        read_by_class=_LATENT_BY_CLASS,
        num_draft_layers=_LATENT_DRAFTS,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_types=_words("glm4_moe_lite"),
        read=_LATENT | _words("mlp_layer_types"),
        # transformers does not read this field; by its default only layer 0 is dense.
        fixed={**_LATENT_FIXED, "first_k_dense_replace": (1,)},
    ),
    "Glm5NextForConditionalGeneration": ConfigFields(
        **GLM5_NEXT, text=ConfigFields(**GLM5_NEXT_TEXT)
    ),
    "GlmMoeDsaForCausalLM": replace(
        _DEEPSEEK_V32,
        model_types=_words("glm_moe_dsa"),
        read=_DEEPSEEK_V32.read | _words("indexer_types"),
        read_by_class=_DEEPSEEK_V32.read_by_class | _SHARED_CHOICE,
        fixed={**_DEEPSEEK_V32.fixed, "indexer_rope_interleave": (True,)},
    ),
    "GptOssForCausalLM": ConfigFields(
        model_types=_words("gpt_oss"),
        read=_words("""
            attention_bias num_local_experts num_experts_per_tok sliding_window
            swiglu_alpha swiglu_limit
        """),
        read_by_class=_words("num_experts"),
        harmless=_words("experts_per_token initial_context_length"),
        fixed=_WINDOWED,
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "KimiLinearForCausalLM": ConfigFields(
        model_types=_words("kimi_linear"),
        read=_words("""
            attention_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
            linear_conv_kernel_dim linear_head_dim linear_num_heads
            num_experts num_experts_per_tok n_shared_experts moe_intermediate_size mlp_layer_types
            routed_scaling_factor norm_topk_prob n_group topk_group
        """),
        read_by_class=_words("""
            linear_attn_config model_max_length first_k_dense_replace num_local_experts
            num_experts_per_token num_shared_experts moe_renormalize num_expert_group
        """),
        harmless=_words("qk_head_dim"),
        fixed={
            "layer_types": ("linear_attention", "full_attention"),
            "mla_use_nope": (True,),
            "moe_layer_freq": (1,),
            "moe_router_activation_func": ("sigmoid",),
            "num_nextn_predict_layers": (0,),
            # transformers has no tied form.
            "tie_word_embeddings": (False,),
            "use_grouped_topk": (True,),
        },
        check=check_kda,
    ),
    "LlamaForCausalLM": ConfigFields(
        model_types=_words("llama"),
        read=_words("attention_bias mlp_bias"),
    ),
    "MiniMaxM2ForCausalLM": ConfigFields(
        model_types=_words("minimax_m2"),
        read=_words("num_local_experts num_experts_per_tok rotary_dim"),
        read_by_class=_words("num_experts"),
        harmless=_words("""
            use_mtp num_mtp_modules mtp_transformer_layers router_jitter_noise shared_moe_mode
            mlp_intermediate_size layernorm_full_attention_beta layernorm_linear_attention_beta
            layernorm_mlp_beta
        """),
        fixed={
            "attn_type_list": (1,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
    ),
    "MinistralForCausalLM": ConfigFields(
        model_types=_words("ministral"),
        read=_words("sliding_window"),
        fixed=_WINDOWED,
    ),
    "MistralForCausalLM": ConfigFields(
        model_types=_words("mistral"),
        read=_words("sliding_window"),
    ),
    "NemotronHForCausalLM": ConfigFields(
        model_types=_words("nemotron_h"),
        read=_words("""
            layer_norm_epsilon ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel
            chunk_size n_routed_experts num_experts_per_tok moe_intermediate_size
            moe_shared_expert_intermediate_size moe_latent_size routed_scaling_factor norm_topk_prob
            n_group topk_group
        """),
        read_by_class=_words("hybrid_override_pattern num_local_experts"),
        harmless=_words("""
            expand num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype time_step_min
            time_step_max time_step_floor moe_shared_expert_overlap rescale_prenorm_residual
            num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
        """),
        fixed={
            "layer_types": _ONE_BLOCK,
            "layers_block_type": _ONE_BLOCK,
            "norm_eps": (1e-5,),
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "attention_bias": (False,),
            "use_bias": (False,),
            "mamba_proj_bias": (False,),
            "use_conv_bias": (True,),
            "residual_in_fp32": (False,),
            # transformers writes the second form of infinity.
            "time_step_limit": (0.0, math.inf, {"__float__": "Infinity"}),
            "n_shared_experts": (1,),
            "sliding_window": (None,),
        },
        letters={"hybrid_override_pattern": "ME*-"},
    ),
    "Qwen2ForCausalLM": ConfigFields(
        model_types=_words("qwen2"),
        read=_words("sliding_window"),
        read_by_class=_words("max_window_layers"),
        # The biases are a part of the architecture.
        harmless=_words("attention_bias"),
        fixed={**_WINDOWED, "use_sliding_window": (False, True)},
    ),
    "Qwen3ForCausalLM": ConfigFields(
        model_types=_words("qwen3"),
        read=_words("attention_bias sliding_window"),
        read_by_class=_words("max_window_layers"),
        fixed={**_WINDOWED, "use_qk_norm": (True,), "use_sliding_window": (False, True)},
    ),
    "Qwen3MoeForCausalLM": ConfigFields(
        model_types=_words("qwen3_moe"),
        read=_EXPERTS | _EXPERT_LAYERS | _words("attention_bias"),
        read_by_class=_words("num_local_experts"),
        harmless=_WINDOWS,
        fixed={"use_qk_norm": (True,)},
    ),
    "Qwen3NextForCausalLM": ConfigFields(
        model_types=_words("qwen3_next"),
        read=_LINEAR | _EXPERTS | _EXPERT_LAYERS | _words("shared_expert_intermediate_size"),
        read_by_class=_words("full_attention_interval"),
        harmless=_DRAFTS | _WINDOWS,
        fixed=_HYBRID_FIXED,
        num_draft_layers=_HYBRID_DRAFTS,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": ConfigFields(
        model_types=_words("qwen3_5"), harmless=_VISION, text=_QWEN3_5
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": ConfigFields(
        model_types=_words("qwen3_5_moe"), harmless=_VISION, text=_QWEN3_5_MOE
    ),
}
"""The supported values of `architectures`. `models.registry` has a class for each."""


def check_fields(raw: Mapping[str, Any], architecture: str) -> None:
    """Check all fields of a config.json.

    Raises:
        ValueError: A value is not supported, or unknown fields may change what the model computes.
            One line that names them, with the remedy.
    """
    fields = FIELDS[architecture]
    known = fields.known()
    text: Mapping[str, Any] = {}
    if fields.text is not None:
        text = raw[TEXT_CONFIG]
        known |= {TEXT_CONFIG}
        model_type = text.get("model_type")
        text_types = fields.text.model_types | fields.other_text_types
        if model_type is not None and str(model_type) not in text_types:
            raise ValueError(
                f"config.json: {TEXT_CONFIG}.model_type={model_type!r} is not that of "
                f"{architecture} ({', '.join(sorted(text_types))}): copy the checkpoint again"
            )
        _check(text, fields.text, fields.text.known(), f"{TEXT_CONFIG}.", architecture)
    # Settings of the text model may be repeated beside it.
    own = {name: value for name, value in raw.items() if name not in text or text[name] != value}
    _check(own, fields, known, "", architecture)
    if fields.check is not None:
        fields.check(raw)


def _check(
    values: Mapping[str, Any],
    fields: ConfigFields,
    known: frozenset[str],
    prefix: str,
    architecture: str,
) -> None:
    supported = fields.supported()
    for name, (least, most) in _BOUNDS.items():
        value = None if name in supported or name in fields.harmless else values.get(name)
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise ValueError(
                f"config.json: {prefix}{name}={shown(value)} must be an integer from {least} to "
                f"{most}: copy the checkpoint again"
            )
    for name in ("dtype", "torch_dtype"):
        if not isinstance(values.get(name), str | None):
            raise ValueError(
                f"config.json: {prefix}{name}={shown(values[name])} must be the name of a dtype"
            )
    for name, allowed in supported.items():
        items = values.get(name)
        for item in items if isinstance(items, list) else [items]:
            if item is not None and not _is_one_of(item, allowed):
                raise ValueError(
                    f"config.json: {prefix}{name}={shown(item)} is not supported for "
                    f"{architecture}: {' or '.join(map(repr, allowed))} is"
                )
    for name, letters in fields.letters.items():
        pattern = values.get(name)
        if pattern is not None and not (isinstance(pattern, str) and set(pattern) <= set(letters)):
            raise ValueError(
                f"config.json: {prefix}{name}={shown(pattern)} must have a letter of {letters!r} "
                "for each layer: copy the checkpoint again"
            )
    unknown = [
        f"{prefix}{name}={shown(value)}"
        for name, value in _with_rope(values, fields.rope)
        if value and name not in known and name not in supported and not name.startswith("_")
    ]
    if unknown:
        raise ValueError(
            f"config.json has settings that are not known for {architecture} and may change what "
            f"the model computes: {', '.join(unknown)}: remove the settings that do not"
        )


def _with_rope(values: Mapping[str, Any], harmless: frozenset[str]) -> Iterator[tuple[str, object]]:
    """All fields, and the unknown fields of the rotation."""
    yield from values.items()
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        for inner, value in rope.items() if isinstance(rope, dict) else ():
            if inner in _ROPES and isinstance(value, dict):
                for field_name, one in value.items():
                    if field_name not in _ROPE:
                        yield f"{name}.{inner}.{field_name}", one
            elif inner not in _ROPE | harmless:
                yield f"{name}.{inner}", value


def _is_one_of(value: object, words: tuple[Any, ...]) -> bool:
    # True equals 1, and is another value.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in words)


def shown(value: object) -> str:
    """A value for an error, in one line of bounded length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
