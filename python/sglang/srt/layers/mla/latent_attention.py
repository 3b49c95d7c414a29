"""Latent attention (MLA), and the indexer of its sparse form. The pool stores one latent row per
token, which all heads share.

A row is a latent vector followed by the rotated part of the key. Scores can be computed without
projecting rows up to keys: queries are multiplied by the key up-projection instead ("absorbed",
DeepSeek-V2, section 2.1), and each head's latent output by the value up-projection.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang.srt.configs.mla_config import IndexerConfig, MLAConfig
from sglang.srt.layers.attention_kind import MLA, AttentionKind
from sglang.srt.layers.forward_batch_info import IndexQuery
from sglang.srt.layers.layer_weight import (
    kept_format,
    new_weight,
    slots_of,
)
from sglang.srt.layers.linear import apply_linear
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import Rotation, apply_rotary
from sglang.srt.layers.triton_ops.arguments import Weight

INDEXER_NORM_EPS = 1e-6


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
        both = self.project(latent, heads)
        return both[..., : self.key_dim], both[..., self.key_dim :]

    def project(self, latent: torch.Tensor, heads: slice) -> torch.Tensor:
        """Like `forward`, but in one contiguous tensor: each head's value follows its key."""
        weight = self._by_head()[heads]
        return apply_linear(latent, weight.flatten(0, 1)).view(len(latent), len(weight), -1)

    def absorb(self, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map queries to latent space, where their products with latent vectors are the scores.

        Args:
            q: `[num_heads, num_tokens, qk_nope_head_dim]`, any strides.
            out: Tensor for the result, the last dimension dense; None: a new one.

        Returns:
            `[num_heads, num_tokens, kv_lora_rank]`.
        """
        return torch.bmm(q, self._by_head()[:, : self.key_dim], out=out)

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
    """Attention over latent rows: one KV head, whose values are part of its keys.

    `forward` takes rotated queries `[num_tokens, num_heads, qk_head_dim]`. The keys are rotated
    rows `[num_tokens, 1, kv_lora_rank + qk_rope_head_dim]`. The values are the latent vectors of
    these rows. Each head's output has `v_head_dim` elements.
    """

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


class Indexer(WeightedLayer):
    """The indexer of DeepSeek Sparse Attention (DSA) in one layer; replicated on every rank.

    Its small queries and keys rank tokens. A key's score for a query is the sum over the indexer's
    heads of relu(query * key), weighted by a factor per head that the querying token provides
    (DeepSeek-V3.2, section 2.1). The reference multiplies all scores by one positive number, which
    changes no ranking and is omitted.

    If keys are in fp8, the query of each head is rounded as well. Like the reference, the indexer
    first multiplies both by a Hadamard matrix (`head_dim` is a power of 2). Products stay the same,
    and large elements spread over all: an error of fp8 is a part of its element, so few large
    elements would decide the error of a product. Without fp8 the matrix is omitted.
    """

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
        self.config = config
        dim, heads = config.head_dim, config.num_heads

        def whole(attribute: str, name: str, outputs: int, inputs: int) -> Weight:
            rows, columns = Share(0, outputs, outputs), Share(0, inputs, inputs)
            format_ = kept_format(placement, [f"{self.prefix}.{name}.weight"], columns)
            return new_weight(self, attribute, placement, format_, [rows], columns)

        self.query_weight = whole("query_weight", "wq_b", heads * dim, mla.q_lora_rank)
        self.key_weight = whole("key_weight", "wk", dim, hidden_size)
        self.norm_weight, self.norm_bias = placement.empty(dim), placement.empty(dim)
        # fp32 as in the reference: the head weights decide the ranking of tokens.
        self.heads_weight = replace(placement, dtype=torch.float32).empty(heads, hidden_size)
        self._spreading = hadamard(dim, placement.dtype, placement.device)

    def queries(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        rotation: Rotation,
        *,
        in_fp8: bool = False,
    ) -> IndexQuery:
        """Queries of tokens, and the weights of their heads.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            q_latent: `[num_tokens, q_lora_rank]`, normalised.
            in_fp8: True if keys are kept in fp8.
        """
        q = apply_linear(q_latent, self.query_weight)
        q = self._rotate_(q.view(len(q), -1, self.config.head_dim), rotation)
        q = self._spread(q) if in_fp8 else q
        return IndexQuery(q, apply_linear(hidden, self.heads_weight), self.config.topk)

    def keys(
        self, hidden: torch.Tensor, rotation: Rotation, *, in_fp8: bool = False
    ) -> torch.Tensor:
        """Keys `[num_tokens, head_dim]` of tokens `[num_tokens, hidden_size]`; `in_fp8`: they will
        be kept in fp8."""
        k = apply_linear(hidden, self.key_weight)
        k = F.layer_norm(k, k.shape[-1:], self.norm_weight, self.norm_bias, INDEXER_NORM_EPS)
        k = self._rotate_(k.unsqueeze(1), rotation).squeeze(1)
        return self._spread(k) if in_fp8 else k

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._spreading is None else torch.matmul(x, self._spreading)

    def _rotate_(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return apply_rotary(x, rotation, x, is_interleaved=self.config.rope_interleave)

    def weight_slots(self) -> NamedSlots:
        yield from slots_of(f"{self.prefix}.wq_b.weight", self.query_weight)
        yield from slots_of(f"{self.prefix}.wk.weight", self.key_weight)
        for name, weight in (
            ("k_norm.weight", self.norm_weight),
            ("k_norm.bias", self.norm_bias),
            ("weights_proj.weight", self.heads_weight),
        ):
            yield f"{self.prefix}.{name}", WeightSlot.of(weight)


def hadamard(size: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor | None:
    """The Hadamard matrix of Sylvester, `[size, size]`, times `size**-0.5`: orthogonal, and all
    elements have one magnitude. None: `size` is no power of 2."""
    if size & (size - 1):
        return None
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    scaled: torch.Tensor = found * size**-0.5
    return scaled.to(device, dtype)
