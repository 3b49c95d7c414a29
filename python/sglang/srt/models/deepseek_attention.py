"""The attention part of DeepSeek's decoder layers: latent attention and its projections."""

from __future__ import annotations

import torch

from sglang.srt.configs.mla_config import IndexerConfig, MLAConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.mla.indexer import Indexer
from sglang.srt.layers.mla.latent_attention import KVUpProjection, LatentAttention
from sglang.srt.layers.placement import Share, TensorPlacement
from sglang.srt.layers.radix_attention import DSA, MLA, AttentionKind, IndexQuery
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary, deinterleave
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool
from sglang.srt.models.llama import DecoderOptions

_NORM_EPS = 1e-6
"""Epsilon of the norms between projections; other norms have `rms_norm_eps`."""


class LatentProjections(torch.nn.Module):
    """Projects hidden states to queries and to the parts of latent rows.

    Queries are projected from the hidden state, or from a normalised vector of `q_lora_rank`.
    """

    def __init__(
        self, config: ModelConfig, mla: MLAConfig, heads: Share, placement: TensorPlacement
    ) -> None:
        super().__init__()
        self.q_rank, self.kv_rank = mla.q_lora_rank, mla.kv_lora_rank
        row = _whole(mla.kv_lora_rank + mla.qk_rope_head_dim)
        to_latent = [("kv_a_proj_with_mqa", row)]
        queries = ("q_proj", heads.times(mla.qk_head_dim))
        inputs = config.hidden_size
        self.q_a_layernorm: RMSNorm | None = None
        if mla.q_lora_rank is not None:
            to_latent.insert(0, ("q_a_proj", _whole(mla.q_lora_rank)))
            queries = ("q_b_proj", queries[1])
            inputs = mla.q_lora_rank
            self.q_a_layernorm = RMSNorm(
                mla.q_lora_rank, _NORM_EPS, placement=placement.at("q_a_layernorm")
            )
        self.to_latent = MergedColumnParallelLinear(
            config.hidden_size,
            to_latent,
            bias=bool(getattr(config.hf_config, "attention_bias", False)),
            placement=placement,
        )
        self.to_queries = MergedColumnParallelLinear(
            inputs, [queries], bias=False, placement=placement
        )
        self.kv_a_layernorm = RMSNorm(
            mla.kv_lora_rank, _NORM_EPS, placement=placement.at("kv_a_layernorm")
        )

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[num_tokens, hidden_size]`.

        Returns:
            Queries `[num_tokens, heads * qk_head_dim]`; the tensor that they were projected from;
            normalised latent vectors `[num_tokens, kv_lora_rank]`; the keys' part to rotate,
            `[num_tokens, qk_rope_head_dim]`.
        """
        latent = self.to_latent.forward(x)
        if self.q_a_layernorm is not None:
            assert self.q_rank is not None
            # Norm kernels take contiguous rows.
            x = self.q_a_layernorm.forward(latent[:, : self.q_rank].contiguous())
            latent = latent[:, self.q_rank :]
        q = self.to_queries.forward(x)
        normed = self.kv_a_layernorm.forward(latent[:, : self.kv_rank].contiguous())
        return q, x, normed, latent[:, self.kv_rank :]


class DeepseekV2AttentionMLA(torch.nn.Module):
    """Latent attention: one stored row per token, which all heads share."""

    kind: AttentionKind = MLA

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        placement: TensorPlacement,
        layer_id: int,
    ) -> None:
        """Raises ValueError: config.json has impossible sizes."""
        super().__init__()
        placement = placement.at("self_attn")
        self.mla = mla = MLAConfig.from_hf(config.hf_config)
        heads = placement.share(config.num_attention_heads, "attention heads")
        self.num_heads = heads.size
        self.projections = LatentProjections(config, mla, heads, placement)
        self.o_proj = RowParallelLinear(
            heads.times(mla.v_head_dim),
            config.hidden_size,
            bias=bool(getattr(config.hf_config, "attention_bias", False)),
            placement=placement.at("o_proj"),
        )
        self.attn = LatentAttention(
            mla,
            KVUpProjection(heads, mla, placement=placement.at("kv_b_proj")),
            mla.qk_head_dim**-0.5 * config.rope.score_scale(),
            layer_id,
            kind=self.kind,
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None,
    ) -> tuple[ToAdd, torch.Tensor]:
        """See `LlamaAttention.forward`."""
        q, q_input, latent, k_rope = self.projections.forward(x)
        q = q.view(len(x), self.num_heads, -1)
        q_rope = q[..., self.mla.qk_nope_head_dim :]
        q_rope.copy_(self._rotate(q_rope, rotation))
        k_rope = self._rotate(k_rope.unsqueeze(1), rotation)
        row = torch.cat((latent.unsqueeze(1), k_rope), dim=-1)
        index = self._index(x, q_input, rotation, forward_batch)
        attended = self.attn.attend(q, row, forward_batch, rows, index)
        if rows is not None:
            residual = residual.index_select(0, rows)
        return self.o_proj.forward(attended, residual)

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return apply_rotary(deinterleave(x) if self.mla.rope_interleave else x, rotation)

    def _index(
        self,
        x: torch.Tensor,
        q_input: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
    ) -> IndexQuery | None:
        """Queries that choose the tokens to attend to; None: attend to all tokens."""
        return None


class DeepseekV32Attention(DeepseekV2AttentionMLA):
    """Latent attention to the tokens that an indexer chooses."""

    kind = DSA

    def __init__(
        self,
        config: ModelConfig,
        options: DecoderOptions,
        placement: TensorPlacement,
        layer_id: int,
    ) -> None:
        super().__init__(config, options, placement, layer_id)
        self.indexer = Indexer(
            IndexerConfig.from_hf(config.hf_config),
            self.mla,
            config.hidden_size,
            placement=placement.at("self_attn").at("indexer"),
        )

    def _index(
        self,
        x: torch.Tensor,
        q_input: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
    ) -> IndexQuery | None:
        """Store the indexer's keys, and return its queries if a context exceeds `topk` tokens."""
        pool = forward_batch.token_to_kv_pool
        assert isinstance(pool, NSATokenToKVPool)
        keys = self.indexer.keys(x, rotation)
        pool.set_index_k_buffer(self.attn, forward_batch.out_cache_loc, keys)
        if forward_batch.longest_context <= self.indexer.config.topk:
            return None
        return self.indexer.queries(x, q_input, rotation)


def _whole(size: int) -> Share:
    """The whole of a dimension, on every rank."""
    return Share(0, size, size)
