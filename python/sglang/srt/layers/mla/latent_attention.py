"""Latent attention: the pool stores one latent row per token, which all heads share.

A row is a latent vector followed by the rotated part of the key. Scores can be computed without
projecting rows up to keys: queries are multiplied by the key up-projection instead ("absorbed",
DeepSeek-V2, section 2.1), and each head's latent output by the value up-projection.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.mla_config import MLAConfig
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import Share, TensorPlacement
from sglang.srt.layers.radix_attention import MLA, AttentionKind, IndexQuery, RadixAttention
from sglang.srt.layers.weight_slot import NamedSlots, WeightedLayer, WeightSlot


class KVUpProjection(WeightedLayer):
    """Projects latent vectors to position-free keys and to values, for this rank's heads.

    The two projections are views of one weight, interleaved by head as in a checkpoint.
    """

    def __init__(self, heads: Share, mla: MLAConfig, *, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.num_heads, self.rank = heads.size, mla.kv_lora_rank
        self.key_dim, self.value_dim = mla.qk_nope_head_dim, mla.v_head_dim
        self.outputs = heads.times(self.key_dim + self.value_dim)
        self.weight = placement.empty(self.outputs.size, self.rank)

    def forward(
        self, latent: torch.Tensor, heads: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project `[num_tokens, kv_lora_rank]` up, for `heads` of this rank's.

        Returns:
            Keys without position `[num_tokens, heads, qk_nope_head_dim]`, and values
            `[num_tokens, heads, v_head_dim]`: views of one tensor.
        """
        weight = self._by_head()[heads]
        both = apply_linear(latent, weight.flatten(0, 1)).view(len(latent), len(weight), -1)
        return both[..., : self.key_dim], both[..., self.key_dim :]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries to latent space, where their products with latent vectors are the scores.

        Args:
            q: `[num_heads, num_tokens, qk_nope_head_dim]`, any strides.

        Returns:
            `[num_heads, num_tokens, kv_lora_rank]`.
        """
        return torch.bmm(q, self._by_head()[:, : self.key_dim])

    def values_of(self, latent: torch.Tensor) -> torch.Tensor:
        """Map outputs of heads from latent space to values.

        Args:
            latent: `[num_heads, num_tokens, kv_lora_rank]`, any strides.

        Returns:
            `[num_heads, num_tokens, v_head_dim]`.
        """
        return torch.bmm(latent, self._by_head()[:, self.key_dim :].transpose(1, 2))

    def _by_head(self) -> torch.Tensor:
        return self.weight.view(self.num_heads, -1, self.rank)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight, self.outputs)


class LatentAttention(RadixAttention):
    """Attention over latent rows: one KV head, whose values are part of its keys."""

    def __init__(
        self,
        mla: MLAConfig,
        up_projection: KVUpProjection,
        scaling: float,
        layer_id: int,
        *,
        kind: AttentionKind = MLA,
    ) -> None:
        """Args:
        up_projection: The layer's projection to keys and values.
        scaling: Factor of the scores, before the softmax.
        """
        row_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        super().__init__(up_projection.num_heads, row_dim, scaling, 1, layer_id, kind=kind)
        self.mla = mla
        self.up_projection = up_projection

    def attend(
        self,
        q: torch.Tensor,
        row: torch.Tensor,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
        index: IndexQuery | None = None,
    ) -> torch.Tensor:
        """Store the rows of new tokens, then attend.

        Args:
            q: `[num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`, rotated.
            row: `[num_tokens, 1, kv_lora_rank + qk_rope_head_dim]`, rotated.
            rows: As in `RadixAttention.forward`.
            index: Queries that choose the tokens to attend to; None: each token sees all tokens up
                to itself.

        Returns:
            `[num_tokens, num_heads * v_head_dim]`, or `[bs, ...]` with `rows`.
        """
        latent = row[..., : self.mla.kv_lora_rank]
        return self.forward(q, row, latent, forward_batch, rows=rows, index=index)
