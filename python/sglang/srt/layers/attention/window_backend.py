"""Sliding-window attention: a token sees itself and the `window - 1` tokens before it.

A request keeps the keys and values of its last `window` tokens in a ring: position p is in row
`p % window`, and newer tokens overwrite older ones. The memory of these layers does not grow with
the context. A prefix is continued from a copy of its ring, which all tiers treat like a
recurrent state. Keys are stored with their rotation, so the order of rows has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.partial_attention import attend, heads_first, with_sinks
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    Segment,
    StateBatch,
)
from sglang.srt.layers.linear_attention.extend_plan import upload
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    RankShare,
    StateBuffer,
    StateSpec,
)

BLOCK: Final = 256
"""New tokens that attend at once. Together they read up to `window + BLOCK - 1` keys; each sees
`window` of them."""


def window_spec(
    layers: tuple[int, ...],
    window: int,
    head_num: int,
    head_dim: int,
    dtype: torch.dtype,
    share: RankShare,
) -> StateSpec:
    """The rings of layers with a window of `window` tokens: `k` and `v`, `[head_num, window,
    head_dim]` each.

    Args:
        head_num: KV heads on this rank.
        share: The model's heads that these are.
    """
    shape = (head_num, window, head_dim)
    return StateSpec(
        name=PoolName.SWA,
        layers=layers,
        buffers=tuple(StateBuffer(name, shape, dtype, (head_num,)) for name in ("k", "v")),
        item=ItemKind.STATE,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
        share=share,
        is_repeatable=True,
    )


def refuse_drafts(forward_batch: ForwardBatch) -> None:
    """Raises ValueError: the step verifies drafts."""
    if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
        raise ValueError(
            "drafts are not verified in layers with a sliding window, because a rejected draft "
            "would have overwritten a token in a ring: remove --speculative-algorithm"
        )


def ring_buffers(
    layer: AttentionLayer, forward_batch: ForwardBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rings of a layer, `[slots, num_kv_heads, window, head_dim]` each, `k` and `v`, which are
    one ring if keys are values. Waits for a load that fills them.

    Raises:
        ValueError: The step verifies drafts.
    """
    refuse_drafts(forward_batch)
    assert forward_batch.pools is not None, "the runner sets it before the model runs"
    pool = forward_batch.pools[PoolName.SWA]
    assert isinstance(pool, StatePool)
    place = pool.wait_for_layer(layer.layer_id)
    return pool.buffers[0][place], pool.buffers[-1][place]


class _Rings(NamedTuple):
    """The rings of one layer, `[size + 1, window, num_kv_heads, head_dim]`: views with any
    strides."""

    k: torch.Tensor
    v: torch.Tensor

    def read(self, slots: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[n, num_kv_heads, head_dim]` of `rows` of `slots`, int64 `[n]` each."""
        return self.k[slots, rows], self.v[slots, rows]

    def write(
        self, slots: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store keys and values `[n, num_kv_heads, head_dim]` as `rows` of `slots`."""
        self.k.index_put_((slots, rows), k.to(self.k.dtype))
        self.v.index_put_((slots, rows), v.to(self.v.dtype))

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy the rings of slots `src` to slots `dst`, int64 `[n]` each."""
        for ring in self:
            ring.index_copy_(0, dst, ring.index_select(0, src))


class _Rows(NamedTuple):
    """Rows of rings, one for each of n tokens; int64 `[n]` each, on the device."""

    tokens: torch.Tensor
    """Tokens of the step that the rows are for. For rows that are read: positions of the tokens."""
    requests: torch.Tensor
    """Index in the batch of each token's request."""
    rows: torch.Tensor


class _Block(NamedTuple):
    """Consecutive new tokens of one request, and the keys that they see."""

    begin: int
    """New tokens `[begin, end)`, counted from the request's first."""
    end: int
    first_key: int
    """Keys `[first_key, last_key)`, counted from the first that is read from the ring."""
    last_key: int
    mask: torch.Tensor
    """Added to the scores, `[end - begin, last_key - first_key]`."""


@dataclass(frozen=True, slots=True)
class _ExtendPlan:
    """Plan of a prefill, which all layers share."""

    past: _Rows
    """Rows with the tokens before the new ones, up to `window - 1` for each request."""
    past_lens: list[int]
    """Number of these tokens of each request."""
    blocks: list[list[_Block]]
    """The blocks of each request."""
    before: _Rows
    """The new tokens up to each request's snapshot, or all if it has none; at most the last
    `window` of them."""
    after: _Rows
    """Likewise the tokens after the snapshots."""
    tracked: torch.Tensor
    """int64 `[num_tracked]`: requests with snapshots."""


class WindowTorchBackend(AttentionBackend):
    """Sliding-window attention in plain torch, for any device.

    It stores keys and values by itself, into the rings: those of a prefill after its tokens have
    read what they overwrite.
    """

    def __init__(self, config: AttentionConfig) -> None:
        self._dtype = config.dtype
        _, self._window, _ = config.specs[PoolName.SWA].buffers[0].shape
        self._plan: _ExtendPlan | None = None
        self._decode_mask: torch.Tensor | None = None
        """Added to the scores of a decode step, `[bs, 1, 1, rows of the rings]`."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_extend():
            # All rows of a full ring are seen; before that, rows up to the token's own.
            positions = forward_batch.positions[:, None, None, None]
            width = min(self._window, forward_batch.longest_context)
            is_future = torch.arange(width, device=positions.device) > positions
            mask = torch.zeros(is_future.shape, dtype=self._dtype, device=positions.device)
            self._decode_mask = mask.masked_fill_(is_future, -torch.inf)
            return
        states = forward_batch.states
        assert states is not None, "the maker of the batch gave it states"
        segments = forward_batch.segments()
        lens = states.track_lens_cpu or [0] * len(segments)
        self._plan = self._plan_extend(segments, lens, forward_batch.input_ids.device)

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend, and store K and V in the rings, which only this backend knows."""
        stores, has_index = inputs.save_kv_cache, inputs.index_query is not None
        assert stores and not has_index, f"{layer.kind} attention stores by itself"
        rings, states = self._rings_of(layer, forward_batch)
        if forward_batch.forward_mode.is_decode():
            rings.write(states.slots, forward_batch.positions % self._window, inputs.k, inputs.v)
            return self.forward_decode(inputs.q, layer, forward_batch)
        out = self.forward_extend(inputs, layer, forward_batch)
        self._store(inputs.k, inputs.v, rings, states)
        return out

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        plan = self._plan
        assert plan is not None
        rings, states = self._rings_of(layer, forward_batch)
        slots = states.read_slots.index_select(0, plan.past.requests)
        past_k, past_v = rings.read(slots, plan.past.rows)
        sinks = None if layer.sinks is None else layer.sinks.unsqueeze(1)
        outs, past_begin = [], 0
        for segment, past_len, blocks in zip(
            forward_batch.segments(), plan.past_lens, plan.blocks, strict=True
        ):
            past = slice(past_begin, past_begin + past_len)
            new = slice(segment.begin, segment.end)
            keys = heads_first(torch.cat([past_k[past].to(k.dtype), k[new]]))
            values = heads_first(torch.cat([past_v[past].to(v.dtype), v[new]]))
            past_begin += past_len
            if inputs.rows is not None:
                # The last token sees the last keys, up to `window` of them.
                seen = slice(max(0, keys.shape[2] - self._window), None)
                last = heads_first(q[segment.end - 1 : segment.end])
                part = attend(last, keys[:, :, seen], values[:, :, seen], scale=layer.scaling)
                outs.append(with_sinks(part, sinks).out[0].transpose(0, 1))
                continue
            for block in blocks:
                seen = slice(block.first_key, block.last_key)
                part = attend(
                    heads_first(q[new][block.begin : block.end]),
                    keys[:, :, seen],
                    values[:, :, seen],
                    scale=layer.scaling,
                    mask=block.mask,
                )
                outs.append(with_sinks(part, sinks).out[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        rings, states = self._rings_of(layer, forward_batch)
        mask = self._decode_mask
        assert mask is not None
        k, v = (
            ring[:, : mask.shape[-1]].index_select(0, states.slots).transpose(1, 2)
            for ring in rings
        )
        grouped = q.reshape(q.shape[0], layer.num_kv_heads, -1, layer.head_dim)
        part = attend(
            grouped,
            k.to(q.dtype),
            v.to(q.dtype),
            scale=layer.scaling,
            mask=mask,
        )
        sinks = None if layer.sinks is None else layer.sinks.view(layer.num_kv_heads, -1)
        return with_sinks(part, sinks).out.reshape(q.shape[0], -1)

    def _rings_of(
        self, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> tuple[_Rings, StateBatch]:
        """The layer's rings, and the step's slots of them."""
        assert forward_batch.states is not None, "the maker of the batch gave it states"
        k, v = (buffer.transpose(1, 2) for buffer in ring_buffers(layer, forward_batch))
        return _Rings(k, v), forward_batch.states

    def _store(self, k: torch.Tensor, v: torch.Tensor, rings: _Rings, states: StateBatch) -> None:
        """Store the keys and values of a prefill, and take its snapshots on the way."""
        plan = self._plan
        assert plan is not None
        if states.first_slots is not None:
            rings.copy(states.first_slots, states.slots)
        self._write(k, v, rings, states, plan.before)
        if states.track_slots is not None:
            src, dst = (
                slots.index_select(0, plan.tracked) for slots in (states.slots, states.track_slots)
            )
            rings.copy(src, dst)
        self._write(k, v, rings, states, plan.after)

    @staticmethod
    def _write(
        k: torch.Tensor, v: torch.Tensor, rings: _Rings, states: StateBatch, some: _Rows
    ) -> None:
        slots = states.slots.index_select(0, some.requests)
        new_k, new_v = (x.index_select(0, some.tokens) for x in (k, v))
        rings.write(slots, some.rows, new_k, new_v)

    def _plan_extend(
        self, segments: list[Segment], track_lens: list[int], device: torch.device
    ) -> _ExtendPlan:
        window = self._window
        past_lens = [min(segment.prefix, window - 1) for segment in segments]
        spans = list(zip(segments, past_lens, track_lens, strict=True))
        # Each: request, first token, number of tokens, position of the first.
        past = [
            (i, one.prefix - length, length, one.prefix - length)
            for i, (one, length, _) in enumerate(spans)
        ]
        before = [
            (i, one.begin, track or one.new, one.prefix) for i, (one, _, track) in enumerate(spans)
        ]
        after = [
            (i, one.begin + track, one.new - track, one.prefix + track)
            for i, (one, _, track) in enumerate(spans)
            if track
        ]
        tracked = np.asarray([i for i, track in enumerate(track_lens) if track], dtype=np.int64)
        columns = [*self._rows(past), *self._rows(before), *self._rows(after), tracked]
        ids = upload(columns, device)
        masks: dict[tuple[int, int, int], torch.Tensor] = {}
        return _ExtendPlan(
            past=_Rows(*ids[:3]),
            past_lens=past_lens,
            blocks=[self._blocks(one.new, length, device, masks) for one, length, _ in spans],
            before=_Rows(*ids[3:6]),
            after=_Rows(*ids[6:9]),
            tracked=ids[9],
        )

    def _rows(self, spans: list[tuple[int, int, int, int]]) -> list[np.ndarray]:
        """The columns of `_Rows` for runs of tokens, each cut to its last `window` tokens."""
        columns: list[list[np.ndarray]] = [[np.empty(0, dtype=np.int64)] for _ in range(3)]
        for request, token, count, position in spans:
            kept = np.arange(max(0, count - self._window), count)
            columns[0].append(token + kept)
            columns[1].append(np.full(len(kept), request, dtype=np.int64))
            columns[2].append((position + kept) % self._window)
        return [np.concatenate(column) for column in columns]

    def _blocks(
        self,
        num_new: int,
        past: int,
        device: torch.device,
        masks: dict[tuple[int, int, int], torch.Tensor],
    ) -> list[_Block]:
        """The blocks of a request with `past` keys before its new tokens.

        Args:
            masks: The masks made so far, by rows, keys and the first row's own key; most blocks of
                a batch share one.
        """
        blocks = []
        for begin in range(0, num_new, BLOCK):
            end = min(begin + BLOCK, num_new)
            first_key = max(0, past + begin - self._window + 1)
            shape = end - begin, past + end - first_key, past + begin - first_key
            if shape not in masks:
                masks[shape] = self._mask(*shape, device)
            blocks.append(_Block(begin, end, first_key, past + end, masks[shape]))
        return blocks

    def _mask(self, rows: int, keys: int, own_key: int, device: torch.device) -> torch.Tensor:
        """`[rows, keys]`, added to the scores. The token of the first row is key `own_key`."""
        age = torch.arange(own_key, own_key + rows, device=device).unsqueeze(1) - torch.arange(
            keys, device=device
        )
        mask = torch.zeros((rows, keys), dtype=self._dtype, device=device)
        return mask.masked_fill_((age < 0) | (age >= self._window), -torch.inf)
