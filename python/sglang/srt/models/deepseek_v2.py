"""DeepSeek-V2, V3 and V3.2, GLM-5: llama's decoder with latent attention, usually with experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from sglang.srt.configs.mla_config import IndexerConfig, MLAConfig
from sglang.srt.configs.model_config import ModelConfig, positive_int
from sglang.srt.layers.attention_kind import DSA, MLA, AttentionKind
from sglang.srt.layers.forward_batch_info import IndexQuery
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.mla.latent_attention import Indexer, KVUpProjection, LatentAttention
from sglang.srt.layers.moe.sparse_moe import RouterOptions, SharedExpertOptions, SparseMoeOptions
from sglang.srt.layers.placement import Share, TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.layers.rotary_embedding import apply_rotary
from sglang.srt.layers.triton_ops.arguments import RoundedRows
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.nsa_pool import NSASpec, NSATokenToKVPool
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.models.llama import CachedAttention, DecoderOptions, LayerSpec, LlamaForCausalLM


class DeepseekV2AttentionMLA(CachedAttention):
    """Latent attention: one stored row per token, which all heads share.

    Queries are projected from the hidden state, or from a normalised vector of `q_lora_rank`.
    """

    kind: AttentionKind = MLA
    norm_eps: float | None = 1e-6
    """Epsilon of the norms between projections; None: `rms_norm_eps`, as of other norms."""

    def __init__(self, layer: LayerSpec) -> None:
        """Raises ValueError: config.json has impossible sizes."""
        super().__init__()
        config, placement = layer.config, layer.placement.at("self_attn")
        self.mla = mla = MLAConfig.from_hf(config.hf_config)
        heads = placement.share(config.num_attention_heads, "attention heads")
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        eps = config.rms_norm_eps if self.norm_eps is None else self.norm_eps
        self.num_heads = heads.size
        row_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        # Every rank has all of the latent vectors.
        to_latent = [("kv_a_proj_with_mqa", Share(0, row_dim, row_dim))]
        query_name, query_inputs = "q_proj", config.hidden_size
        self.q_a_layernorm: RMSNorm | None = None
        if mla.q_lora_rank is not None:
            to_latent.insert(0, ("q_a_proj", Share(0, mla.q_lora_rank, mla.q_lora_rank)))
            query_name, query_inputs = "q_b_proj", mla.q_lora_rank
            self.q_a_layernorm = RMSNorm(
                mla.q_lora_rank, eps, placement=placement.at("q_a_layernorm")
            )
        self.to_latent = MergedColumnParallelLinear(
            config.hidden_size, to_latent, bias=bias, placement=placement
        )
        self.to_queries = MergedColumnParallelLinear(
            query_inputs,
            [(query_name, heads.times(mla.qk_head_dim))],
            bias=False,
            placement=placement,
        )
        self.kv_a_layernorm = RMSNorm(
            mla.kv_lora_rank, eps, placement=placement.at("kv_a_layernorm")
        )
        self.o_proj = RowParallelLinear(
            heads.times(mla.v_head_dim),
            config.hidden_size,
            bias=bias,
            placement=placement.at("o_proj"),
        )
        self.attn = LatentAttention(
            mla,
            KVUpProjection(heads, mla, placement=placement.at("kv_b_proj")),
            mla.qk_head_dim**-0.5 * config.rope.score_scale(),
            layer.layer_id,
            kind=self.kind,
        )

    def attend(self, x: torch.Tensor | RoundedRows, step: LayerStep) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "there is no first weight"
        mla, q_input = self.mla, x
        latent = self.to_latent.forward(x)
        if self.q_a_layernorm is not None:
            # Norm kernels take contiguous rows.
            q_input = self.q_a_layernorm.forward(latent[:, : mla.q_lora_rank].contiguous())
            latent = latent[:, mla.q_lora_rank :]
        q = self.to_queries.forward(q_input).view(len(x), self.num_heads, -1)
        self._rotate_(q[..., mla.qk_nope_head_dim :], step)
        normed = self.kv_a_layernorm.forward(latent[:, : mla.kv_lora_rank].contiguous())
        row = normed.unsqueeze(1)
        if mla.qk_rope_head_dim:
            k_rope = self._rotate_(latent[:, mla.kv_lora_rank :].unsqueeze(1), step)
            row = torch.cat((row, k_rope), dim=-1)
        index = self._index(x, q_input, step)
        latent = row[..., : mla.kv_lora_rank]
        return self.attn.forward(q, row, latent, step.batch, rows=step.rows, index=index)

    def _rotate_(self, x: torch.Tensor, step: LayerStep) -> torch.Tensor:
        if not self.mla.rotates:
            return x
        return apply_rotary(x, step.rotation, x, is_interleaved=self.mla.rope_interleave)

    def _index(self, x: torch.Tensor, q_input: torch.Tensor, step: LayerStep) -> IndexQuery | None:
        """Queries that choose the tokens to attend to; None: attend to all tokens."""
        return None


class DeepseekV32Attention(DeepseekV2AttentionMLA):
    """Latent attention to the tokens that an indexer chooses: its own, or an earlier layer's."""

    kind = DSA

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        config, layer_id = layer.config, layer.layer_id
        settings = IndexerConfig.from_hf(config.hf_config)
        self.topk = settings.topk
        after = layer_id + 1
        self.is_shared = after < config.num_hidden_layers and after not in settings.full_layers
        """True if the next layer shares the choice."""
        self.indexer: Indexer | None = None
        is_draft = layer_id == config.num_hidden_layers
        if is_draft or layer_id in settings.full_layers:
            self.indexer = Indexer(
                settings,
                self.mla,
                config.hidden_size,
                placement=layer.placement.at("self_attn").at("indexer"),
            )

    def _index(self, x: torch.Tensor, q_input: torch.Tensor, step: LayerStep) -> IndexQuery | None:
        """Store the indexer's keys, and return its queries if a context exceeds `topk` tokens."""
        forward_batch, rotation = step.batch, step.rotation
        is_short = forward_batch.stores_only or forward_batch.longest_context <= self.topk
        if self.indexer is None:
            assert is_short or forward_batch.index is not None, "an earlier layer has an indexer"
            return None if is_short else forward_batch.index
        pool = forward_batch.token_to_kv_pool
        assert isinstance(pool, NSATokenToKVPool)
        in_fp8 = pool.index_pool.dtype is FP8
        keys = self.indexer.keys(x, rotation, in_fp8=in_fp8)
        pool.set_index_k_buffer(self.attn, forward_batch.out_cache_loc, keys)
        if is_short:
            return None
        index = self.indexer.queries(x, q_input, rotation, in_fp8=in_fp8)
        if self.is_shared:
            chosen = torch.empty((len(x), self.topk), dtype=torch.int32, device=x.device)
            index = index._replace(chosen=chosen)
            forward_batch.index = index._replace(is_known=True)
        return index


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """See `LlamaForCausalLM`. Experts are scored by softmax, possibly in groups."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        """Raises ValueError: config.json asks for something that is not supported."""
        super().__init__(config, placement)
        self._mla = MLAConfig.from_hf(config.hf_config)

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        sparse = frozenset(cls._sparse_layers(config))
        return DecoderOptions(
            sparse=cls._sparse_options(config) if sparse else None,
            sparse_layers=sparse,
            attention=DeepseekV2AttentionMLA,
        )

    @classmethod
    def _sparse_layers(cls, config: ModelConfig) -> Iterable[int]:
        """Layers with experts. The draft layer always has some."""
        first = config.hf_config.first_k_dense_replace
        if first is None:
            raise ValueError("config.json: first_k_dense_replace=null must be an integer")
        return range(first, config.num_layers)

    @classmethod
    def _sparse_options(cls, config: ModelConfig) -> SparseMoeOptions:
        hf = config.hf_config
        router = cls._router(config)
        size = positive_int(hf, "moe_intermediate_size")
        num_shared = positive_int(hf, "n_shared_experts") if hf.n_shared_experts else 0
        return SparseMoeOptions(
            hidden_size=config.hidden_size,
            intermediate_size=size,
            router=router,
            router_dtype=torch.float32,
            has_correction_bias=router.scoring == "sigmoid",
            shared=(
                SharedExpertOptions(intermediate_size=size * num_shared) if num_shared else None
            ),
        )

    @classmethod
    def _router(cls, config: ModelConfig) -> RouterOptions:
        hf = config.hf_config
        _check(hf.topk_method, "topk_method", ("greedy", "group_limited_greedy"))
        _check(getattr(hf, "scoring_func", None), "scoring_func", ("softmax",))
        if hf.norm_topk_prob:
            raise ValueError("config.json: norm_topk_prob=True is not supported for DeepSeek-V2")
        is_grouped = hf.topk_method == "group_limited_greedy"
        return RouterOptions(
            num_experts=positive_int(hf, "n_routed_experts"),
            top_k=positive_int(hf, "num_experts_per_tok"),
            renormalize=False,
            num_groups=positive_int(hf, "n_group") if is_grouped else 1,
            topk_groups=positive_int(hf, "topk_group") if is_grouped else 1,
            routed_scaling_factor=float(hf.routed_scaling_factor),
        )

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Latent rows of every layer."""
        layers = [layer.layer_id for layer in self.attention_layers()]
        return (MLASpec.of(layers, self._mla.kv_lora_rank, self._mla.qk_rope_head_dim, kv_dtype),)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Like DeepSeek-V2, but experts are scored by sigmoid, and a bias balances the choice."""

    @classmethod
    def _router(cls, config: ModelConfig) -> RouterOptions:
        hf = config.hf_config
        _check(getattr(hf, "topk_method", None), "topk_method", ("noaux_tc",))
        _check(getattr(hf, "scoring_func", None), "scoring_func", ("sigmoid",))
        return grouped_router(hf, "n_routed_experts")


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: DeepSeek-V3 whose `mlp_layer_types` name the layers with experts."""

    @classmethod
    def _sparse_layers(cls, config: ModelConfig) -> Iterable[int]:
        return _named_sparse_layers(config)


def grouped_router(hf: PretrainedConfig, num_experts: str) -> RouterOptions:
    """A router by sigmoids, which chooses groups of experts first. `num_experts` is the name of
    the field with the number of experts. Raises ValueError: a field is no positive integer."""
    return RouterOptions(
        num_experts=positive_int(hf, num_experts),
        top_k=positive_int(hf, "num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=bool(hf.norm_topk_prob),
        num_groups=positive_int(hf, "n_group"),
        topk_groups=positive_int(hf, "topk_group"),
        group_score="top2_sum",
        routed_scaling_factor=float(hf.routed_scaling_factor),
    )


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """Like DeepSeek-V3, but an indexer in each layer chooses the tokens to attend to."""

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__(config, placement)
        self._indexer = IndexerConfig.from_hf(config.hf_config)
        self._index_dtype = config.dtype

    @classmethod
    def decoder_options(cls, config: ModelConfig) -> DecoderOptions:
        return replace(super().decoder_options(config), attention=DeepseekV32Attention)

    @classmethod
    def _sparse_layers(cls, config: ModelConfig) -> Iterable[int]:
        return _named_sparse_layers(config)

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Latent rows and, in the same slots, keys of the layers with an indexer. Keys are in fp8
        if rows are, else as computed."""
        (latent,) = super().state_specs(kv_dtype)
        assert isinstance(latent, MLASpec)
        index_dtype = kv_dtype if kv_dtype is FP8 else self._index_dtype
        modules = (one for one in self.modules() if isinstance(one, DeepseekV32Attention))
        layers = [one.attn.layer_id for one in modules if one.indexer is not None]
        rows = NSASpec.beside(latent, self._indexer.head_dim, index_dtype, layers)
        return rows, rows.indexer


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: DeepSeek-V3.2 whose indexer rotates neighbours; see `IndexerConfig`. In GLM-5.2 most
    layers have no indexer, and share the choice of an earlier layer."""


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """Kimi-K2.5, 2.6 and 2.7: the text model, DeepSeek-V3's, of a checkpoint with a vision tower,
    whose tensors are not read."""

    model_prefix = "language_model.model"
    head_prefix = "language_model.lm_head"

    def is_redundant(self, name: str) -> bool:
        """Also true of the vision tower's tensors."""
        return super().is_redundant(name) or name.startswith(("vision_tower.", "mm_projector."))


class Kimi_K25ForConditionalGeneration(KimiK25ForConditionalGeneration):
    """The same model by transformers' name."""


def layers_with_experts(config: ModelConfig) -> list[int]:
    """The layers that `mlp_layer_types` calls sparse.

    Raises:
        ValueError: It does not say of each layer whether it is dense or sparse.
    """
    types = config.hf_config.mlp_layer_types
    if len(types) != config.num_hidden_layers or not set(types) <= {"dense", "sparse"}:
        raise ValueError(
            f"config.json: mlp_layer_types={types} must name each of "
            f"{config.num_hidden_layers} layers 'dense' or 'sparse'"
        )
    return [layer for layer, name in enumerate(types) if name == "sparse"]


def _named_sparse_layers(config: ModelConfig) -> list[int]:
    """Those of `layers_with_experts` and the draft layer."""
    return [*layers_with_experts(config), *range(config.num_hidden_layers, config.num_layers)]


def _check(value: object, name: str, supported: tuple[str, ...]) -> None:
    """Raise ValueError if a field is set to a value that is not supported."""
    if value is not None and value not in supported:
        raise ValueError(
            f"config.json: {name}={value!r} is not supported: {' and '.join(supported)} are"
        )
