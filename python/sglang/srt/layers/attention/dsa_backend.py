"""DeepSeek Sparse Attention (DSA) in plain torch: latent attention over tokens that an indexer
chooses.

A token at position `topk` or later chooses `topk` tokens of its context by their indexer keys, and
attends to their latent rows, which have the same slots. Earlier tokens see their whole context. The
choice depends only on scores and positions, not on slots.

A layer takes more memory than in the base class: at most `GATHER_BYTES` of rows and `SCORE_BYTES`
of products. Each query of a block takes a few numbers per token of the context. If the slots of the
context are not consecutive, its indexer keys are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.mla_backend import (
    MLATorchNativeBackend,
    absorb,
    as_latent,
    as_stored,
    decode_rows,
    extend_segment,
    values_of,
)
from sglang.srt.layers.attention.partial_attention import attend
from sglang.srt.layers.attention.slot_plan import (
    VIEW_BYTES,
    DecodePlan,
    Slots,
    longest_run,
)
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    IndexQuery,
)
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.mem_cache.device.fp8_rows import pack, read_rows
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool
from sglang.srt.mem_cache.device.row_buffers import gather_rows

GATHER_BYTES: Final = 64 << 20
"""Upper bound, in bytes, of the chosen rows gathered at a time."""
SCORE_BYTES: Final = 32 << 20
"""Upper bound, in bytes, of products of queries and keys held before the sum over heads."""


@dataclass(frozen=True, slots=True)
class Context:
    """Slots of one request's tokens, including this step's."""

    slots: torch.Tensor
    """int64 `[context]` on the pool's device."""
    first_slot: int | None
    """The first slot, if all are consecutive; else None."""

    @classmethod
    def of(cls, slots: Slots, page_size: int, device: torch.device) -> Context:
        run = longest_run(slots, page_size)
        is_whole = run.end - run.begin == len(slots)
        on_device = torch.from_numpy(slots.astype(np.int64)).to(device)
        return cls(on_device, run.slot if is_whole else None)

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Read `[context, ...]` of a buffer `[slots, ...]`: a view if the slots are consecutive."""
        if self.first_slot is not None:
            return buffer.narrow(0, self.first_slot, len(self.slots))
        return buffer.index_select(0, self.slots)


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """The requests of a decode step, split by length of context."""

    short_rows: torch.Tensor
    """int64 `[short]`: rows of the batch that read their whole context."""
    short_plan: DecodePlan | None
    """Plan of the short rows, in this order; None: no short rows."""
    long_rows: list[int]
    """Rows of the batch that choose tokens."""
    order: torch.Tensor
    """int64 `[bs]`: index of each batch row in the short rows followed by the long rows."""


class Pools(NamedTuple):
    """One layer's buffers. `of` waits until they may be read."""

    rows: torch.Tensor
    """Stored rows, `[slots, 1, width]`; see `read_rows`."""
    index_keys: torch.Tensor | None
    """Stored keys, `[slots, width]`; None: the layer shares the choice of an earlier one."""

    @classmethod
    def of(cls, forward_batch: ForwardBatch, layer_id: int, index: IndexQuery) -> Pools:
        pool = forward_batch.token_to_kv_pool
        assert isinstance(pool, NSATokenToKVPool)
        keys = None if index.is_known else pool.get_index_k_buffer(layer_id)
        return cls(pool.get_key_buffer(layer_id), keys)


class DSATorchNativeBackend(MLATorchNativeBackend):
    """Attention to the tokens that `index` chooses; without `index`, like the base class."""

    unchosen = 0
    """Tokens that a token reads besides those that it chooses, at most."""

    def __init__(self, config: AttentionConfig, *, view_bytes: int = VIEW_BYTES) -> None:
        super().__init__(config, view_bytes=view_bytes)
        # Plans of the current batch, made for the first layer and reused by the others.
        self._contexts: dict[int, Context] = {}
        self._splits: dict[int, DecodeSplit] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._contexts, self._splits = {}, {}

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        index = inputs.index_query
        if index is None:
            return super().forward(inputs, layer, forward_batch)
        self.store(inputs, layer, forward_batch)
        pools = Pools.of(forward_batch, layer.layer_id, index)
        if forward_batch.forward_mode.is_decode():
            return self._decode(inputs.q, as_latent(layer), pools, index)
        k = as_stored(inputs.k, pools.rows, self._new_slots, as_latent(layer))
        last_only = inputs.rows is not None
        return self._extend(inputs.q, k, as_latent(layer), pools, index, last_only)

    def _decode(
        self, q: torch.Tensor, layer: LatentAttention, pools: Pools, index: IndexQuery
    ) -> torch.Tensor:
        split = self._split(index.topk + self.unchosen)
        outs = []
        if split.short_plan is not None:
            short = q.index_select(0, split.short_rows)
            outs.append(decode_rows(split.short_plan, short, pools.rows, layer))
        for row in split.long_rows:
            own = slice(row, row + 1)
            outs.append(self._attend_chosen(row, q[own], layer, pools, index.of(own)))
        return torch.cat(outs).index_select(0, split.order)

    def _split(self, most: int) -> DecodeSplit:
        if most not in self._splits:
            short = [row for row, slots in enumerate(self._slots) if len(slots) <= most]
            long = [row for row, slots in enumerate(self._slots) if len(slots) > most]
            contexts = [self._slots[row] for row in short]
            self._splits[most] = DecodeSplit(
                torch.tensor(short, dtype=torch.int64, device=self._device),
                self._plan_decode(contexts) if short else None,
                long,
                torch.tensor(short + long, device=self._device).argsort(),
            )
        return self._splits[most]

    def _extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: LatentAttention,
        pools: Pools,
        index: IndexQuery,
        last_only: bool,
    ) -> torch.Tensor:
        outs = []
        for request, segment in enumerate(self._extend_plan):
            prefix = len(self._slots[request]) - (segment.end - segment.begin)
            # Tokens from here on read a part of their context.
            whole = index.topk + self.unchosen
            choosing = min(max(segment.begin + whole - prefix, segment.begin), segment.end)
            if segment.begin < choosing and not (last_only and choosing < segment.end):
                before = slice(choosing - 1 if last_only else segment.begin, choosing)
                new = k[segment.begin : choosing]
                outs.append(extend_segment(q[before], new, pools.rows, segment, layer))
            if choosing < segment.end:
                own = slice(segment.end - 1 if last_only else choosing, segment.end)
                outs.append(self._attend_chosen(request, q[own], layer, pools, index.of(own)))
        return torch.cat(outs)

    def _attend_chosen(
        self,
        request: int,
        q: torch.Tensor,
        layer: LatentAttention,
        pools: Pools,
        index: IndexQuery,
    ) -> torch.Tensor:
        """Attend from the last tokens of one request. Each chooses its keys.

        Args:
            q: `[n, num_heads, qk_head_dim]`.
            index: Indexer queries of the same tokens.

        Returns:
            `[n, num_heads * v_head_dim]`.
        """
        context = self._context(request)
        keys = None if pools.index_keys is None else context.read(pools.index_keys)
        first = len(context.slots) - len(q)
        row_dim = layer.mla.kv_lora_rank + layer.mla.qk_rope_head_dim
        step = max(1, GATHER_BYTES // (index.topk * row_dim * q.itemsize))
        outs = []
        for begin in range(0, len(q), step):
            block = slice(begin, min(begin + step, len(q)))
            own = index.of(block)
            if keys is None:
                assert own.chosen is not None
                chosen = own.chosen.long()
            else:
                seen = first + block.stop
                positions = torch.arange(first + begin, seen, device=keys.device)
                scores = index_scores(own, keys[:seen], positions=positions)
                chosen = context.slots[choose_tokens(scores, index.topk)]
                if own.chosen is not None:
                    own.chosen.copy_(chosen)
            outs.append(attend_rows(q[block], pools.rows, chosen, layer))
        return torch.cat(outs)

    def _context(self, request: int) -> Context:
        if request not in self._contexts:
            slots = self._slots[request]
            self._contexts[request] = Context.of(slots, self._config.page_size, self._device)
        return self._contexts[request]


def attend_rows(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    layer: LatentAttention,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each token to slots of its own.

    Args:
        q: `[n, num_heads, qk_head_dim]`.
        slots: int64 `[n, topk]`.
        mask: `[n, topk]`, added to the scores.

    Returns:
        `[n, num_heads * v_head_dim]`.
    """
    absorbed = absorb(q, layer).unsqueeze(1)
    # One token at a time on a CPU takes 0.8 ms per token; 28 at a time take 4.5 ms per token,
    # mostly for fresh memory (2,048 rows of 576, 16 heads, bf16, 2 cores).
    step = 1 if q.is_cpu else len(q)
    outs = []
    for begin in range(0, len(q), step):
        of_block = slots[begin : begin + step]
        rows = gather_rows(pool, of_block.flatten(), layer.mla.kv_lora_rank, q.dtype)
        keys = rows.view(len(of_block), 1, of_block.shape[1], -1)
        queries = absorbed[begin : begin + step]
        of_own = None if mask is None else mask[begin : begin + step, None, None]
        outs.append(attend(queries, keys, keys, scale=layer.scaling, mask=of_own).out)
    return values_of(torch.cat(outs).squeeze(1), layer)


def index_scores(query: IndexQuery, keys: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
    """Scores of all tokens of one context, for some of its tokens.

    Args:
        query: Indexer queries of `n` tokens.
        keys: Stored keys, `[context, width]`, in the order of the context. If they are in fp8,
            queries are rounded in the same way.
        positions: int64 `[n]`: positions of the querying tokens in the context.

    Returns:
        fp32 `[n, context]`; -inf for tokens after the querying one.
    """
    n, heads, dim = query.q.shape
    q = query.q.reshape(n * heads, dim)
    q = read_rows(pack(q, dim) if keys.dtype is torch.uint8 else q, dim, torch.float32)
    weights = query.weights.unsqueeze(1)
    step = max(1, SCORE_BYTES // (4 * n * heads))
    parts = []
    for begin in range(0, len(keys), step):
        block = read_rows(keys[begin : begin + step], dim, torch.float32)
        products = (q @ block.t()).relu_()
        parts.append(torch.bmm(weights, products.view(n, heads, -1)).squeeze(1))
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    places = torch.arange(len(keys), device=keys.device)
    return scores.masked_fill_(places > positions.unsqueeze(1), -torch.inf)


def choose_tokens(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Choose the `topk` best tokens of each row; among equal scores the first tokens win.

    Ties are common, because relu makes many scores exactly 0. `torch.topk` does not define its
    choice among equal scores, so only its values are used. Nothing is read back to the CPU.

    Args:
        scores: fp32 `[n, context]`, with at least `topk` tokens.

    Returns:
        int64 `[n, topk]`, ascending.
    """
    last = scores.topk(topk, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = scores > last, scores == last
    missing = topk - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= missing))
    # A chosen token's rank is its column; the other tokens go to a column that is cut off.
    ranks = (chosen.cumsum(dim=-1) - 1).masked_fill_(~chosen, topk)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    # Zeros, so that entries that NaN scores leave unset are valid positions too.
    out = torch.zeros(len(scores), topk + 1, dtype=torch.int64, device=scores.device)
    return out.scatter_(1, ranks, places)[:, :topk]
