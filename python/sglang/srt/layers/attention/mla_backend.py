"""Latent attention (MLA) in plain torch.

A decode step absorbs the up-projections: the pool's rows serve as keys and values of a single KV
head, which all query heads share, and are read as in dense attention. A prefill projects rows up,
because for many queries scores over keys cost less than scores over rows. It reads its prefix
piece by piece and joins the pieces by their log-sum-exp, so copies of a prefix take at most
`PIECE_BYTES`, in addition to keys and values of the new tokens.

New tokens too are read as stored, so that logits do not depend on how a prompt is cut. If the pool
rounds, they are read from the slots of the request's row: a cached token that is computed again is
stored as padding, in a slot that all such tokens of a batch share.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.partial_attention import (
    Partial,
    RunningAttention,
    attend,
    heads_first,
)
from sglang.srt.layers.attention.slot_plan import VIEW_BYTES, DecodePlan, ExtendSegment
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend, decode_by_plan
from sglang.srt.layers.forward_batch_info import AttentionInputs, AttentionLayer, ForwardBatch
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.mem_cache.device.fp8_rows import read_rows
from sglang.srt.mem_cache.device.row_buffers import gather_rows

PIECE_BYTES: Final = 64 << 20
"""Upper bound, in bytes, of one piece of a prefix in one layer, gathered or projected up."""


class MLATorchNativeBackend(TorchNativeAttnBackend):
    """Latent attention over views of the pool, or over gathers if those are faster."""

    def __init__(self, config: AttentionConfig, *, view_bytes: int = VIEW_BYTES) -> None:
        super().__init__(config, view_bytes=view_bytes)
        self._new_slots = torch.empty(0, dtype=torch.int64)
        """int64 `[num_tokens]`: where the pool has the new tokens of an extend step."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            return
        parts = zip(self._slots, self._extend_plan, strict=True)
        own = np.concatenate([slots[part.begin - part.end :] for slots, part in parts])
        self._new_slots = torch.from_numpy(own.astype(np.int64)).to(self._device)

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        latent_layer = as_latent(layer)
        pool = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id)
        q, k = inputs.q, as_stored(inputs.k, pool, self._new_slots, latent_layer)
        last_only = inputs.rows is not None
        outs = []
        for segment in self._extend_plan:
            queries = q[segment.end - 1 if last_only else segment.begin : segment.end]
            new = k[segment.begin : segment.end]
            outs.append(extend_segment(queries, new, pool, segment, latent_layer))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert self._decode_plan is not None
        pool = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return decode_rows(self._decode_plan, q, pool, as_latent(layer))


def as_latent(layer: AttentionLayer) -> LatentAttention:
    """The layer, which must be one of latent attention."""
    assert isinstance(layer, LatentAttention), layer.kind
    return layer


def as_stored(
    new: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, layer: LatentAttention
) -> torch.Tensor:
    """New rows as later steps read them: rounded, if the pool's dtype is another.

    Args:
        new: `[n, 1, row_dim]`.
        pool: The layer's stored rows.
        slots: int64 `[n]`: the tokens' slots in their requests' rows, not those that the step
            writes to.
    """
    if pool.dtype is new.dtype:
        return new
    return gather_rows(pool, slots, layer.mla.kv_lora_rank, new.dtype)


def decode_rows(
    plan: DecodePlan, q: torch.Tensor, pool: torch.Tensor, layer: LatentAttention
) -> torch.Tensor:
    """Attend from one token of each request to its whole context.

    Args:
        q: `[bs, num_heads, qk_head_dim]`.
        pool: Stored rows, `[slots, 1, width]`; see `read_rows`.

    Returns:
        `[bs, num_heads * v_head_dim]`.
    """
    absorbed = absorb(q, layer).unsqueeze(1)
    read = partial(read_rows, elements=layer.mla.kv_lora_rank, dtype=q.dtype)
    out = decode_by_plan(plan, absorbed, pool, pool, scale=layer.scaling, read=read)
    return values_of(out.squeeze(1), layer)


def absorb(q: torch.Tensor, layer: LatentAttention) -> torch.Tensor:
    """Map queries to row space: `[n, num_heads, qk_head_dim]` to `[n, num_heads, row_dim]`."""
    nope = layer.mla.qk_nope_head_dim
    latent = layer.up_projection.absorb(q[..., :nope].transpose(0, 1))
    return torch.cat((latent.transpose(0, 1), q[..., nope:]), dim=-1)


def values_of(out: torch.Tensor, layer: LatentAttention) -> torch.Tensor:
    """Project averages of rows to values: `[n, num_heads, row_dim]` to
    `[n, heads * v_head_dim]`."""
    latent = out[..., : layer.mla.kv_lora_rank].transpose(0, 1)
    return layer.up_projection.values_of(latent).transpose(0, 1).reshape(len(out), -1)


def extend_segment(
    queries: torch.Tensor,
    new: torch.Tensor,
    pool: torch.Tensor,
    segment: ExtendSegment,
    layer: LatentAttention,
) -> torch.Tensor:
    """Attend from new tokens of one request to its prefix and, causally, to each other.

    Args:
        queries: `[n, num_heads, qk_head_dim]` of all new tokens, or of the last one only.
        new: `[new tokens, 1, row_dim]`.
        pool: Stored rows, `[slots, 1, width]`.
        segment: The request's plan, with the slots of its prefix.

    Returns:
        `[n, num_heads * v_head_dim]`.
    """
    if len(queries) == len(new):
        running = RunningAttention(_attend_projected(queries, new, layer, causal=True))
    else:
        running = RunningAttention(_attend_absorbed(queries, new, layer))
    is_absorbed = absorbing_pays(len(queries), layer)
    attend_to = _attend_absorbed if is_absorbed else _attend_projected
    for piece in _pieces(pool, segment, layer, is_absorbed, queries.itemsize):
        running.add_(attend_to(queries, piece, layer))
    return running.out[0].transpose(0, 1).reshape(len(queries), -1).to(queries.dtype)


def absorbing_pays(num_queries: int, layer: LatentAttention) -> bool:
    """True if `num_queries` cost less over latent rows than over projected keys and values."""
    mla = layer.mla
    row_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
    saved = 2 * row_dim - mla.qk_head_dim - mla.v_head_dim
    return num_queries * saved <= mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)


def _pieces(
    pool: torch.Tensor,
    segment: ExtendSegment,
    layer: LatentAttention,
    is_absorbed: bool,
    itemsize: int,
) -> Iterator[torch.Tensor]:
    """Stored rows of a prefix, `[tokens, 1, width]` each; views if its slots are consecutive.
    `itemsize` is that of the queries."""
    token_bytes, mla = pool[0].nbytes, layer.mla
    if pool.dtype is torch.uint8:
        token_bytes += (mla.kv_lora_rank + mla.qk_rope_head_dim) * itemsize
    if not is_absorbed:
        # Keys and values of all heads, and the copies of them that attention makes.
        token_bytes += 2 * layer.num_heads * (mla.qk_head_dim + mla.v_head_dim) * itemsize
    step = max(1, PIECE_BYTES // token_bytes)
    if segment.prefix_run is not None:
        run = segment.prefix_run
        whole = pool.narrow(0, run.slot, run.end)
        is_view = is_absorbed and pool.dtype is not torch.uint8
        yield from (whole,) if is_view else torch.split(whole, step)
    elif segment.prefix_slots is not None:
        for slots in torch.split(segment.prefix_slots, step):
            yield pool.index_select(0, slots)


def _attend_absorbed(queries: torch.Tensor, rows: torch.Tensor, layer: LatentAttention) -> Partial:
    """Attend from every query to every stored row. All heads and queries are rows of one matrix.

    Returns:
        `out` `[1, num_heads, n, v_head_dim]`.
    """
    n, heads = len(queries), layer.num_heads
    absorbed = heads_first(absorb(queries, layer)).reshape(1, 1, heads * n, -1)
    keys = heads_first(read_rows(rows, layer.mla.kv_lora_rank, queries.dtype))
    part = attend(absorbed, keys, keys, scale=layer.scaling)
    latent = part.out.view(heads, n, -1)[..., : layer.mla.kv_lora_rank]
    values = layer.up_projection.values_of(latent)
    return Partial(values.unsqueeze(0), part.lse.view(1, heads, n))


def _attend_projected(
    queries: torch.Tensor, rows: torch.Tensor, layer: LatentAttention, *, causal: bool = False
) -> Partial:
    """Attend to keys and values that are projected up from stored rows.

    Returns:
        `out` `[1, num_heads, n, v_head_dim]`.
    """
    rank = layer.mla.kv_lora_rank
    row = read_rows(rows, rank, queries.dtype).squeeze(1)
    keys, values = layer.up_projection.forward(row[:, :rank])
    rope = row[:, rank:].unsqueeze(1).expand(-1, layer.num_heads, -1)
    keys = torch.cat((keys, rope), dim=-1)
    return attend(
        heads_first(queries),
        heads_first(keys),
        heads_first(values),
        scale=layer.scaling,
        causal=causal,
    )
