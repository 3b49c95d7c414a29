"""Qwen3-Next: delta-net layers with full attention in between; and what Qwen3.5 shares with it."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_mlp import GatedMLP
from sglang.srt.layers.layernorm import ZeroCenteredRMSNorm
from sglang.srt.layers.linear_attention.delta_net import DeltaNetOptions, GatedDeltaNet
from sglang.srt.layers.linear_attention.extend_plan import ExtendPlan
from sglang.srt.layers.moe.sparse_moe import SharedExpertOptions, SparseMoeBlock, SparseMoeOptions
from sglang.srt.layers.moe.topk import RouterOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, Rotation
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.models.llama import LlamaForCausalLM


class HybridDecoderLayer(torch.nn.Module):
    """Full or linear attention and a feed-forward layer, each behind a norm, beside a residual."""

    def __init__(
        self,
        config: ModelConfig,
        linear: DeltaNetOptions,
        mlp: GatedMLP | SparseMoeBlock,
        placement: TensorPlacement,
        layer_id: int,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: GatedAttention | None = None
        self.linear_attn: GatedDeltaNet | None = None
        if layer_id in config.linear_attention_layers:
            self.linear_attn = GatedDeltaNet(linear, placement.at("linear_attn"), layer_id)
        else:
            self.self_attn = GatedAttention(config, placement.at("self_attn"), layer_id)
        self.mlp = mlp
        self.input_layernorm = ZeroCenteredRMSNorm(
            size, eps, placement=placement.at("input_layernorm")
        )
        self.post_attention_layernorm = ZeroCenteredRMSNorm(
            size, eps, placement=placement.at("post_attention_layernorm")
        )

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
        plan: ExtendPlan | None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run the layer: see `LlamaDecoderLayer.forward`.

        Args:
            plan: Of the delta-net layers, in a prefill; None: a decode step.
        """
        normed, residual = self.input_layernorm.add_(x, residual)
        if self.linear_attn is not None:
            x, residual = self.linear_attn.forward(normed, residual, forward_batch, plan, rows)
        else:
            assert self.self_attn is not None
            x, residual = self.self_attn.forward(normed, residual, rotation, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_(x, residual)
        return self.mlp.forward(normed, residual)


class HybridModel(torch.nn.Module):
    """Embedding, decoder layers and the final norm."""

    def __init__(
        self,
        config: ModelConfig,
        linear: DeltaNetOptions,
        mlps: list[GatedMLP | SparseMoeBlock],
        placement: TensorPlacement,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, placement=placement.at("embed_tokens")
        )
        self.decoder_layers = [
            HybridDecoderLayer(config, linear, mlp, placement.at(f"layers.{i}"), i)
            for i, mlp in enumerate(mlps)
        ]
        self.layers = torch.nn.ModuleList(self.decoder_layers)
        self.norm = ZeroCenteredRMSNorm(
            config.hidden_size, config.rms_norm_eps, placement=placement.at("norm")
        )
        rotary_dim = config.rope.rotary_dim(config.head_dim)
        self.rotary_emb = RotaryEmbedding(config.rope, rotary_dim, placement=placement)
        self._kernel = linear.kernel

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Hidden states of `ForwardBatch.rows_for_logits`."""
        rotation = self.rotary_emb.forward(positions)
        plan = self._plan(forward_batch)
        x: torch.Tensor | None = None
        residual = self.embed_tokens.forward(input_ids)
        *most, last = self.decoder_layers
        for layer in most:
            x, residual = layer.forward(x, residual, rotation, forward_batch, plan)
        # Behind the last layer, each request's last token is the only one that is read.
        rows = forward_batch.rows_for_logits()
        x, residual = last.forward(x, residual, rotation, forward_batch, plan, rows)
        return self.norm.add_(x, residual)[0]

    def _plan(self, forward_batch: ForwardBatch) -> ExtendPlan | None:
        if not forward_batch.forward_mode.is_extend():
            return None
        assert forward_batch.extend_seq_lens_cpu is not None
        assert forward_batch.states is not None, "whoever made the batch gave it states"
        return ExtendPlan.of(
            forward_batch.extend_seq_lens_cpu,
            forward_batch.states.track_lens_cpu,
            self._kernel,
            forward_batch.input_ids.device,
        )


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError where config.json contradicts itself."""

    has_grouped_projections = True
    """See `DeltaNetOptions.is_grouped`."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        self._linear = self._linear_options(config)
        self._linear_layers = config.linear_attention_layers
        self._dtypes = config.ssm_dtype, config.dtype

    def make_model(self, config: ModelConfig, placement: TensorPlacement) -> HybridModel:
        mlps = [
            self.make_mlp(config, layer, placement.at(f"layers.{layer}.mlp"))
            for layer in range(config.num_hidden_layers)
        ]
        return HybridModel(config, self._linear_options(config), mlps, placement)

    def make_mlp(
        self, config: ModelConfig, layer_id: int, placement: TensorPlacement
    ) -> GatedMLP | SparseMoeBlock:
        """The feed-forward layer of a decoder layer."""
        hf = config.hf_config
        is_sparse = (
            layer_id not in (hf.mlp_only_layers or ())
            and hf.num_experts > 0
            and (layer_id + 1) % positive_int(hf, "decoder_sparse_step") == 0
        )
        if is_sparse:
            return SparseMoeBlock(sparse_options(config, bool(hf.norm_topk_prob)), placement)
        return GatedMLP(
            config.hidden_size, config.intermediate_size, bias=False, placement=placement
        )

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Keys and values of the full-attention layers, states of the others."""
        ssm_dtype, conv_dtype = self._dtypes
        states = self._linear.state_spec(self._linear_layers, ssm_dtype, conv_dtype)
        return (*super().state_specs(kv_dtype), states)

    def is_redundant(self, name: str) -> bool:
        """Also what predicts several tokens at once, which the engine does not do."""
        return super().is_redundant(name) or name.startswith("mtp.")

    def _linear_options(self, config: ModelConfig) -> DeltaNetOptions:
        hf = config.hf_config
        return DeltaNetOptions(
            hidden_size=config.hidden_size,
            num_key_heads=positive_int(hf, "linear_num_key_heads"),
            num_heads=positive_int(hf, "linear_num_value_heads"),
            key_dim=positive_int(hf, "linear_key_head_dim"),
            value_dim=positive_int(hf, "linear_value_head_dim"),
            kernel=positive_int(hf, "linear_conv_kernel_dim"),
            eps=config.rms_norm_eps,
            is_grouped=self.has_grouped_projections,
        )


def sparse_options(config: ModelConfig, renormalize: bool) -> SparseMoeOptions:
    """The experts of the family: softmax over all, and one that every token uses, gated.

    Args:
        renormalize: Whether the weights of a token's experts are divided by their sum.

    Raises:
        ValueError: config.json asks for experts that there cannot be.
    """
    hf = config.hf_config
    num_experts, top_k = positive_int(hf, "num_experts"), positive_int(hf, "num_experts_per_tok")
    try:
        router = RouterOptions(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error
    return SparseMoeOptions(
        hidden_size=config.hidden_size,
        intermediate_size=positive_int(hf, "moe_intermediate_size"),
        router=router,
        shared=SharedExpertOptions(
            intermediate_size=positive_int(hf, "shared_expert_intermediate_size"),
            name="shared_expert",
            has_gate=True,
        ),
    )
