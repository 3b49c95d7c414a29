"""Llama, and its decoder, which other families use with a few options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.activation import GatedMLP
from sglang.srt.layers.attention.window_backend import window_spec
from sglang.srt.layers.attention_kind import FULL_ATTENTION, SLIDING_WINDOW
from sglang.srt.layers.context_parallel import SplitHidden
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layernorm import QKNorm, RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, compute_logits
from sglang.srt.layers.moe.distributed_experts import DistributedExperts
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock, SparseMoeOptions
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import LayerStep, RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from sglang.srt.layers.triton_ops.arguments import RoundedRows, Weight
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits, VocabParallelEmbedding
from sglang.srt.mem_cache.device.state_spec import KVSpec, StateSpec
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.mtp import DraftLayer, DraftNames


class SelfAttention(Protocol):
    """The part of a decoder layer in which tokens see other tokens."""

    @property
    def first_weight(self) -> Weight | None:
        """The only weight that multiplies the input; None: the input has other uses."""

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """See `CachedAttention.forward`."""


MakeAttention = Callable[["LayerSpec"], SelfAttention]
"""Makes the attention module of a layer."""
MakeLayer = Callable[["LayerSpec"], "ResidualLayer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Differences between the architectures."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sparse: SparseMoeOptions | None = None
    """Experts of the `sparse_layers`, instead of a dense feed-forward part."""
    sparse_layers: frozenset[int] = frozenset()
    attention: MakeAttention | None = None
    """Makes the attention of each layer; None: `LlamaAttention`."""
    norm: type[RMSNorm] = RMSNorm
    """Norm before both parts of a layer, and after the last layer."""
    layer: MakeLayer | None = None
    """Makes each layer; None: `LlamaDecoderLayer`."""
    embedding_name: str = "embed_tokens"
    norm_name: str = "norm"
    """Names of the embedding and of the norm after the last layer in a checkpoint."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a decoder layer is made from."""

    config: ModelConfig
    options: DecoderOptions
    placement: TensorPlacement
    """The layer's own, such as that of "model.layers.3"."""
    layer_id: int
    """A draft layer has the index after the model's last."""


class CachedAttention(torch.nn.Module, ABC):
    """Attention to tokens of which something is cached, and a projection."""

    o_proj: RowParallelLinear

    @property
    def first_weight(self) -> Weight | None:
        """See `SelfAttention.first_weight`."""
        return None

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """Attend, then project; returns the result of `RowParallelLinear.forward`.

        Args:
            x: `[num_tokens, hidden_size]`, rounded if a layer has said its `first_weight`.
            residual: `[num_tokens, hidden_size]`, or `[bs, hidden_size]` with `LayerStep.rows`.
        """
        return self.o_proj.forward(self.attend(x, step), residual)

    @abstractmethod
    def attend(self, x: torch.Tensor | RoundedRows, step: LayerStep) -> torch.Tensor | RoundedRows:
        """`forward` before its projection, perhaps rounded for it; see `RadixAttention.forward`."""


class LlamaAttention(CachedAttention):
    """Grouped-query attention with rotary positions."""

    outputs_per_query = 1
    """Outputs of the query projection per element of the queries."""

    name = "self_attn"
    """The layer's name in a checkpoint."""

    rotates_while_attending = False
    """True if decode steps rotate and store in the kernel of full attention, where it can."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        config, options, layer_id = layer.config, layer.options, layer.layer_id
        placement = layer.placement.at(self.name)
        heads = placement.share(config.num_attention_heads, "attention heads")
        kv_heads = placement.kv_head_share(config.num_key_value_heads)
        self.head_dim = config.head_dim
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [("q_proj", q.times(self.outputs_per_query)), ("k_proj", kv), ("v_proj", kv)],
            bias=options.qkv_bias,
            placement=placement,
        )
        self.o_proj = RowParallelLinear(
            q,
            config.hidden_size,
            bias=options.out_bias,
            placement=placement.at("o_proj"),
        )
        self.qk_norm = (
            QKNorm(
                heads.size,
                kv_heads.size,
                self.head_dim,
                config.rms_norm_eps,
                placement=placement,
            )
            if options.qk_norm
            else None
        )
        has_window = layer_id in config.sliding_window_layers
        self.attn = RadixAttention(
            heads.size,
            self.head_dim,
            self.head_dim**-0.5,
            kv_heads.size,
            layer_id,
            kind=SLIDING_WINDOW if has_window else FULL_ATTENTION,
        )

    @property
    def first_weight(self) -> Weight:
        return self.qkv_proj.weight

    def attend(self, x: torch.Tensor | RoundedRows, step: LayerStep) -> torch.Tensor | RoundedRows:
        qkv = self.qkv_proj.forward(x).view(len(x), -1, self.head_dim)
        q, k, v = self._prepare(qkv, step)
        rotates_later = self._rotates_later(step)
        is_stored = self.attn.kind == FULL_ATTENTION and not rotates_later
        if is_stored and step.rows is None:
            rounded = self.attn.forward_rounded(q, self.o_proj.weight, step.batch)
            if rounded is not None:
                return rounded
        return self.attn.forward(
            q,
            k,
            v,
            step.batch,
            save_kv_cache=not is_stored,
            rows=step.rows,
            rotation=step.rotation if rotates_later else None,
        )

    def _rotates_later(self, step: LayerStep) -> bool:
        """True if the attention backend rotates queries and keys, and stores keys and values."""
        kind, batch = self.attn.kind, step.batch
        if not batch.forward_mode.is_decode():
            return False
        if kind != SLIDING_WINDOW:
            is_plain = kind == FULL_ATTENTION and self.qk_norm is None
            if not (self.rotates_while_attending and is_plain):
                return False
            if batch.context_share is not None or batch.stores_only:
                return False  # Keys must be stored before attention begins.
        assert batch.attn_backends is not None, "the runner sets them before the model runs"
        is_whole = step.rotation.cos.shape[-1] == self.head_dim
        return is_whole and batch.attn_backends[kind].rotates_in_decoding

    def _prepare(
        self, qkv: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise and rotate queries and keys, and store keys and values in the layer's pool.

        Layers with a sliding window store by themselves, as attention that rotates does.

        Args:
            qkv: Contiguous `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`. Fused kernels
                change it in place.

        Returns:
            Queries, keys and values as `RadixAttention.forward` takes them.
        """
        attn, norm, rotation = self.attn, self.qk_norm, step.rotation
        pool, loc = step.batch.token_to_kv_pool, step.batch.out_cache_loc
        has_window = attn.kind == SLIDING_WINDOW
        # Queries and keys lie side by side, so one pass normalises and rotates both.
        num_rotated = attn.num_heads + attn.num_kv_heads
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        kernels = fused_kernels(qkv.device)
        # The kernel rotates whole heads.
        is_whole = rotation.cos.shape[-1] == self.head_dim
        rotates_later = self._rotates_later(step)
        if kernels is not None and is_whole and not has_window and not rotates_later:
            kernels.normalise_rotate_store_(
                qkv,
                None if norm is None else (norm.weight, norm.eps),
                (rotation.cos, rotation.signed_sin),
                loc,
                *pool.kv_buffer_to_write(attn.layer_id),
            )
            return qk[:, : attn.num_heads], qk[:, attn.num_heads :], v
        qk = qk if norm is None else norm.forward(qk)
        if not rotates_later:
            qk = apply_rotary(qk, rotation)
        q, k = qk[:, : attn.num_heads], qk[:, attn.num_heads :]
        if not has_window and not rotates_later:
            pool.set_kv_buffer(attn, loc, k, v)
        return q, k, v


class ResidualLayer(torch.nn.Module, ABC):
    """A layer that reads the residual stream, and adds to it."""

    @abstractmethod
    def forward(
        self, x: ToAdd, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """Run the layer. The next layer adds its output to the residual.

        Args:
            x: `[num_tokens, hidden_size]`: output of the previous layer, overwritten; None: the
                residual includes it.
            residual: `[num_tokens, hidden_size]`, overwritten.

        Returns:
            The output (None: the residual includes it) and the residual.
        """


class LlamaDecoderLayer(ResidualLayer):
    """Attention and feed-forward, each after a norm and with a residual."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        config, options, placement = layer.config, layer.options, layer.placement
        size, eps = config.hidden_size, config.rms_norm_eps
        make_attention = options.attention or LlamaAttention
        self.self_attn = make_attention(layer)
        self.mlp: GatedMLP | SparseMoeBlock
        if layer.layer_id in options.sparse_layers:
            assert options.sparse is not None
            self.mlp = SparseMoeBlock(options.sparse, placement.at(options.sparse.name))
        else:
            inner = config.intermediate_size
            self.mlp = GatedMLP(size, inner, bias=options.mlp_bias, placement=placement.at("mlp"))
        self.input_layernorm = options.norm(size, eps, placement=placement.at("input_layernorm"))
        self.post_attention_layernorm = options.norm(
            size, eps, placement=placement.at("post_attention_layernorm")
        )

    def forward(
        self, x: ToAdd, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        attention, mlp = self.self_attn, self.mlp
        normed, residual = self.input_layernorm.add_and_round_(x, residual, attention.first_weight)
        if step.rows is not None:
            residual = residual.index_select(0, step.rows)
        x, residual = attention.forward(normed, residual, step)
        normed, residual = self.post_attention_layernorm.add_and_round_(
            x, residual, mlp.first_weight
        )
        return mlp.forward(normed, residual)

    def store(self, residual: torch.Tensor, step: LayerStep) -> None:
        """Store what the layer caches of tokens, and nothing else; not for recurrent layers.

        Args:
            residual: `[num_tokens, hidden_size]`: input of the layer.
            step: A step that only stores.
        """
        assert isinstance(self.self_attn, CachedAttention)
        normed = self.input_layernorm.forward(residual)
        self.self_attn.attend(normed, step)


class LlamaModel(torch.nn.Module):
    """Embedding, decoder layers and the final norm."""

    def __init__(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, placement=placement.at(options.embedding_name)
        )
        make_layer: MakeLayer = options.layer or LlamaDecoderLayer
        self.decoder_layers = [
            make_layer(LayerSpec(config, options, placement.at(f"layers.{i}"), i))
            for i in range(config.num_hidden_layers)
        ]
        self.layers = torch.nn.ModuleList(self.decoder_layers)
        for part in self.decoder_layers[-1].modules():
            if isinstance(part, DistributedExperts):
                part.is_last = True
        self.norm = options.norm(
            config.hidden_size, config.rms_norm_eps, placement=placement.at(options.norm_name)
        )
        rotary_dim = config.rope.rotary_dim(config.head_dim)
        self.rotary_emb = RotaryEmbedding(config.rope, rotary_dim, placement=placement)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Hidden states of `ForwardBatch.rows_for_logits`, `[rows, hidden_size]`; of all tokens if
        the step captures them."""
        x: ToAdd = None
        # Kernels that start early may read what was written before the lookup; see `early_start`.
        step = LayerStep(self.rotary_emb.forward(positions), forward_batch)
        residual = self.embed_tokens.forward(input_ids)
        *most, last = self.decoder_layers
        for layer in most:
            x, residual = layer.forward(x, residual, step)
        # After the last layer only the last token of each request is read, except by a draft layer.
        rows = forward_batch.rows_to_compute()
        x, residual = last.forward(x, residual, step._replace(rows=rows))
        return self.norm.add_(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    """A causal language model. Subclasses differ in `decoder_options`."""

    model_prefix = "model"
    """Prefix of the names of all checkpoint tensors except the head's."""
    head_prefix = "lm_head"

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        super().__init__()
        options = self.decoder_options(config)
        self.model = self._make_model(config, options, placement.at(self.model_prefix))
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, placement=placement.at(self.head_prefix)
            )
        )
        if self.lm_head is None:
            self.tied_names = self.head_names()
        self._kv_share = placement.kv_state_share(config.num_key_value_heads)
        self._window, self._dtype = config.sliding_window, config.dtype
        names = self.draft_names(config)
        self.draft_layer = None
        self._unread = names.all
        if config.has_draft_layer:
            self.draft_layer = self._make_draft_layer(config, options, placement, names)
            self._unread = names.others

    @classmethod
    def head_names(cls) -> tuple[str, str]:
        """Names of the head's tensor and of the embedding's in a checkpoint."""
        return f"{cls.head_prefix}.weight", f"{cls.model_prefix}.embed_tokens.weight"

    @staticmethod
    def decoder_options(config: ModelConfig) -> DecoderOptions:
        bias = bool(getattr(config.hf_config, "attention_bias", False))
        mlp_bias = bool(getattr(config.hf_config, "mlp_bias", False))
        return DecoderOptions(qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)

    def _make_model(
        self, config: ModelConfig, options: DecoderOptions, placement: TensorPlacement
    ) -> LlamaModel:
        return LlamaModel(config, options, placement)

    @classmethod
    def draft_names(cls, config: ModelConfig) -> DraftNames:
        """Names of draft layers, if the checkpoint has any."""
        count = getattr(config.hf_config, "num_nextn_predict_layers", None) or 0
        return DraftNames.as_next_layers(
            f"{cls.model_prefix}.layers", config.num_hidden_layers, count
        )

    def _make_draft_layer(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        placement: TensorPlacement,
        names: DraftNames,
    ) -> DraftLayer:
        return DraftLayer(
            names,
            placement,
            embed=self.model.embed_tokens.forward,
            rotate=self.model.rotary_emb.forward,
            layer=LlamaDecoderLayer(
                LayerSpec(config, options, placement.at(names.layer), config.num_hidden_layers)
            ),
            norm=options.norm,
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        hidden_states = self.model.forward(input_ids, positions, forward_batch)
        share = forward_batch.context_share
        if share is None:
            return compute_logits(hidden_states, self._head, forward_batch)
        gathered = share.gather_hidden(hidden_states)
        output = compute_logits(gathered[: share.num_wanted], self._head, share.whole)
        if share.edges is not None:
            output.split_hidden = SplitHidden(forward_batch, hidden_states, gathered, share.edges)
        return output

    def draft_logits(self, hidden: torch.Tensor) -> VocabLogits:
        return self._head.logits(hidden)

    @property
    def _head(self) -> VocabParallelEmbedding:
        return self.lm_head or self.model.embed_tokens

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """The spec of the keys and values of all attention layers, and of those with a window.

        Windows keep the dtype of activations: they are small.
        """
        layers = list(self.attention_layers())
        full, windowed = (
            tuple(layer.layer_id for layer in layers if (layer.kind == SLIDING_WINDOW) is has)
            for has in (False, True)
        )
        heads, dim, share = layers[0].num_kv_heads, layers[0].head_dim, self._kv_share
        kv = KVSpec.of_heads(full, heads, dim, kv_dtype, share=share)
        if not windowed:
            return (kv,)
        assert self._window is not None
        return kv, window_spec(windowed, self._window, heads, dim, self._dtype, share)

    def is_redundant(self, name: str) -> bool:
        """Also true of tensors of draft layers that are not loaded."""
        return name.startswith(self._unread) or name.endswith(".rotary_emb.inv_freq")


class MinistralForCausalLM(LlamaForCausalLM):
    """Some of its layers have a sliding window: `ModelConfig.sliding_window_layers`."""


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's decoder. A window is supported if no context exceeds it."""
