"""The indexer of DeepSeek Sparse Attention (DSA): small queries and keys that rank tokens.

A key's score for a query is the sum over the indexer's heads of relu(query * key), weighted by a
factor per head that the querying token provides (DeepSeek-V3.2, section 2.1). The reference stores
keys in fp8 after a Hadamard rotation. Without fp8 the rotation has no effect, so it is omitted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang.srt.configs.mla_config import IndexerConfig, MLAConfig
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.radix_attention import IndexQuery
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot

_NORM_EPS = 1e-6


class Indexer(WeightedLayer):
    """The indexer of one layer; replicated on every rank."""

    def __init__(
        self,
        config: IndexerConfig,
        mla: MLAConfig,
        hidden_size: int,
        *,
        placement: TensorPlacement,
    ) -> None:
        """Raises ValueError: config.json has no `q_lora_rank`."""
        super().__init__(placement)
        if mla.q_lora_rank is None:
            raise ValueError("config.json: q_lora_rank is missing: the indexer's queries need it")
        self.config, self.rope_dim = config, mla.qk_rope_head_dim
        dim, heads = config.head_dim, config.num_heads
        self.query_weight = placement.empty(heads * dim, mla.q_lora_rank)
        self.key_weight = placement.empty(dim, hidden_size)
        self.norm_weight, self.norm_bias = placement.empty(dim), placement.empty(dim)
        # fp32 as in the reference: the head weights decide the ranking of tokens.
        self.heads_weight = replace(placement, dtype=torch.float32).empty(heads, hidden_size)
        self._scale = dim**-0.5 * heads**-0.5

    def queries(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation
    ) -> IndexQuery:
        """Queries of tokens, and the weights of their heads.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            q_latent: `[num_tokens, q_lora_rank]`, normalised.
        """
        q = apply_linear(q_latent, self.query_weight)
        q = self._rotate(q.view(len(q), -1, self.config.head_dim), rotation)
        weights = apply_linear(hidden.float(), self.heads_weight) * self._scale
        return IndexQuery(q, weights, self.config.topk)

    def keys(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Keys `[num_tokens, head_dim]` of tokens `[num_tokens, hidden_size]`."""
        k = apply_linear(hidden, self.key_weight)
        k = F.layer_norm(k, k.shape[-1:], self.norm_weight, self.norm_bias, _NORM_EPS)
        return self._rotate(k.unsqueeze(1), rotation).squeeze(1)

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate the first `rope_dim` elements of `[num_tokens, heads, head_dim]`, as
        `apply_rotary`."""
        rotated = apply_rotary(x[..., : self.rope_dim], rotation)
        return torch.cat((rotated, x[..., self.rope_dim :]), dim=-1)

    def weight_slots(self) -> NamedSlots:
        for name, weight in (
            ("wq_b.weight", self.query_weight),
            ("wk.weight", self.key_weight),
            ("k_norm.weight", self.norm_weight),
            ("k_norm.bias", self.norm_bias),
            ("weights_proj.weight", self.heads_weight),
        ):
            yield f"{self.prefix}.{name}", WeightSlot.of(weight)
