"""Nemotron-H and Nemotron-3: Mamba-2, attention, dense and sparse layers in one list.

A layer has one block, after a norm. Attention knows no positions.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.activation import SquaredReluMLP
from sglang.srt.layers.linear_attention.mamba2 import Mamba2, Mamba2Heads, Mamba2Options
from sglang.srt.layers.moe.sparse_moe import (
    SharedExpertOptions,
    SparseMoeBlock,
    SparseMoeOptions,
)
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.mem_cache.device.state_pool import MambaSpec
from sglang.srt.mem_cache.device.state_spec import RankSplit, StateSpec
from sglang.srt.models.deepseek_v2 import grouped_router
from sglang.srt.models.llama import (
    DecoderOptions,
    LayerSpec,
    LlamaAttention,
    LlamaForCausalLM,
    ResidualLayer,
)
from sglang.srt.models.mtp import DraftNames

_BLOCK = "mixer"
"""Name of a layer's block in a checkpoint, whatever its kind."""


class NemotronHAttention(LlamaAttention):
    """Grouped-query attention; the rotation of `RopeConfig` "none" changes nothing."""

    name = _BLOCK


class NemotronHLayer(ResidualLayer):
    """One block of any kind, after a norm and with a residual."""

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: config.json contradicts itself, or the ranks do not divide a size."""
        super().__init__()
        config, placement = layer.config, layer.placement.at(_BLOCK)
        size = config.hidden_size
        self.norm = layer.options.norm(
            size, config.rms_norm_eps, placement=layer.placement.at("norm")
        )
        self.mixer: Mamba2 | NemotronHAttention | SparseMoeBlock | SquaredReluMLP
        match config.hf_config.layer_types[layer.layer_id]:
            case "linear_attention":
                self.mixer = Mamba2(_mamba_options(config), placement, layer.layer_id)
            case "full_attention":
                self.mixer = NemotronHAttention(layer)
            case "moe":
                self.mixer = SparseMoeBlock(_sparse_options(config), placement)
            case _:
                inner = config.intermediate_size
                self.mixer = SquaredReluMLP(size, inner, bias=False, placement=placement)

    def forward(
        self, x: ToAdd, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        block, rows = self.mixer, step.rows
        sees_others = isinstance(block, Mamba2 | NemotronHAttention)
        # Rows cannot be picked out of a rounded input.
        consumer = block.first_weight if sees_others or rows is None else None
        normed, residual = self.norm.add_and_round_(x, residual, consumer)
        if rows is not None:
            residual = residual.index_select(0, rows)
        if isinstance(block, Mamba2 | NemotronHAttention):
            return block.forward(normed, residual, step)
        if rows is not None:
            assert isinstance(normed, torch.Tensor)
            normed = normed.index_select(0, rows)
        return block.forward(normed, residual)


class NemotronHForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    model_prefix = "backbone"

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        if not config.linear_attention_layers:
            raise ValueError(
                "config.json: layers_block_type names no linear_attention layer, and at least one "
                "is needed"
            )
        options = _mamba_options(config)
        heads = Mamba2Heads.of(options, placement)
        own = options.on_rank(heads)
        self._states = MambaSpec.of_shapes(
            config.linear_attention_layers,
            (own.num_heads, own.head_dim, own.state_size),
            (sum(own.runs), own.kernel - 1),
            ssm_dtype=config.ssm_dtype,
            conv_dtype=config.dtype,
            # Groups are never divided; a head has no part of B and C of its own.
            share=heads.groups.of_state(RankSplit.HEADS),
            conv_runs=own.runs,
        )

    @classmethod
    def head_names(cls) -> tuple[str, str]:
        return "lm_head.weight", f"{cls.model_prefix}.embeddings.weight"

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        return DecoderOptions(layer=NemotronHLayer, embedding_name="embeddings", norm_name="norm_f")

    @classmethod
    def draft_names(cls, config: ModelConfig) -> DraftNames:
        """Names of draft layers, which are not read."""
        return DraftNames.as_model("mtp", 1)

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Specs of keys and values of the attention layers, and of states of the Mamba-2 layers."""
        return (*super().state_specs(kv_dtype), self._states)


def _mamba_options(config: ModelConfig) -> Mamba2Options:
    hf = config.hf_config
    assert config.state_chunk is not None, "every config of the family has a chunk_size"
    return Mamba2Options(
        hidden_size=config.hidden_size,
        num_heads=positive_int(hf, "mamba_num_heads"),
        head_dim=positive_int(hf, "mamba_head_dim"),
        num_groups=positive_int(hf, "n_groups"),
        state_size=positive_int(hf, "ssm_state_size"),
        kernel=positive_int(hf, "conv_kernel"),
        chunk=config.state_chunk,
        eps=config.rms_norm_eps,
    )


def _sparse_options(config: ModelConfig) -> SparseMoeOptions:
    hf = config.hf_config
    has_latent = hf.moe_latent_size is not None
    router = grouped_router(hf, "n_routed_experts")
    return SparseMoeOptions(
        hidden_size=config.hidden_size,
        intermediate_size=positive_int(hf, "moe_intermediate_size"),
        router=router,
        router_dtype=torch.float32,
        has_correction_bias=True,
        shared=SharedExpertOptions(
            intermediate_size=positive_int(hf, "moe_shared_expert_intermediate_size")
        ),
        activation="squared_relu",
        latent_size=positive_int(hf, "moe_latent_size") if has_latent else None,
    )
