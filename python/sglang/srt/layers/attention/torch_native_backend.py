"""Attention in plain torch: the default on CPUs.

Shapes: `q` is `[num_tokens, num_heads, head_dim]`, `k` and `v` `[num_tokens, num_kv_heads,
head_dim]`, `pool_k` and `pool_v` `[slots, num_kv_heads, head_dim]`.

Contexts with consecutive slots are read as views of the pool (see `slot_plan`). Query heads that
share a KV head are stacked as rows of one attention, so no key is repeated.

Measured for 2,000 new tokens after a prefix of 2,000 (6 query and 2 KV heads of 32, bf16, one
layer, 2 cores): prefix and causal part apart, joined by their log-sum-exp, 39 ms; a boolean
mask 55 ms (58 with building it); causal_lower_right 58 ms. 100 tokens after 6,000: 4.2, 5.3,
5.6 ms. Extend therefore uses no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.partial_attention import (
    Partial,
    attend,
    heads_first,
    merge_parts,
    merge_two,
    with_sinks,
)
from sglang.srt.layers.attention.slot_plan import (
    VIEW_BYTES,
    DecodePlan,
    ExtendSegment,
    Gather,
    Slots,
    plan_decode,
    plan_extend,
)
from sglang.srt.layers.forward_batch_info import AttentionInputs, AttentionLayer, ForwardBatch
from sglang.srt.mem_cache.device.state_spec import PoolName


class TorchNativeAttnBackend(AttentionBackend):
    """Attention over views of the pool, or over gathers if those are faster."""

    def __init__(self, config: AttentionConfig, *, view_bytes: int = VIEW_BYTES) -> None:
        self._config = config
        self._view_tokens = max(1, view_bytes // config.specs[PoolName.KV].layer_bytes)
        self._slots: Sequence[Slots] = ()
        """Slots of each context of the current batch."""
        self._device = torch.device(config.device)
        self._decode_plan: DecodePlan | None = None
        self._extend_plan: list[ExtendSegment] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        table = forward_batch.req_to_token_pool.req_to_token.cpu().numpy()
        rows = forward_batch.req_pool_indices.tolist()
        lens = forward_batch.seq_lens_cpu
        contexts = [table[row, :length] for row, length in zip(rows, lens, strict=True)]
        self._slots, self._device = contexts, forward_batch.input_ids.device
        if forward_batch.forward_mode.is_decode():
            self._decode_plan = self._plan_decode(contexts)
            return
        extend_lens = forward_batch.extend_seq_lens_cpu
        assert extend_lens is not None
        self._extend_plan = plan_extend(
            [slots[:-new] for slots, new in zip(contexts, extend_lens, strict=True)],
            extend_lens,
            page_size=self._config.page_size,
            device=self._device,
        )

    def _plan_decode(self, contexts: Sequence[Slots]) -> DecodePlan:
        return plan_decode(
            contexts,
            page_size=self._config.page_size,
            view_tokens=self._view_tokens,
            dtype=self._config.dtype,
            device=self._device,
        )

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        # A request's last token sees its whole context: no mask.
        last_only = inputs.rows is not None
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        outs = []
        for segment in self._extend_plan:
            own = slice(segment.begin, segment.end)
            queries = q[segment.end - 1 if last_only else segment.begin : segment.end]
            # Later steps read these rows in the pool's dtype. Rounding to it here too makes logits
            # independent of how a prompt is cut.
            keys, values = (
                heads_first(x[own].to(pool.dtype).to(x.dtype))
                for x, pool in ((k, pool_k), (v, pool_v))
            )
            new = attend(
                heads_first(queries), keys, values, scale=layer.scaling, causal=not last_only
            )
            new = with_sinks(new, None if layer.sinks is None else layer.sinks.unsqueeze(1))
            out = new.out
            prefix = _attend_prefix(queries, (pool_k, pool_v), segment, layer)
            if prefix is not None:
                out = merge_two(prefix, new)
            outs.append(out[0].transpose(0, 1).reshape(len(queries), -1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert self._decode_plan is not None
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        grouped = q.reshape(q.shape[0], layer.num_kv_heads, -1, layer.head_dim)
        out = decode_by_plan(
            self._decode_plan,
            grouped,
            pool_k,
            pool_v,
            scale=layer.scaling,
            sinks=None if layer.sinks is None else layer.sinks.view(layer.num_kv_heads, -1),
        )
        return out.reshape(q.shape[0], -1)


def decode_by_plan(
    plan: DecodePlan,
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    *,
    scale: float,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one token of each request to its whole context.

    Args:
        plan: The batch's plan.
        q: `[bs, num_kv_heads, heads of a group, head_dim]`.
        pool_k: `[slots, num_kv_heads, head_dim]`; `pool_v` likewise, or the same tensor, which is
            then gathered once.
        scale: Factor of the scores.
        read: Makes values of the queries' dtype from slots of the pool; None: a conversion.
        sinks: `RadixAttention.sinks` as `[num_kv_heads, heads of a group]`.

    Returns:
        `[bs, num_kv_heads, heads of a group, head_dim]`.
    """
    if read is None:
        read = partial(torch.Tensor.to, dtype=q.dtype)
    parts = []
    for row, slot, length in plan.views:
        k_view = heads_first(read(pool_k.narrow(0, slot, length)))
        v_view = k_view
        if pool_v is not pool_k:
            v_view = heads_first(read(pool_v.narrow(0, slot, length)))
        parts.append(attend(q[row : row + 1], k_view, v_view, scale=scale))
    parts += [_attend_gathered(q, pool_k, pool_v, part, scale, read) for part in plan.gathers]
    out = parts[0].out if len(parts) == 1 else torch.cat([part.out for part in parts])
    if plan.order is None or sinks is not None:
        whole = Partial(out, torch.cat([part.lse for part in parts]))
        if plan.order is None:
            whole = merge_parts(whole, plan.owners, q.shape[0])
        elif not plan.in_order:
            whole = Partial(*(x.index_select(0, plan.order) for x in whole))
        return with_sinks(whole, sinks).out
    return out if plan.in_order else out.index_select(0, plan.order)


def _attend_prefix(
    q: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    segment: ExtendSegment,
    layer: AttentionLayer,
) -> Partial | None:
    """Attend from `[num_new, num_heads, head_dim]` queries to their prefix; None: no prefix.

    Every new token sees the whole prefix, so the query heads of a KV head are rows of one matrix.

    Returns:
        `out` `[1, num_heads, num_new, head_dim]`.
    """
    run, slots = segment.prefix_run, segment.prefix_slots
    if run is not None:
        k, v = (buffer.narrow(0, run.slot, run.end) for buffer in pool)
    elif slots is not None:
        k, v = (buffer.index_select(0, slots) for buffer in pool)
    else:
        return None
    num_new = q.shape[0]
    rows = heads_first(q).reshape(1, layer.num_kv_heads, -1, layer.head_dim)
    keys, values = (heads_first(x).to(q.dtype) for x in (k, v))
    part = attend(rows, keys, values, scale=layer.scaling)
    return Partial(
        part.out.reshape(1, layer.num_heads, num_new, layer.head_dim),
        part.lse.reshape(1, layer.num_heads, num_new),
    )


def _attend_gathered(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    part: Gather,
    scale: float,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> Partial:
    """Attend from one token of each row in `part` to the slots gathered for it.

    Args:
        q: `[bs, num_kv_heads, heads of a group, head_dim]`.

    Returns:
        `out` `[len(part.rows), num_kv_heads, heads of a group, head_dim]`.
    """
    k = _by_row(read(pool_k.index_select(0, part.slots)), part)
    v = k
    if pool_v is not pool_k:
        v = _by_row(read(pool_v.index_select(0, part.slots)), part)
    if part.row_index is not None:
        q = q.index_select(0, part.row_index)
    return attend(q, k, v, scale=scale, mask=part.mask)


def _by_row(gathered: torch.Tensor, part: Gather) -> torch.Tensor:
    """View `[len(part.slots), heads, head_dim]` as `[len(part.rows), heads, width, head_dim]`."""
    return gathered.view(len(part.rows), part.width, *gathered.shape[1:]).transpose(1, 2)
