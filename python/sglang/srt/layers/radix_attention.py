"""The attention layer of a model; backends do the work."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang.srt.layers.activation import scale_by_gates_
from sglang.srt.layers.attention_kind import FULL_ATTENTION, AttentionKind
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardBatch, IndexQuery
from sglang.srt.layers.rotary_embedding import Rotation
from sglang.srt.layers.triton_ops.arguments import RoundedRows, Weight, takes_rounded


class LayerStep(NamedTuple):
    """A step, as a decoder layer and its attention take it."""

    rotation: Rotation
    batch: ForwardBatch
    rows: torch.Tensor | None = None
    """int64 `[bs]`: tokens whose output is needed, each request's last; None: all. The layer stores
    keys and values of all tokens."""


class RadixAttention(torch.nn.Module):
    """Attention over a request's context in the paged pool."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        *,
        kind: AttentionKind = FULL_ATTENTION,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Args:
        num_heads: Query heads of this rank; a multiple of `num_kv_heads`.
        scaling: Factor of the scores, before the softmax.
        layer_id: Index of this layer in the model.
        kind: Decides which backend runs it.
        sinks: fp32 `[num_heads]`: a logit of each head, unscaled, that takes part in every softmax
            and has no value. None: no sinks.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.kind = kind
        self.sinks = sinks

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        rows: torch.Tensor | None = None,
        *,
        index: IndexQuery | None = None,
        gates: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values, then attend.

        Args:
            q: `[num_tokens, num_heads, head_dim]`, any strides with dense heads.
            k: `[num_tokens, num_kv_heads, head_dim]`; `v` likewise.
            save_kv_cache: If false, `k` and `v` are stored already.
            rows: Extend only: int64 `[bs]`, the last token of each request; only these attend.
                None: all tokens attend.
            index: Queries that choose the tokens to attend to, for kinds of attention that choose.
            gates: The output is multiplied by their sigmoid; same shape as `q`. None: no gates.
            rotation: By which a backend that `rotates_in_decoding` rotates queries and keys. None:
                they are rotated already.

        Returns:
            `[num_tokens, num_heads * head_dim]`, or `[bs, ...]` with `rows`; nothing that counts if
            the step only stores.
        """
        assert forward_batch.attn_backends is not None, "the runner sets them before the model runs"
        forward_batch.begin_layer(self.layer_id)
        backend, share = forward_batch.attn_backends[self.kind], forward_batch.context_share
        if share is not None or forward_batch.stores_only:
            assert forward_batch.pools is not None, "the runner sets them before the model runs"
            if save_kv_cache:
                pool = forward_batch.token_to_kv_pool
                pool.set_kv_buffer(self, forward_batch.out_cache_loc, k, v)
                save_kv_cache = False
            if share is not None:
                share.share_stored(self.layer_id, forward_batch.pools)
            if forward_batch.stores_only:
                # The next step reads the layer, and waits for no load.
                forward_batch.token_to_kv_pool.wait_for_layer(self.layer_id)
                return q
        if gates is not None and not save_kv_cache and forward_batch.forward_mode.is_decode():
            gated = backend.forward_decode_gated(q, gates, self, forward_batch)
            if gated is not None:
                return gated
        inputs = AttentionInputs(q, k, v, save_kv_cache, rows, index, rotation)
        out = backend.forward(inputs, self, forward_batch)
        return out if gates is None else scale_by_gates_(out, gates, rows)

    def forward_rounded(
        self, q: torch.Tensor, weight: Weight, forward_batch: ForwardBatch
    ) -> RoundedRows | None:
        """`forward` without gates, for a step whose keys and values are stored, rounded for the
        product with `weight`. None: nothing is done, and the caller attends by `forward`."""
        is_decode = forward_batch.forward_mode.is_decode() and not forward_batch.stores_only
        is_plain = isinstance(weight, torch.Tensor)
        if is_plain or not is_decode or forward_batch.context_share is not None:
            return None
        scaled = takes_rounded(weight, len(q))
        if scaled is None:
            return None
        assert forward_batch.attn_backends is not None, "the runner sets them before the model runs"
        backend = forward_batch.attn_backends[self.kind]
        return backend.forward_decode_rounded(q, scaled, self, forward_batch)
