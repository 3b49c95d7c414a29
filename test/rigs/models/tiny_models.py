"""Tiny checkpoints with random weights, and a driver that runs a `ModelRunner` by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.models.glm4_moe_lite.configuration_glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteForCausalLM
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssForCausalLM
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

from rigs.checkpoints import deepseek_v4, glm5_next
from rigs.checkpoints.published_names import name_as_published
from rigs.checkpoints.vision_configs import KIMI_VISION, beside_vision
from rigs.drafts.tiny_drafts import save_draft
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    StateBatch,
    compute_extend_positions,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig

_CLASSES: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "deepseek_v4": (DeepseekV4Config, DeepseekV4ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "glm5_next": (
        beside_vision(Glm5NextConfig, glm5_next.VISION),
        Glm5NextForConditionalGeneration,
    ),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "glm_moe_dsa_shared": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    # transformers embeds token 0 in place of an image that is not there.
    "kimi_k25_vision": (
        beside_vision(Kimi_K25Config, KIMI_VISION, image_token=163605),
        Kimi_K25ForConditionalGeneration,
    ),
    "kimi_linear": (KimiLinearConfig, KimiLinearForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_vision": (beside_vision(Qwen3_5Config), Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe_vision": (beside_vision(Qwen3_5MoeConfig), Qwen3_5MoeForConditionalGeneration),
}
FAMILIES = tuple(_CLASSES)
_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_INDEXED: dict[str, Any] = {
    **_LATENT,
    "index_topk": 32,
    "index_n_heads": 16,
    "index_head_dim": 24,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Two layers of linear attention, one of full attention."""
_HYBRID_EXPERTS: dict[str, Any] = {
    **_HYBRID,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
}
_HYBRID_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID_EXPERTS,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID_EXPERTS,
    "qwen3_5_vision": {**_HYBRID, **_MROPE},
    "qwen3_5_moe_vision": {**_HYBRID_EXPERTS, **_MROPE},
}
_SCALES = ("norm.weight", "norm_f.weight")
_ONE_BLOCK: dict[str, Any] = {
    "layers_block_type": [
        "linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe",
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 44,
    "moe_latent_size": 40,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    **_HYBRID_FAMILIES,
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**_INDEXED, "n_group": 4, "topk_group": 2},
    "deepseek_v4": deepseek_v4.TINY,
    "glm5_next": glm5_next.TINY,
    "glm_moe_dsa": {**_INDEXED, "indexer_rope_interleave": True},
    "glm_moe_dsa_shared": {
        **_INDEXED,
        "indexer_rope_interleave": True,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "kimi_k25_vision": {**_LATENT, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {**_LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 12,
        # Most gates and ups of random weights exceed it.
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "kimi_linear": {
        **{name: _LATENT[name] for name in _LATENT if name != "n_routed_experts"},
        "num_hidden_layers": 3,
        "q_lora_rank": None,
        "pad_token_id": None,
        "head_dim": 18,
        "num_experts": 8,
        "n_shared_experts": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 12,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "mistral": {"sliding_window": None},
    "nemotron_h": _ONE_BLOCK,
    "ministral": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Fields of the config that only one family has."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of a tiny model of `family`, a key of `_CLASSES`, with these fields changed."""
    config_class, _ = _CLASSES[family]
    return config_class(**{**_SHAPE, **_FAMILY_SHAPES.get(family, {}), **overrides})


def save_tiny_checkpoint(
    directory: Path | str,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    mtp: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a random model of `family`, a key of `_CLASSES`; return transformers' model.

    Args:
        mtp: Add a layer that drafts tokens; `tiny_draft` makes its weights.
        overrides: Fields of the family's config (of its text model if that is a part), and
            `max_shard_size` for the writer.
    """
    _, model_class = _CLASSES[family]
    shard = overrides.pop("max_shard_size", "1GB")
    if mtp:
        field = (
            "mtp_num_hidden_layers" if family in _HYBRID_FAMILIES else "num_nextn_predict_layers"
        )
        overrides = {field: 1, **overrides}
    config = tiny_config(family, **overrides)
    generator = torch.Generator().manual_seed(17)
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # The default initialisation has zero biases and norms of 1, which would test nothing.
            noise = torch.randn(weight.shape, generator=generator)
            # Most norms of the hybrids scale by 1 + weight.
            is_scale = name.endswith(_SCALES) and family not in _HYBRID_FAMILIES
            weight.copy_(noise * 0.2 + (1.0 if is_scale else 0.0))
            # A state that forgets within some tokens would hide that it was a wrong one.
            if name.endswith("dt_bias" if family == "glm5_next" else "A_log"):
                weight.sub_(5.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            if name.endswith("tid2eid"):
                scores = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
                buffer.copy_(scores.argsort(dim=1)[:, : buffer.shape[1]])
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # transformers raises small steps in prefills, but not in decoding.
            module.time_step_limit = (0.0, float("inf"))  # type: ignore[assignment]
        if isinstance(module, GptOssExperts):
            # transformers 5.17 takes no limit from the configuration.
            module.limit = config.swiglu_limit
    torch.nn.Module.to(model, dtype=dtype)
    model.save_pretrained(str(directory), max_shard_size=shard)
    name_as_published(Path(directory), family)
    if mtp:
        save_draft(directory, model)
    return model


class _Row:
    """Stands for a request that has a row of the table."""

    def __init__(self) -> None:
        self.req_pool_idx: int | None = None


Snapshots = Mapping[int, tuple[int, int]]
"""For each row the slot for a snapshot of its state and, in a prefill, the number of its new tokens
before the snapshot."""


class StepDriver:
    """Runs extend and decode steps of a few requests, as a scheduler would."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        page_size: int = 1,
        pool_tokens: int = 4096,
        max_requests: int = 16,
        num_states: int | None = None,
        **config: Any,
    ) -> None:
        """Args:
        num_states: Slots of recurrent states, those of the rows included; None: no others.
        config: Further fields of `ModelRunnerConfig`, and `dtype`, `ssm_dtype`,
            `has_draft_layer` and `quantization` of the model.
        """
        model_config = ModelConfig.from_path(
            str(model_path),
            dtype=config.pop("dtype", "auto"),
            ssm_dtype=config.pop("ssm_dtype", "float32"),
            has_draft_layer=config.pop("has_draft_layer", False),
            quantization=config.pop("quantization", None),
        )
        self.runner = ModelRunner(
            ModelRunnerConfig(
                model_config=model_config, page_size=page_size, show_progress=False, **config
            )
        )
        self.device = self.runner.config.device
        self.runner.init_memory_pool(pool_tokens, max_requests, num_states=num_states)
        self.runner.req_to_token_pool.alloc([_Row() for _ in range(max_requests)])
        self.lens = [0] * max_requests
        """Number of tokens of each row in the pool."""

    def extend(
        self,
        work: Sequence[tuple[int, Sequence[int]]],
        snapshots: Snapshots | None = None,
        before: Callable[[ForwardBatch], None] = lambda batch: None,
    ) -> LogitsProcessorOutput:
        """Compute `(row, new tokens)` of several requests in one step.

        Args:
            before: May change the batch before it runs.
        """
        rows = [row for row, _ in work]
        prefix = [self.lens[row] for row in rows]
        new = [len(tokens) for _, tokens in work]
        total = [known + count for known, count in zip(prefix, new, strict=True)]
        loc = self.runner.token_to_kv_pool_allocator.alloc_extend(
            self._tensor(prefix),
            prefix,
            self._tensor(total),
            total,
            self._last_loc(rows),
            sum(new),
        )
        assert loc is not None, "the test's pool is too small"
        pool = self.runner.req_to_token_pool
        for row, known, slots in zip(rows, prefix, torch.split(loc, new), strict=True):
            pool.req_to_token[row, known : known + len(slots)] = slots.to(torch.int32)
        flat = [token for _, tokens in work for token in tokens]
        batch = self._batch(ForwardMode.EXTEND, rows, total, flat, loc)
        batch.positions = compute_extend_positions(prefix, new, self.device)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = prefix, new
        batch.req_pool_indices_cpu = batch.req_pool_indices.tolist()
        self._track(batch, rows, snapshots)
        before(batch)
        return self._run(batch, rows, total)

    def decode(
        self,
        work: Sequence[tuple[int, int]],
        snapshots: Snapshots | None = None,
        before: Callable[[ForwardBatch], None] = lambda batch: None,
    ) -> LogitsProcessorOutput:
        """Compute one token of each request, given as `(row, token)`; `before` as in `extend`."""
        rows = [row for row, _ in work]
        total = [self.lens[row] + 1 for row in rows]
        loc = self.runner.token_to_kv_pool_allocator.alloc_decode(
            self._tensor(total), total, self._last_loc(rows)
        )
        assert loc is not None, "the test's pool is too small"
        pool = self.runner.req_to_token_pool
        pool.req_to_token[self._tensor(rows), self._tensor(total) - 1] = loc.to(torch.int32)
        tokens = [token for _, token in work]
        batch = self._batch(ForwardMode.DECODE, rows, total, tokens, loc)
        self._track(batch, rows, snapshots)
        before(batch)
        return self._run(batch, rows, total)

    def continue_from(self, snapshot: int, source: int, rows: Sequence[int], length: int) -> None:
        """Let `rows`, which are empty, continue after the first `length` tokens of row `source`,
        whose state is in the slot `snapshot`."""
        table = self.runner.req_to_token_pool.req_to_token
        states = self.runner.req_to_token_pool.state_slots(self._tensor(rows))
        pool = state_pool(self.runner.pools.values())
        assert pool is not None and states is not None
        pool.copy_from(self._tensor([snapshot] * len(rows)), states)
        for row in rows:
            table[row, :length] = table[source, :length]
            self.lens[row] = length

    def _track(self, batch: ForwardBatch, rows: list[int], snapshots: Snapshots | None) -> None:
        if not snapshots:
            return
        assert batch.states is not None
        if batch.forward_mode.is_decode():
            found = [
                (place, snapshots[row][0]) for place, row in enumerate(rows) if row in snapshots
            ]
            places, targets = (self._tensor(column) for column in zip(*found, strict=True))
            batch.states.copied = batch.states.slots[places], targets
            return
        slots, lens = zip(*(snapshots.get(row, (0, 0)) for row in rows), strict=True)
        batch.states.track_slots, batch.states.track_lens_cpu = self._tensor(slots), list(lens)

    def _batch(
        self,
        mode: ForwardMode,
        rows: list[int],
        total: list[int],
        tokens: list[int],
        loc: torch.Tensor,
    ) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode,
            input_ids=self._tensor(tokens),
            positions=self._tensor(total) - 1,
            req_pool_indices=self._tensor(rows),
            seq_lens=self._tensor(total),
            seq_lens_cpu=total,
            out_cache_loc=loc,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool=self.runner.token_to_kv_pool,
            states=StateBatch.running(self.runner.req_to_token_pool, self._tensor(rows)),
        )

    def _run(self, batch: ForwardBatch, rows: list[int], total: list[int]) -> LogitsProcessorOutput:
        for row, length in zip(rows, total, strict=True):
            self.lens[row] = length
        return self.runner.forward(batch)

    def _last_loc(self, rows: list[int]) -> torch.Tensor:
        table = self.runner.req_to_token_pool.req_to_token
        slots = [int(table[row, self.lens[row] - 1]) if self.lens[row] else -1 for row in rows]
        return self._tensor(slots)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
