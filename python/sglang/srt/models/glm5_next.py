"""GLM-5.3-Flash: layers of Kimi Delta Attention (KDA), some of latent attention to groups of tokens
that an indexer chooses, hyper-connections, experts. Positions are in the states alone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from sglang.srt.configs.mla_config import PooledIndexerConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.activation import GatedMLP
from sglang.srt.layers.attention_kind import POOLED_DSA
from sglang.srt.layers.compressed.group_plan import plan_groups
from sglang.srt.layers.compressed.hyper_connection import HyperConnection, Streams
from sglang.srt.layers.forward_batch_info import ForwardBatch, IndexQuery
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear_attention.delta_layer import DeltaNetHeads, state_spec
from sglang.srt.layers.linear_attention.kda import KimiDeltaAttention
from sglang.srt.layers.mla.pooled_indexer import PooledIndexer
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SparseMoeBlock, SparseMoeOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.nsa_pool import NSASpec
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName, StateBuffer, StateSpec
from sglang.srt.models.deepseek_v2 import (
    DeepseekV2AttentionMLA,
    DeepseekV3ForCausalLM,
    grouped_router,
    layers_with_experts,
)
from sglang.srt.models.deepseek_v4 import hyper_options, positive_number
from sglang.srt.models.kimi_linear import linear_options
from sglang.srt.models.llama import DecoderOptions, LayerSpec, LlamaModel
from sglang.srt.models.mtp import DraftNames
from sglang.srt.models.streams_layer import StreamsLayer


class Glm5NextAttention(DeepseekV2AttentionMLA):
    """Latent attention to groups of tokens that an indexer chooses: its own, or that of the layer
    before."""

    kind = POOLED_DSA
    norm_eps = None

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: config.json has impossible sizes."""
        super().__init__(layer)
        config, layer_id = layer.config, layer.layer_id
        self.settings = settings = PooledIndexerConfig.from_hf(config.hf_config)
        types = config.hf_config.layer_types
        after = layer_id + 1
        self.is_shared = (
            after < len(types)
            and types[after] == types[layer_id]
            and after not in settings.full_layers
        )
        """True if the next layer shares the choice."""
        self.indexer: PooledIndexer | None = None
        if layer_id in settings.full_layers:
            assert self.mla.q_lora_rank is not None, "the config's class checks it"
            self.indexer = PooledIndexer(
                settings,
                self.mla.q_lora_rank,
                config.hidden_size,
                layer_id,
                placement=layer.placement.at("self_attn").at("indexer"),
            )

    def _index(self, x: torch.Tensor, q_input: torch.Tensor, step: LayerStep) -> IndexQuery | None:
        """Store the keys of groups that the step finishes, and return queries if a context has
        more tokens than are chosen and an open group."""
        settings, forward_batch = self.settings, step.batch
        is_short = forward_batch.longest_context < settings.topk + settings.ratio
        if self.indexer is None:
            return None if is_short else forward_batch.index
        self.indexer.store_keys(x, forward_batch)
        if is_short:
            return None
        index = self.indexer.queries(x, q_input)
        if self.is_shared:
            shape = len(x), settings.topk // settings.ratio
            chosen = torch.empty(shape, dtype=torch.int32, device=x.device)
            index = index._replace(chosen=chosen)
            forward_batch.index = index._replace(is_known=True)
        return index


class Glm5NextLayer(StreamsLayer):
    """Attention and a feed-forward part, each with hyper-connections around it."""

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: config.json contradicts itself, or the ranks do not divide a size."""
        super().__init__()
        config, placement, options = layer.config, layer.placement, layer.options
        hf, size, eps = config.hf_config, config.hidden_size, config.rms_norm_eps
        hyper = hyper_options(config)
        norms = (
            RMSNorm(size, eps, placement=placement.at(name))
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.attn_mix = HyperConnection(hyper, next(norms), placement.at("hc_attn"))
        self.mlp_mix = HyperConnection(hyper, next(norms), placement.at("hc_ffn"))
        self.self_attn: Glm5NextAttention | KimiDeltaAttention
        if layer.layer_id in config.linear_attention_layers:
            self.self_attn = KimiDeltaAttention(
                linear_options(config),
                placement.at("self_attn"),
                layer.layer_id,
                decay_bound=_decay_bound(hf),
            )
        else:
            self.self_attn = Glm5NextAttention(layer)
        self.mlp: GatedMLP | SparseMoeBlock
        if layer.layer_id in options.sparse_layers:
            assert options.sparse is not None
            self.mlp = SparseMoeBlock(options.sparse, placement.at("mlp"))
        else:
            self.mlp = GatedMLP(
                size,
                config.intermediate_size,
                bias=False,
                placement=placement.at("mlp"),
                activation=_activation(hf),
            )

    def attend(
        self, x: torch.Tensor, zeros: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor | None]:
        return self.self_attn.forward(x, zeros, step)

    def feed(
        self, x: torch.Tensor, zeros: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor | None]:
        return self.mlp.forward(x, zeros)


class Glm5NextModel(LlamaModel):
    """Embedding, layers, the average of the streams and the final norm."""

    def __init__(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> None:
        super().__init__(config, options, placement)
        self._ratio = PooledIndexerConfig.from_hf(config.hf_config).ratio

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        if fused_kernels(input_ids.device) is None:
            plan_groups(forward_batch, [self._ratio])
        step = LayerStep(self.rotary_emb.forward(positions), forward_batch)
        streams = Streams(self.embed_tokens.forward(input_ids))
        last = self.decoder_layers[-1]
        for layer in self.decoder_layers:
            assert isinstance(layer, StreamsLayer)
            if layer is last:
                # After the last layer only the last token of each request is read.
                step = step._replace(rows=forward_batch.rows_to_compute())
            streams = layer.run(streams, step)
        return self.norm.forward(streams.joined().mean(dim=1))


class Glm5NextForConditionalGeneration(DeepseekV3ForCausalLM):
    """The text model of a checkpoint with a vision tower, whose tensors are not read; see
    `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    model_prefix = "model.language_model"

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        self._pooled = PooledIndexerConfig.from_hf(config.hf_config)
        options, layers = linear_options(config), config.linear_attention_layers
        heads = DeltaNetHeads.of(options, placement)
        self._states = state_spec(options, heads, layers, config.ssm_dtype, config.dtype)

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        return DecoderOptions(
            sparse=cls._sparse_options(config),
            sparse_layers=frozenset(layers_with_experts(config)),
            layer=Glm5NextLayer,
        )

    @classmethod
    def _sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        return replace(super()._sparse_options(config), activation=_activation(config.hf_config))

    @classmethod
    def _router(cls, config: ModelConfig) -> RouterOptions:
        return grouped_router(config.hf_config, "n_routed_experts")

    @classmethod
    def draft_names(cls, config: ModelConfig) -> DraftNames:
        """Names of draft layers, which are not read. config.json may not count them."""
        count = getattr(config.hf_config, "num_nextn_predict_layers", None) or 1
        layers = f"{cls.model_prefix}.layers"
        return DraftNames.as_next_layers(layers, config.num_hidden_layers, count)

    def _make_model(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> LlamaModel:
        return Glm5NextModel(config, options, placement)

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Latent rows by token, indexer keys by group of tokens, recurrent states by prefix,
        unfinished groups by running request.

        Raises:
            ValueError: Rows would be in fp8.
        """
        if kv_dtype is FP8:
            raise ValueError(
                "--kv-cache-dtype fp8_e4m3: latent rows without a rotated part are not kept in fp8:"
                " use --kv-cache-dtype auto or bfloat16"
            )
        (latent,) = super().state_specs(kv_dtype)
        assert isinstance(latent, MLASpec)
        settings, dtype = self._pooled, self._dtype
        full = settings.full_layers
        rows = NSASpec.beside(latent, settings.head_dim, dtype, full, stride=settings.ratio)
        opened = StateSpec(
            name=PoolName.OPEN_GROUP,
            layers=full,
            # Keys and gates.
            buffers=(
                StateBuffer("index_tokens", (settings.ratio - 1, 2 * settings.head_dim), dtype),
            ),
            item=ItemKind.REQUEST,
        )
        return rows, rows.indexer, self._states, opened

    def is_redundant(self, name: str) -> bool:
        """Also true of the vision tower's tensors."""
        return super().is_redundant(name) or name.startswith("model.visual.")


def _activation(hf: PretrainedConfig) -> ClampedGate:
    return ClampedGate(limit=positive_number(hf, "swiglu_limit"))


def _decay_bound(hf: PretrainedConfig) -> float:
    """See `BoundedKimiGates`. Raises ValueError: the field is no negative number."""
    value = getattr(hf, "linear_lower_bound", None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < 0:
        raise ValueError(
            f"config.json: linear_lower_bound={value!r} must be a negative number: a decay without "
            "a bound is not supported"
        )
    return float(value)
