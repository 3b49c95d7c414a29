"""Latent attention (MLA), and its sparse form (DSA), on CUDA.

Decode steps and short prefills absorb the up-projections and attend to the rows of the pool
(`latent_rows.py`). Each token has its own list of slots: its context, or the tokens chosen from it
(`indexer_scores.py`, `indexer_topk.py`). No launch depends on lengths, so graphs can capture all of
it. Long prefills project rows up (`dense_attention.py`). If the
layer has an indexer, only tokens before position `topk` do that, and those before `MASKED_CONTEXT`
do it under a mask of the chosen tokens (`masked_attention.py`).

If an indexer has one key for each group of tokens, whole groups are chosen, and the tokens of the
open group are read besides. Then there is no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.dense_attention import (
    HEADS_AT_ONCE,
    attend_projected,
    warm_up_projected,
)
from sglang.srt.layers.attention.dsa_backend import Pools
from sglang.srt.layers.attention.mla_backend import as_latent, as_stored
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    IndexQuery,
    Segment,
)
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.layers.triton_ops.attention.indexer_scores import index_scores, slots_of_one
from sglang.srt.layers.triton_ops.attention.indexer_topk import choose_slots
from sglang.srt.layers.triton_ops.attention.latent_rows import (
    OpenGroups,
    latent_attention,
    warm_up_latent_joins,
)
from sglang.srt.layers.triton_ops.attention.masked_attention import (
    mask_of,
    masked_attention,
    takes,
)
from sglang.srt.mem_cache.device.row_buffers import gather_rows
from sglang.srt.mem_cache.device.state_spec import PoolName

SHORT_TOKENS: Final = 256
"""Requests with at most this many new tokens attend to latent rows; others project rows up."""
TOKENS_AT_ONCE: Final = 1024
"""Number of tokens whose queries are absorbed together."""
SCORE_BYTES: Final = 256 << 20
"""Upper bound, in bytes, of the indexer's scores computed at a time."""

MASKED_CONTEXT: Final = 13312
"""Tokens before this position attend to all keys under a mask. Reading the chosen rows costs a
token the same everywhere, and a mask as much as there are keys."""
FEW_HEADS: Final = 32
"""At most so many heads have twice the masked context. They take half the time of 64 heads under a
mask, but as much as 64 with chosen rows."""
MASKED_TOKENS: Final = 1024
"""Fewest such tokens of a request: the context is projected up for them."""
SHARED_TOKENS: Final = 256
"""Fewest tokens whose choice the ranks of a layer divide among themselves."""


@dataclass(frozen=True, slots=True)
class SlotLists:
    """The lists of slots that some tokens attend to, a list for each token."""

    rows: torch.Tensor
    """int64 `[n]`: rows of the table of slots."""
    lens: torch.Tensor
    """int64 `[n]`: number of tokens of the row that are seen."""
    longest: int
    """Upper bound of `lens`."""
    one_list: bool = False
    """True if all tokens have the same row."""

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, tokens: slice | torch.Tensor) -> SlotLists:
        """The lists of some of the tokens: a slice, or indices (int64 `[n]`)."""
        return replace(self, rows=self.rows[tokens], lens=self.lens[tokens])


@dataclass(frozen=True, slots=True)
class _LongSegment:
    """A request with many new tokens."""

    segment: Segment
    prefix_slots: torch.Tensor | None
    """int64 `[prefix]`; None: no prefix."""
    new_slots: torch.Tensor
    """int64 `[new]`: where the pool has its new tokens."""
    lists: SlotLists
    """Lists of its new tokens."""


@dataclass(slots=True)
class _ExtendPlan:
    """One batch's work, shared by all layers."""

    long: list[_LongSegment] = field(default_factory=list)
    short: SlotLists | None = None
    """Lists of the tokens of all other requests."""
    short_tokens: torch.Tensor | None = None
    """int64 `[n]`: indices of these tokens in the batch; None: the whole batch."""


class LatentTritonBackend(AttentionBackend):
    """Backend of MLA and DSA layers. Without an indexer's query, a token sees its whole context.

    Rows are read as stored, even those of the step's own tokens.
    """

    can_be_captured = True
    captures_extend = True
    captures_verify = True

    def __init__(self, config: AttentionConfig, masked_context: int | None = None) -> None:
        """Args:
        masked_context: In the place of `MASKED_CONTEXT`.
        """
        self._config = config
        indexer = config.specs.get(PoolName.INDEXER)
        self._group = 1 if indexer is None else indexer.stride
        """Tokens that an indexer's key stands for."""
        self._runtime = device_runtime(config.device)
        self._plan = _ExtendPlan()
        self._captured: dict[int, torch.Tensor] = {}
        """Rows and lengths of tokens, int64 `[2, num_tokens]`, by `num_tokens` of a captured
        prefill."""
        self._own_rows = torch.arange(TOKENS_AT_ONCE, device=config.device)
        masked_context = MASKED_CONTEXT if masked_context is None else masked_context
        self._masked_context = masked_context * (2 if config.num_heads <= FEW_HEADS else 1)
        self._positions = torch.arange(
            self._masked_context, dtype=torch.int32, device=config.device
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode is not ForwardMode.EXTEND:
            return
        segments = forward_batch.segments()
        rows, lens = self._runtime.stage_to_device(_rows_and_lens(segments))
        longest = forward_batch.longest_context
        table = forward_batch.req_to_token_pool.req_to_token
        plan = _ExtendPlan()
        short = []
        for segment in segments:
            if segment.new <= SHORT_TOKENS:
                short.append(np.arange(segment.begin, segment.end))
                continue
            own, total = slice(segment.begin, segment.end), segment.prefix + segment.new
            slots = table[segment.row, :total].to(torch.int64)
            prefix, new = slots[: segment.prefix], slots[segment.prefix :]
            lists = SlotLists(rows[own], lens[own], total, one_list=True)
            plan.long.append(_LongSegment(segment, prefix if segment.prefix else None, new, lists))
        if short and not plan.long:
            plan.short = SlotLists(rows, lens, longest, one_list=len(segments) == 1)
        elif short:
            tokens = self._runtime.stage_to_device(torch.from_numpy(np.concatenate(short)))
            plan.short_tokens = tokens
            plan.short = SlotLists(rows[tokens], lens[tokens], longest)
        self._plan = plan

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        found = self._captured.get(num_tokens)
        table = forward_batch.req_to_token_pool.req_to_token
        if found is None:
            found = torch.empty((2, num_tokens), dtype=torch.int64, device=table.device)
            self._captured[num_tokens] = found
        # Tokens after the step's own see the padding page.
        padded = torch.tensor([[0], [1]]).repeat(1, num_tokens)
        own = _rows_and_lens(forward_batch.segments())
        padded[:, : own.shape[1]] = own
        found.copy_(self._runtime.stage_to_device(padded))
        self._plan = _ExtendPlan(short=SlotLists(found[0], found[1], table.shape[1]))

    def warm_up(self) -> None:
        """Let cuDNN make its plans for the usual lengths; run the kernels that join parts."""
        config = self._config
        assert config.mla is not None, "its layers have latent attention"
        q = torch.empty(
            (1, config.num_heads, config.mla.qk_head_dim), dtype=config.dtype, device=config.device
        )
        warm_up_projected(q, q[..., : config.mla.v_head_dim])
        warm_up_latent_joins(config.num_heads, config.mla.kv_lora_rank, q)

    def graph_bytes(self, num_tokens: int, context_len: int) -> int:
        return 4 * num_tokens * context_len // self._group

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        self.store(inputs, layer, forward_batch)
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            return self.forward_extend(inputs, layer, forward_batch)
        return self.forward_decode(inputs.q, layer, forward_batch, inputs.index_query)

    def forward_decode(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        index: IndexQuery | None = None,
    ) -> torch.Tensor:
        """Attend from one token of each request, or each token of a verification, to its context
        or, with `index`, to chosen tokens."""
        latent = as_latent(layer)
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            rows, lens = forward_batch.contexts_of_tokens()
        lists = SlotLists(rows, lens, forward_batch.longest_context)
        out = _empty_out(q, latent)
        self._attend(q, latent, forward_batch, lists, index, out)
        return out.flatten(1)

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, rows, index = inputs.q, inputs.k, inputs.rows, inputs.index_query
        if rows is not None:  # a request's last token sees all of its context, as in decoding
            index = None if index is None else index.of(rows)
            return self.forward_decode(q.index_select(0, rows), layer, forward_batch, index)
        latent, plan = as_latent(layer), self._plan
        out = _empty_out(q, latent)
        if plan.short is not None and plan.short_tokens is None:
            self._attend(q, latent, forward_batch, plan.short, index, out)
        elif plan.short is not None and plan.short_tokens is not None:
            tokens = plan.short_tokens
            found = _empty_out(q[: len(plan.short)], latent)
            own_index = None if index is None else index.of(tokens)
            self._attend(q[tokens], latent, forward_batch, plan.short, own_index, found)
            out[tokens] = found
            if index is not None and own_index is not None and own_index.chosen is not None:
                assert index.chosen is not None
                index.chosen[tokens] = own_index.chosen
        for long in plan.long:
            self._extend_long(q, k, latent, forward_batch, long, index, out)
        return out.flatten(1)

    def _extend_long(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: LatentAttention,
        forward_batch: ForwardBatch,
        long: _LongSegment,
        index: IndexQuery | None,
        out: torch.Tensor,
    ) -> None:
        segment, choosing = long.segment, long.segment.end
        if index is not None:
            # Tokens from here on read a part of their context.
            first = segment.begin + index.topk + self._group - 1 - segment.prefix
            choosing = min(max(first, segment.begin), segment.end)
        if segment.begin < choosing:
            own = slice(segment.begin, choosing)
            pool = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id)
            new = as_stored(k[own], pool, long.new_slots[: choosing - segment.begin], layer)
            attend_projected(q[own], new, pool, long.prefix_slots, layer, out[own])
        if index is None:
            return
        masked = min(segment.end, segment.begin + self._masked_context - segment.prefix)
        is_alone = index.chosen is None and self._group == 1
        if is_alone and masked - choosing >= MASKED_TOKENS and _can_be_masked(layer):
            own = slice(choosing, masked)
            lists = replace(
                long.lists.of(slice(choosing - segment.begin, masked - segment.begin)),
                longest=segment.prefix + masked - segment.begin,
            )
            self._attend_masked(q[own], layer, forward_batch, lists, index.of(own), out[own])
            choosing = masked
        if choosing < segment.end:
            own, at = slice(choosing, segment.end), choosing - segment.begin
            lists = long.lists.of(slice(at, None))
            self._attend(q[own], layer, forward_batch, lists, index.of(own), out[own])

    def _attend_masked(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        forward_batch: ForwardBatch,
        lists: SlotLists,
        index: IndexQuery,
        out: torch.Tensor,
    ) -> None:
        """Attend from consecutive tokens of one request to chosen tokens, under a mask.

        Args:
            q: `[n, num_heads, qk_head_dim]`.
            lists: Lists of the tokens, which end before `_masked_context`.
            index: Indexer queries of the same tokens.
            out: `[n, num_heads, v_head_dim]`, overwritten.
        """
        pool, keys = Pools.of(forward_batch, layer.layer_id, index)
        assert keys is not None, "the choice is not shared"
        first, table = lists.longest - len(q), forward_batch.req_to_token_pool.req_to_token
        rank, slots = layer.mla.kv_lora_rank, slots_of_one(table, lists.rows, lists.longest)
        rows = gather_rows(pool, slots.long(), rank, q.dtype).squeeze(1)
        own = self._own_tokens(lists)
        mine, part = (lists, index) if own is None else (lists.of(own), index.of(own))
        masks = []
        for begin in range(0, len(mine), TOKENS_AT_ONCE):
            tokens = slice(begin, begin + TOKENS_AT_ONCE)
            block, asked = mine.of(tokens), part.of(tokens)
            scores = index_scores(
                *(asked.q, asked.weights, keys, table, block.rows, block.lens, lists.longest),
                one_list=True,
            )
            # A table whose slots are positions.
            places = self._positions.view(1, -1), torch.zeros_like(block.rows)
            chosen = choose_slots(scores, *places, block.lens, index.topk)
            masks.append(mask_of(chosen, lists.longest))
        mask = masks[0] if len(masks) == 1 else torch.cat(masks)
        if own is not None:
            mask = self._of_all_ranks(mask, len(lists))
        # In twice the context half of the heads take the same memory.
        at_once = HEADS_AT_ONCE // (2 if lists.longest > MASKED_CONTEXT else 1)
        for begin in range(0, layer.num_heads, at_once):
            heads = slice(begin, begin + at_once)
            projected = layer.up_projection.project(rows[:, :rank], heads)
            masked_attention(
                q[:, heads], projected, rows, mask, first, layer.scaling, out[:, heads]
            )

    def _choose(
        self, index: IndexQuery, keys: torch.Tensor, table: torch.Tensor, lists: SlotLists
    ) -> torch.Tensor:
        """`IndexQuery.chosen` of the tokens of `lists`, in `index.chosen` if there is one.

        Args:
            index: Indexer queries of these tokens.
            keys: The indexer's keys of all slots.
            table: The table of slots.
        """
        own, out = self._own_tokens(lists), index.chosen
        mine, part = (lists, index) if own is None else (lists.of(own), index.of(own))
        size = self._group
        slots = table, mine.rows, mine.lens
        longest = max(1, lists.longest // size)
        scores = index_scores(
            part.q, part.weights, keys, *slots, longest, one_list=lists.one_list, stride=size
        )
        given = out if own is None else None
        found = choose_slots(scores, *slots, index.topk // size, out=given, stride=size)
        if own is None:
            return found
        found = self._of_all_ranks(found, len(lists))
        return found if out is None else out.copy_(found)

    def _own_tokens(self, lists: SlotLists) -> torch.Tensor | None:
        """Indices of the tokens whose choice is this rank's part, int64 `[ceil(n / ranks)]`; None:
        every rank chooses for all. The last may be repeated."""
        group, count = self._config.tp_group, len(lists)
        if group.size == 1 or not lists.one_list or count < SHARED_TOKENS:
            return None
        # In turn, since later tokens see more keys.
        end = -(-count // group.size) * group.size
        own = torch.arange(group.rank, end, group.size, device=lists.rows.device)
        return own.clamp_(max=count - 1)

    def _of_all_ranks(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Rows of `count` tokens, from the rows of each rank's `_own_tokens`."""
        return self._config.tp_group.all_gather(part).transpose(0, 1).flatten(0, 1)[:count]

    def _attend(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        forward_batch: ForwardBatch,
        lists: SlotLists,
        index: IndexQuery | None,
        out: torch.Tensor,
    ) -> None:
        """Attend from tokens to their lists or, with `index`, to tokens chosen from them.

        Args:
            q: `[n, num_heads, qk_head_dim]`.
            index: Indexer queries of the same tokens.
            out: `[n, num_heads, v_head_dim]`, overwritten.
        """
        step = TOKENS_AT_ONCE
        if index is not None:
            step = max(1, min(step, SCORE_BYTES * self._group // (4 * lists.longest)))
        for begin in range(0, len(q), step):
            own = slice(begin, min(begin + step, len(q)))
            own_index = None if index is None else index.of(own)
            block = lists.of(own) if step < len(q) else lists
            out[own] = self._attend_rows(q[own], layer, forward_batch, block, own_index)

    def _attend_rows(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        forward_batch: ForwardBatch,
        lists: SlotLists,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        """Attend, all tokens at once: `[n, num_heads, v_head_dim]`; arguments as in `_attend`."""
        table, pools = forward_batch.req_to_token_pool.req_to_token, forward_batch.token_to_kv_pool
        if index is None:
            pool = pools.get_key_buffer(layer.layer_id)
            found = latent_attention(
                *_absorbed(q, layer), pool, table, lists.rows, lists.lens, layer.scaling
            )
        else:
            pool, keys = Pools.of(forward_batch, layer.layer_id, index)
            chosen = index.chosen
            if keys is not None:
                chosen = self._choose(index, keys, table, lists)
            assert chosen is not None
            found = self._attend_chosen(q, layer, pool, chosen, lists, table)
        return layer.up_projection.values_of(found.transpose(0, 1)).transpose(0, 1)

    def _attend_chosen(
        self,
        q: torch.Tensor,
        layer: LatentAttention,
        pool: torch.Tensor,
        chosen: torch.Tensor,
        lists: SlotLists,
        table: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to chosen slots; a token that sees fewer, to the first.

        Args:
            q: `[n, num_heads, qk_head_dim]`.
            pool: The layer's stored rows.
            chosen: See `IndexQuery`.
            lists: Lists of slots from which the tokens chose, in `table`.

        Returns:
            `[n, num_heads, kv_lora_rank]`.
        """
        rows, size = self._own_rows[: len(q)], self._group
        return latent_attention(
            *_absorbed(q, layer),
            pool,
            chosen,
            rows,
            lists.lens,
            layer.scaling,
            most=chosen.shape[1] * size,
            groups=None if size == 1 else OpenGroups(size, table, lists.rows),
        )


def _absorbed(q: torch.Tensor, layer: LatentAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in latent space, `[n, num_heads, kv_lora_rank]`, and their rotated parts."""
    nope = layer.mla.qk_nope_head_dim
    absorbed = layer.up_projection.absorb(q[..., :nope].transpose(0, 1)).transpose(0, 1)
    return absorbed, q[..., nope:]


def _can_be_masked(layer: LatentAttention) -> bool:
    """True if `masked_attention` takes the layer's heads and rows."""
    mla = layer.mla
    return takes(mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)


def _empty_out(q: torch.Tensor, layer: LatentAttention) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], layer.mla.v_head_dim))


def _rows_and_lens(segments: Sequence[Segment]) -> torch.Tensor:
    """int64 `[2, num_tokens]` on the CPU: each new token's row of the table, and the number of
    tokens that it sees."""
    counts = [segment.new for segment in segments]
    rows = np.repeat([segment.row for segment in segments], counts)
    lens = [np.arange(s.prefix + 1, s.prefix + s.new + 1) for s in segments]
    return torch.from_numpy(np.stack((rows, np.concatenate(lens))))
