"""Attention to a window and to compressed rows in plain torch, for any device.

A token attends to the last tokens, as in `window_backend.py`, and to rows that stand for groups of
earlier tokens: to all whose last token is not after it, or to those that an indexer chooses of
these. One softmax is over tokens, rows and sinks. A key is its own value.

It reads a copy of a request's rows in each layer, and of its indexer keys if they are chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from sglang.srt.layers.attention.dsa_backend import GATHER_BYTES, choose_tokens, index_scores
from sglang.srt.layers.attention.partial_attention import (
    Partial,
    attend,
    heads_first,
    merge_two,
    with_sinks,
)
from sglang.srt.layers.attention.window_backend import WindowTorchBackend
from sglang.srt.layers.attention_kind import COMPRESSED
from sglang.srt.layers.compressed.compressor import GroupCompressor
from sglang.srt.layers.compressed.group_plan import groups_of, plan_groups
from sglang.srt.layers.compressed.rotation import rotate_last
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    IndexQuery,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import Rotation
from sglang.srt.mem_cache.device.state_spec import PoolName


class CompressedAttention(RadixAttention):
    """`RadixAttention` with one KV head, to a window and perhaps to rows.

    Attributes:
        rows_pool: Pool of the layer's rows; None: it has a window alone.
        ratio: Tokens of a row's group.
    """

    rows_pool: PoolName | None = None
    ratio = 1

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        rotation: Rotation,
        forward_batch: ForwardBatch,
        *,
        rows: torch.Tensor | None,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        """Store the new keys, then attend, and rotate the outputs back. The caller has called
        `ForwardBatch.begin_layer`, since rows are stored before.

        Args:
            q: `[num_tokens, num_heads, head_dim]`, rotated.
            kv: `[num_tokens, 1, head_dim]`, likewise.
            rotation: Angles of the tokens.
            rows: See `RadixAttention.forward`, for `index` and the result too.
        """
        assert forward_batch.attn_backends is not None, "the runner sets them before the model runs"
        inputs = AttentionInputs(q, kv, kv, rows=rows, index_query=index, rotation=rotation)
        return forward_batch.attn_backends[self.kind].forward(inputs, self, forward_batch)


class LayerRows(NamedTuple):
    """Rows of one kind that a layer makes in a step."""

    tokens: torch.Tensor
    """See `GroupCompressor.rows`."""
    compressor: GroupCompressor
    pool: PoolName
    """Pool of the rows."""


class StoresRows(ABC):
    """The part of a backend that makes rows, before a layer attends."""

    @abstractmethod
    def plan_rows(
        self,
        forward_batch: ForwardBatch,
        positions: torch.Tensor,
        starts: Mapping[int, Rotation],
    ) -> None:
        """Plan the rows of a step, once for all layers.

        Args:
            positions: int64 `[num_tokens]`.
            starts: For each number of tokens of a group, the angles of the first position of each
                token's group.
        """

    @abstractmethod
    def store_rows(self, kinds: Sequence[LayerRows], batch: ForwardBatch) -> None:
        """Store the rows of the groups that a step finishes, and what later steps need of its
        tokens.

        Args:
            kinds: The kinds of rows of a layer.
        """


def row_store(forward_batch: ForwardBatch) -> StoresRows:
    """The backend that makes the rows of a step."""
    assert forward_batch.attn_backends is not None, "the runner sets them before the model runs"
    backend = forward_batch.attn_backends[COMPRESSED]
    assert isinstance(backend, StoresRows), f"{type(backend).__name__} makes no rows"
    return backend


def row_buffers(
    layer: CompressedAttention, forward_batch: ForwardBatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows `[items, head_dim]` and indexer keys `[items, index_dim]` of a layer; None: all rows are
    read. Waits for a load that fills them."""
    assert forward_batch.pools is not None and layer.rows_pool is not None
    pool, keys = forward_batch.pools[layer.rows_pool], forward_batch.pools.get(PoolName.INDEXER)
    rows = pool.parts[0][pool.wait_for_layer(layer.layer_id)]
    if keys is None or layer.layer_id not in keys.spec.layers:
        return rows, None
    return rows, keys.parts[0][keys.wait_for_layer(layer.layer_id)]


class _Rows(NamedTuple):
    """The rows of one layer; `items` are those of one request, or of several."""

    buffer: torch.Tensor
    """`[items of the pool, head_dim]`."""
    index_keys: torch.Tensor | None
    """`[items of the pool, index_dim]`; None: all rows are read."""
    items: torch.Tensor
    """int64 `[rows]`, or `[bs, rows]`."""


class CompressedTorchBackend(WindowTorchBackend, StoresRows):
    """See the module."""

    def plan_rows(
        self,
        forward_batch: ForwardBatch,
        positions: torch.Tensor,
        starts: Mapping[int, Rotation],
    ) -> None:
        for ratio, plan in plan_groups(forward_batch, starts).items():
            cos, sin = starts[ratio]
            last = plan.current[:, -1]
            plan.rotation = Rotation(cos[last], sin[last])

    def store_rows(self, kinds: Sequence[LayerRows], batch: ForwardBatch) -> None:
        assert batch.pools is not None, "the runner sets it before the model runs"
        for tokens, compressor, pool in kinds:
            plan, rows = groups_of(batch, compressor.options.ratio), batch.pools[pool]
            buffer = rows.parts[0][rows.place_to_write(compressor.layer_id)]
            # Padding for those that the pool has already.
            items = batch.out_cache_loc[plan.current[:, -1]] // plan.ratio
            found = compressor.rows(tokens, plan, batch)
            buffer.index_copy_(0, items, found.to(buffer.dtype))

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert isinstance(layer, CompressedAttention), f"{layer} has no rows"
        assert inputs.rotation is not None, "outputs are rotated back"
        out, rotation = self._attend(inputs, layer, forward_batch), Rotation(*inputs.rotation)
        if inputs.rows is not None:
            rotation = Rotation(*(angles[inputs.rows] for angles in rotation))
        out = out.view(len(out), -1, layer.head_dim)
        return rotate_last(out, rotation, is_inverse=True).flatten(1)

    def _attend(
        self, inputs: AttentionInputs, layer: CompressedAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """`forward`, without the rotation of outputs."""
        rings, states = self._rings_of(layer, forward_batch)
        if forward_batch.forward_mode.is_decode():
            rings.write(states.slots, forward_batch.positions % self._window, inputs.k, inputs.v)
            return self._decode(inputs, layer, forward_batch)
        out = self._extend(inputs, layer, forward_batch)
        self._store(inputs.k, inputs.v, rings, states)
        return out

    def _decode(
        self, inputs: AttentionInputs, layer: CompressedAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        rings, states = self._rings_of(layer, forward_batch)
        q, mask = inputs.q, self._decode_mask
        assert mask is not None
        keys = rings.k[:, : mask.shape[-1]].index_select(0, states.slots).transpose(1, 2)
        keys = keys.to(q.dtype)
        rows = self._rows_of_batch(inputs.index_query, layer, forward_batch)
        if rows is not None:
            width = rows.items.shape[1]
            counts = (forward_batch.seq_lens // layer.ratio).clamp(max=width)
            hidden = self._first(counts, width)
            # Items behind a request's rows are of others, and may be no numbers: a product with a
            # weight of 0 would not be 0.
            chosen = rows.buffer[rows.items].masked_fill_(hidden.isinf().unsqueeze(-1), 0)
            keys = torch.cat([keys, chosen.unsqueeze(1).to(q.dtype)], dim=2)
            mask = torch.cat([mask, hidden[:, None, None]], dim=-1)
        part = attend(q.unsqueeze(1), keys, keys, scale=layer.scaling, mask=mask)
        return with_sinks(part, layer.sinks).out.reshape(len(q), -1)

    def _extend(
        self, inputs: AttentionInputs, layer: CompressedAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, plan = inputs.q, inputs.k, self._plan
        assert plan is not None
        rings, states = self._rings_of(layer, forward_batch)
        slots = states.read_slots.index_select(0, plan.past.requests)
        past_k, _ = rings.read(slots, plan.past.rows)
        outs, past_begin = [], 0
        for segment, past_len, blocks in zip(
            forward_batch.segments(), plan.past_lens, plan.blocks, strict=True
        ):
            past = past_k[past_begin : past_begin + past_len].to(k.dtype)
            past_begin += past_len
            keys = torch.cat([past, k[segment.begin : segment.end]])
            total = segment.prefix + segment.new
            rows = self._rows_of_request(segment.row, total, layer, forward_batch)
            for block in blocks:
                own = slice(segment.begin + block.begin, segment.begin + block.end)
                seen, mask = keys[block.first_key : block.last_key], block.mask
                if inputs.rows is not None:
                    if block.end < segment.new:
                        continue
                    own, mask = slice(segment.end - 1, segment.end), mask[-1:]
                position = segment.prefix + own.start - segment.begin
                index = inputs.index_query
                part = self._attend_block(
                    q[own],
                    seen,
                    mask,
                    rows,
                    range(position, position + own.stop - own.start),
                    None if index is None else index.of(own),
                    layer,
                )
                sinks = None if layer.sinks is None else layer.sinks.unsqueeze(1)
                outs.append(with_sinks(part, sinks).out[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)

    def _attend_block(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor,
        rows: _Rows | None,
        positions: range,
        index: IndexQuery | None,
        layer: CompressedAttention,
    ) -> Partial:
        """Attend from consecutive tokens of one request, `q` `[n, heads, head_dim]`.

        Args:
            keys: `[keys, 1, head_dim]`: tokens in their windows.
            mask: `[n, keys]`, added to the scores of `keys`.

        Returns:
            A part `[1, heads, n, head_dim]`.
        """
        count = positions.stop // layer.ratio
        if rows is None or not count:
            one = heads_first(keys)
            return attend(heads_first(q), one, one, scale=layer.scaling, mask=mask)
        ends = torch.arange(positions.start + 1, positions.stop + 1, device=q.device)
        counts = ends // layer.ratio
        items = rows.items[:count]
        if index is None or count <= index.topk:
            chosen = rows.buffer[items].unsqueeze(1).to(q.dtype)
            one = heads_first(torch.cat([keys, chosen]))
            mask = torch.cat([mask, self._first(counts, count)], dim=1)
            return attend(heads_first(q), one, one, scale=layer.scaling, mask=mask)
        one = heads_first(keys)
        near = attend(heads_first(q), one, one, scale=layer.scaling, mask=mask)
        assert rows.index_keys is not None
        scores = index_scores(index, rows.index_keys[items], positions=counts - 1)
        far = self._attend_chosen(
            q, rows.buffer, items, choose_tokens(scores, index.topk), counts, layer
        )
        return Partial(merge_two(near, far), torch.logaddexp(near.lse, far.lse))

    def _attend_chosen(
        self,
        q: torch.Tensor,
        buffer: torch.Tensor,
        items: torch.Tensor,
        chosen: torch.Tensor,
        counts: torch.Tensor,
        layer: CompressedAttention,
    ) -> Partial:
        """Attend from each token to the rows `chosen` `[n, topk]`, of which those before `counts`
        `[n]` are visible. A token without visible rows gets a weight of 0."""
        hidden = chosen >= counts.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=q.device)
        # A softmax needs a key; the weight of such a token's part is set below.
        mask = mask.masked_fill_(hidden & (counts > 0).unsqueeze(1), -torch.inf)
        step = 1 if q.is_cpu else max(1, GATHER_BYTES // (chosen.shape[1] * q[0, 0].nbytes))
        parts = []
        for begin in range(0, len(q), step):
            own = slice(begin, begin + step)
            keys = buffer[items[chosen[own]]].unsqueeze(1).to(q.dtype)
            of_own = mask[own, None, None]
            parts.append(attend(q[own].unsqueeze(1), keys, keys, scale=layer.scaling, mask=of_own))
        out = torch.cat([part.out for part in parts])
        lse = torch.cat([part.lse for part in parts]).squeeze(1)
        lse = lse.masked_fill((counts == 0).unsqueeze(1), -torch.inf)
        return Partial(out.transpose(0, 2).squeeze(1).unsqueeze(0), lse.t().unsqueeze(0))

    def _rows_of_request(
        self, row: int, length: int, layer: CompressedAttention, forward_batch: ForwardBatch
    ) -> _Rows | None:
        """The rows of the first `length` tokens of a request."""
        if layer.rows_pool is None or length < layer.ratio:
            return None
        table = forward_batch.req_to_token_pool.req_to_token
        end = length // layer.ratio * layer.ratio
        items = table[row, : end : layer.ratio].long() // layer.ratio
        return _Rows(*row_buffers(layer, forward_batch), items)

    def _rows_of_batch(
        self, index: IndexQuery | None, layer: CompressedAttention, forward_batch: ForwardBatch
    ) -> _Rows | None:
        """The rows that each request of a decode step reads, padded to as many."""
        counts = [length // layer.ratio for length in forward_batch.seq_lens_cpu]
        most = max(counts)
        if layer.rows_pool is None or not most:
            return None
        buffer, index_keys = row_buffers(layer, forward_batch)
        table = forward_batch.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        items = table[:, : most * layer.ratio : layer.ratio].long() // layer.ratio
        if index is None or most <= index.topk:
            return _Rows(buffer, index_keys, items)
        assert index_keys is not None
        chosen = items[:, : index.topk].clone()
        for request, count in enumerate(counts):
            if count > index.topk:
                own = items[request, :count]
                last = torch.full((1,), count - 1, device=own.device)
                query = index.of(slice(request, request + 1))
                scores = index_scores(query, index_keys[own], positions=last)
                chosen[request] = own[choose_tokens(scores, index.topk)[0]]
        return _Rows(buffer, index_keys, chosen)

    def _first(self, counts: torch.Tensor, width: int) -> torch.Tensor:
        """A mask `[n, width]` of the first `counts` `[n]`."""
        hidden = torch.arange(width, device=counts.device) >= counts.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=counts.device)
        return mask.masked_fill_(hidden, -torch.inf)
