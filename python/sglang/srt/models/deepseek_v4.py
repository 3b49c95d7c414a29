"""DeepSeek-V4: attention to a window and to compressed rows, hyper-connections, experts.

A part of the layers compresses each 4 tokens to a row, and an indexer chooses rows; another part
compresses each 128 tokens; some have a window alone. The first layers choose experts by token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from transformers import PretrainedConfig

from sglang.srt.configs.compressed_config import CompressedConfig
from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.attention.compressed_backend import CompressedAttention, LayerRows, row_store
from sglang.srt.layers.attention_kind import COMPRESSED
from sglang.srt.layers.compressed.compressor import CompressorOptions, GroupCompressor
from sglang.srt.layers.compressed.hyper_connection import (
    HyperConnection,
    HyperHead,
    HyperOptions,
    Streams,
)
from sglang.srt.layers.compressed.rotation import normalise_latents, rotate_heads
from sglang.srt.layers.forward_batch_info import ForwardBatch, IndexQuery
from sglang.srt.layers.layernorm import WideRMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    ProjectionsByFormat,
    RowParallelLinear,
    apply_by_group,
)
from sglang.srt.layers.moe.sparse_moe import (
    RouterOptions,
    SharedExpertOptions,
    SparseMoeBlock,
    SparseMoeOptions,
)
from sglang.srt.layers.placement import Share, TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, RotaryKinds
from sglang.srt.layers.triton_ops.arguments import ClampedGate
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec
from sglang.srt.mem_cache.device.row_pool import RowSpec
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)
from sglang.srt.models.gpt_oss import AttentionSinks
from sglang.srt.models.llama import (
    DecoderOptions,
    LayerSpec,
    LlamaForCausalLM,
    LlamaModel,
)
from sglang.srt.models.mtp import DraftNames
from sglang.srt.models.streams_layer import StreamsLayer

_EXPERT_NAMES: Final = ("w1", "w3", "w2")
"""Gate, up and down projection of an expert in a checkpoint."""


def _whole(size: int) -> Share:
    return Share(0, size, size)


class _Indexer(torch.nn.Module):
    """Queries and keys that choose rows; the same on every rank. Scores are those of `Indexer` in
    `layers/mla/`, of keys that are compressed."""

    def __init__(
        self,
        settings: CompressedConfig,
        config: ModelConfig,
        placement: TensorPlacement,
        layer: int,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.to_queries = MergedColumnParallelLinear(
            settings.q_lora_rank,
            [("wq_b", _whole(settings.index_heads * settings.index_dim))],
            bias=False,
            placement=placement,
        )
        # fp32, because the head weights decide the ranking of rows.
        self.to_weights = MergedColumnParallelLinear(
            config.hidden_size,
            [("weights_proj", _whole(settings.index_heads))],
            bias=False,
            placement=replace(placement, dtype=torch.float32, formats=None),
        )
        self.compressor = GroupCompressor(
            _compressor_options(settings, config, settings.index_dim, buffer=1),
            placement.at("compressor"),
            layer,
        )

    def queries(self, x: torch.Tensor, latent: torch.Tensor, step: LayerStep) -> IndexQuery:
        """Queries of tokens `[num_tokens, hidden_size]`, and the weights of their heads.

        Args:
            latent: `[num_tokens, q_lora_rank]`, normalised.
        """
        q = self.to_queries.forward(latent).view(len(x), -1, self.settings.index_dim)
        q = rotate_heads(q, step.rotation)
        return IndexQuery(q, self.to_weights.forward(x), self.settings.index_topk)


class DeepseekV4Attention(torch.nn.Module):
    """One key for all heads, which is its value; outputs are rotated back, and projected by groups
    of heads."""

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: the ranks do not divide the groups of heads."""
        super().__init__()
        config, layer_id, placement = layer.config, layer.layer_id, layer.placement.at("attn")
        self.settings = settings = CompressedConfig.from_hf(config.hf_config)
        dim, eps = settings.head_dim, config.rms_norm_eps
        self.eps = eps
        groups = placement.share(settings.output_groups, "groups of heads (o_groups)")
        per_group = config.num_attention_heads // settings.output_groups
        heads = groups.times(per_group)
        self._group = placement.tp_group
        self.q_norm = WideRMSNorm(settings.q_lora_rank, eps, placement=placement.at("q_norm"))
        self.kv_norm = WideRMSNorm(dim, eps, placement=placement.at("kv_norm"))
        self.to_queries = MergedColumnParallelLinear(
            settings.q_lora_rank,
            [("wq_b", heads.times(dim))],
            bias=False,
            placement=placement,
        )
        # Multiplied group by group, for which no format has a kernel.
        self.by_group = MergedColumnParallelLinear(
            per_group * dim,
            [("wo_a", groups.times(settings.output_rank))],
            bias=False,
            placement=replace(placement, formats=None),
        )
        self.to_hidden = RowParallelLinear(
            groups.times(settings.output_rank),
            config.hidden_size,
            bias=False,
            placement=placement.at("wo_b"),
        )
        self.sinks = AttentionSinks(heads, placement.at("attn_sink"))
        self.attn = CompressedAttention(
            heads.size, dim, dim**-0.5, 1, layer_id, kind=COMPRESSED, sinks=self.sinks.weight
        )
        self.compressor: GroupCompressor | None = None
        self.indexer: _Indexer | None = None
        ratio = settings.ratio(layer_id)
        if ratio is not None:
            self._add_rows(layer, ratio)
        parts = [[("wq_a", _whole(settings.q_lora_rank)), ("wkv", _whole(dim))]]
        if self.compressor is not None:
            parts.append(self.compressor.options.projections("compressor"))
        if self.indexer is not None:
            parts.append(self.indexer.compressor.options.projections("indexer.compressor"))
        self.to_latent = ProjectionsByFormat(config.hidden_size, parts, placement=placement)
        """Latent vectors of queries, and keys; then what each compressor reads."""

    def _add_rows(self, layer: LayerSpec, ratio: int) -> None:
        config, layer_id, placement = layer.config, layer.layer_id, layer.placement.at("attn")
        settings, dim = self.settings, self.settings.head_dim
        self.attn.ratio = ratio
        is_primary = layer_id in settings.sparse_layers or not settings.sparse_layers
        self.attn.rows_pool = PoolName.KV if is_primary else PoolName.C128
        is_sparse = layer_id in settings.sparse_layers
        options = _compressor_options(settings, config, dim, buffer=0)
        if not is_sparse:
            options = replace(options, ratio=ratio, open_pool=PoolName.OPEN_C128, overlap_pool=None)
        self.compressor = GroupCompressor(options, placement.at("compressor"), layer_id)
        if is_sparse:
            self.indexer = _Indexer(settings, config, placement.at("indexer"), layer_id)

    def forward(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """`[num_tokens, hidden_size]` to as much, or `[bs, hidden_size]` with `LayerStep.rows`."""
        settings, rows = self.settings, step.rows
        norms = self.q_norm, self.kv_norm
        latents, *tokens = self.to_latent.forward(x)
        latent, kv = normalise_latents(latents, norms, step.rotation)
        q = self.to_queries.forward(latent).view(len(x), -1, settings.head_dim)
        q = rotate_heads(q, step.rotation, self.eps)
        step.batch.begin_layer(self.attn.layer_id)
        index = self._compress(x, latent, tokens, step)
        del latents, tokens  # Views of one tensor, which nothing reads any more.
        out = self.attn.attend(
            q, kv.unsqueeze(1), step.rotation, step.batch, rows=rows, index=index
        )
        weight = self.by_group.weight
        assert isinstance(weight, torch.Tensor), "it has no format"
        grouped = out.reshape(len(out), -1, weight.shape[1])
        weights = weight.view(grouped.shape[1], -1, weight.shape[1])
        mixed = apply_by_group(grouped.contiguous(), weights).flatten(1)
        return self._group.all_reduce(self.to_hidden.part(mixed))

    def _compress(
        self, x: torch.Tensor, latent: torch.Tensor, tokens: list[torch.Tensor], step: LayerStep
    ) -> IndexQuery | None:
        """Store the rows and indexer keys of groups that the step finishes, and return the queries
        that choose rows; None: all rows are read."""
        if self.compressor is None:
            return None
        batch, ratio = step.batch, self.attn.ratio
        assert self.attn.rows_pool is not None
        kinds = [LayerRows(tokens[0], self.compressor, self.attn.rows_pool)]
        if self.indexer is not None:
            kinds.append(LayerRows(tokens[1], self.indexer.compressor, PoolName.INDEXER))
        row_store(batch).store_rows(kinds, batch)
        if self.indexer is None or batch.longest_context // ratio <= self.settings.index_topk:
            return None
        return self.indexer.queries(x, latent, step)


class DeepseekV4Layer(StreamsLayer):
    """Attention and experts, each with hyper-connections around it."""

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: config.json contradicts itself, or the ranks do not divide a size."""
        super().__init__()
        config, placement = layer.config, layer.placement
        hf, size, eps = config.hf_config, config.hidden_size, config.rms_norm_eps
        options = hyper_options(config)
        attn_norm = WideRMSNorm(size, eps, placement=placement.at("attn_norm"))
        experts_norm = WideRMSNorm(size, eps, placement=placement.at("ffn_norm"))
        self.attn_mix = HyperConnection(options, attn_norm, placement.at("hc_attn"))
        self.mlp_mix = HyperConnection(options, experts_norm, placement.at("hc_ffn"))
        self.attn = DeepseekV4Attention(layer)
        is_hashed = hf.mlp_layer_types[layer.layer_id] == "hash_moe"
        self.experts = SparseMoeBlock(_sparse_options(config, is_hashed), placement.at("ffn"))

    @property
    def has_rows(self) -> bool:
        """True if its rotation is that of layers with rows."""
        return self.attn.compressor is not None

    def attend(
        self, x: torch.Tensor, zeros: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor | None]:
        return self.attn.forward(x, step), None

    def feed(
        self, x: torch.Tensor, zeros: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor | None]:
        return self.experts.forward(x, zeros, tokens)


class DeepseekV4Model(LlamaModel):
    """Embedding, layers, the sum of the streams and the final norm."""

    def __init__(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> None:
        super().__init__(config, options, placement)
        settings = CompressedConfig.from_hf(config.hf_config)
        self.ratios = sorted(settings.ratios)
        self.hyper_head = HyperHead(hyper_options(config), placement.at("hc_head"))
        of_rows = RotaryEmbedding(settings.rows_rope, settings.rotary_dim, placement=placement)
        of_groups = [(of_rows, ratio) for ratio in self.ratios]
        self.rotations = RotaryKinds([(self.rotary_emb, 1), (of_rows, 1), *of_groups])

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        of_window, of_rows, *starts = self.rotations.forward(positions)
        steps = [LayerStep(rotation, forward_batch) for rotation in (of_window, of_rows)]
        by_ratio = dict(zip(self.ratios, starts, strict=True))
        row_store(forward_batch).plan_rows(forward_batch, positions, by_ratio)
        streams = Streams(self.embed_tokens.forward(input_ids))
        last = len(self.layers) - 1
        for place, layer in enumerate(self.decoder_layers):
            assert isinstance(layer, DeepseekV4Layer)
            step = steps[layer.has_rows]
            if place == last:
                # After the last layer only the last token of each request is read.
                step = step._replace(rows=forward_batch.rows_to_compute())
            streams = layer.run(streams, step)
        return self.hyper_head.forward(streams, self.norm)


class DeepseekV4ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Raises ValueError if config.json contradicts itself."""

    model_prefix = ""
    head_prefix = "head"

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        self._settings = CompressedConfig.from_hf(config.hf_config)
        self._num_layers = config.num_hidden_layers

    @classmethod
    def head_names(cls) -> tuple[str, str]:
        return "head.weight", "embed.weight"

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        return DecoderOptions(layer=DeepseekV4Layer, norm=WideRMSNorm, embedding_name="embed")

    @classmethod
    def draft_names(cls, config: ModelConfig) -> DraftNames:
        """Names of draft layers, which are not read."""
        return DraftNames.as_model("mtp", 1)

    def _make_model(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> LlamaModel:
        return DeepseekV4Model(config, options, placement)

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Rows and indexer keys by token; windows and the last groups by prefix; unfinished groups
        by running request."""
        settings, dtype = self._settings, self._dtype
        sparse, heavy, dim = settings.sparse_layers, settings.heavy_layers, settings.head_dim
        windows = StateSpec(
            name=PoolName.SWA,
            layers=tuple(range(self._num_layers)),
            buffers=(StateBuffer("kv", (1, settings.window, dim), dtype),),
            item=ItemKind.STATE,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
            # The states of groups, which the repeated token spoils, are restored behind it.
            is_repeatable=True,
        )
        specs: list[StateSpec] = []
        if sparse:
            ratio = settings.sparse_ratio
            keys = IndexerSpec.of(sparse, settings.index_dim, dtype, stride=ratio)
            specs += [RowSpec.of(sparse, dim, kv_dtype, stride=ratio), keys]
        if heavy:
            rows = RowSpec.of(heavy, dim, kv_dtype, stride=settings.heavy_ratio)
            beside = replace(rows, name=PoolName.C128, indices_from_pool=PoolName.KV)
            specs.append(beside if sparse else rows)
        specs.append(windows)
        if sparse:
            dims = dim, settings.index_dim
            names = "row_tokens", "index_tokens"
            specs.append(
                StateSpec(
                    name=PoolName.COMPRESSOR,
                    layers=sparse,
                    # Values and gates of half of a token's columns.
                    buffers=tuple(
                        StateBuffer(name, (settings.sparse_ratio, 2 * one), dtype)
                        for name, one in zip(names, dims, strict=True)
                    ),
                    item=ItemKind.STATE,
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                    indices_from_pool=PoolName.SWA,
                )
            )
            shapes = [(settings.sparse_ratio - 1, 4 * one) for one in dims]
            specs.append(_open_spec(PoolName.OPEN_GROUP, sparse, names, shapes, dtype))
        if heavy:
            shape = settings.heavy_ratio - 1, 2 * dim
            specs.append(_open_spec(PoolName.OPEN_C128, heavy, ("row_tokens",), [shape], dtype))
        return tuple(specs)


def _open_spec(
    name: PoolName,
    layers: tuple[int, ...],
    buffers: tuple[str, ...],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
) -> StateSpec:
    """The spec of values and gates of the tokens of unfinished groups."""
    return StateSpec(
        name=name,
        layers=layers,
        buffers=tuple(
            StateBuffer(one, shape, dtype) for one, shape in zip(buffers, shapes, strict=True)
        ),
        item=ItemKind.REQUEST,
    )


def _compressor_options(
    settings: CompressedConfig, config: ModelConfig, dim: int, *, buffer: int
) -> CompressorOptions:
    """Options of a compressor of a sparse layer."""
    return CompressorOptions(
        ratio=settings.sparse_ratio,
        dim=dim,
        eps=config.rms_norm_eps,
        open_pool=PoolName.OPEN_GROUP,
        overlap_pool=PoolName.COMPRESSOR,
        buffer=buffer,
    )


def hyper_options(config: ModelConfig) -> HyperOptions:
    """Settings of hyper-connections. Raises ValueError: a field is no positive number."""
    hf = config.hf_config
    return HyperOptions(
        hidden_size=config.hidden_size,
        streams=positive_int(hf, "hc_mult"),
        iterations=positive_int(hf, "hc_sinkhorn_iters"),
        eps=positive_number(hf, "hc_eps"),
        norm_eps=config.rms_norm_eps,
    )


def _sparse_options(config: ModelConfig, is_hashed: bool) -> SparseMoeOptions:
    hf = config.hf_config
    inner = positive_int(hf, "moe_intermediate_size")
    return SparseMoeOptions(
        hidden_size=config.hidden_size,
        intermediate_size=inner,
        router=RouterOptions(
            num_experts=positive_int(hf, "n_routed_experts"),
            top_k=positive_int(hf, "num_experts_per_tok"),
            scoring="sqrt_softplus",
            routed_scaling_factor=positive_number(hf, "routed_scaling_factor"),
        ),
        has_correction_bias=not is_hashed,
        bias_name="gate.bias",
        table_size=config.vocab_size if is_hashed else None,
        expert_names=_EXPERT_NAMES,
        shared=SharedExpertOptions(intermediate_size=inner, names=_EXPERT_NAMES),
        activation=ClampedGate(limit=positive_number(hf, "swiglu_limit")),
    )


def positive_number(hf: PretrainedConfig, name: str) -> float:
    """Raises ValueError: the field is no positive number."""
    value = getattr(hf, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name}={value!r} must be a positive number")
    return float(value)
