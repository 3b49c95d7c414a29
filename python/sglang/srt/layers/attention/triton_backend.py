"""Attention on CUDA: Triton kernels over the paged pool, and cuDNN for long runs of new tokens.

Attention reads keys and values from the pool, even those of the same step. A warm cache therefore
gives the same tokens as a cold one, for any dtype of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.dense_attention import (
    UNIT,
    DensePlan,
    dense_attention,
    plan_dense,
)
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight
from sglang.srt.layers.triton_ops.attention.decode_attention import (
    NewTokens,
    decode_attention,
    make_arrivals,
)
from sglang.srt.layers.triton_ops.attention.extend_attention import (
    ExtendWork,
    extend_attention,
    most_splits,
    plan_any_blocks,
    plan_blocks,
    put_blocks,
)
from sglang.srt.layers.triton_ops.attention.online_softmax import (
    add_sinks_,
    merge_into_,
    warm_up_joins,
)
from sglang.srt.layers.triton_ops.scaled.linear import empty_rows

DENSE_HEAD_DIM = 128
_MOST_JOINED = 2048
"""New tokens of a step, above which it has more blocks than the device has room for, so that no
context is split."""
WARM_UP_TOKENS = 8192
"""Most new tokens for which cuDNN's plans are made before the first request."""
WARM_UP_PIECES = tuple(UNIT << i for i in range(5))
"""Lengths of prefix pieces, in tokens, for which these plans are made."""


class _DenseSegment(NamedTuple):
    """New tokens of a request, rows `[begin, end)` of the batch, that cuDNN computes."""

    begin: int
    end: int
    plan: DensePlan
    slots: torch.Tensor
    """int64 `[prefix + end - begin]`: slots of their context."""


@dataclass(slots=True)
class _ExtendPlan:
    """One batch's work, shared by all layers."""

    dense: list[_DenseSegment] = field(default_factory=list)
    paged: ExtendWork | None = None


class TritonAttnBackend(AttentionBackend):
    """Attention by Triton and cuDNN. Decoding needs no plan: see `decode_attention`."""

    can_be_captured = True
    captures_extend = True
    captures_verify = True
    rotates_in_decoding = True

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._can_be_dense = (
            config.dtype.itemsize == 2
            and config.head_dim % 8 == 0
            and config.head_dim <= DENSE_HEAD_DIM
        )
        self._plan = _ExtendPlan()
        self._captured: dict[tuple[int, int], ExtendWork] = {}
        """Work of captured prefills, by number of tokens."""
        self._arrivals = make_arrivals(config.device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode is not ForwardMode.EXTEND:
            return
        table = forward_batch.req_to_token_pool.req_to_token
        plan = _ExtendPlan()
        paged: list[tuple[int, int, int, int]] = []
        for row, begin, prefix, count in forward_batch.segments():
            dense = plan_dense(prefix, count if self._can_be_dense else 0)
            if dense.count:
                slots = table[row, : prefix + dense.count].to(torch.int64)
                plan.dense.append(_DenseSegment(begin, begin + dense.count, dense, slots))
            if dense.count < count:
                rest = (row, begin + dense.count, prefix + dense.count, count - dense.count)
                paged.append(rest)
        if paged:
            plan.paged = plan_blocks(
                paged,
                group=self._config.group,
                num_kv_heads=self._config.num_kv_heads,
                head_dim=self._config.head_dim,
                device=table.device,
            )
        self._plan = plan

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        config, size = self._config, (num_tokens, num_requests)
        work = self._captured.get(size)
        if work is None:
            work = self._captured[size] = plan_any_blocks(
                num_tokens,
                num_requests,
                group=config.group,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                device=config.device,
            )
        put_blocks(work, forward_batch.segments(), config.group)
        self._plan = _ExtendPlan(paged=work)

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        if inputs.rotation is None:
            return super().forward(inputs, layer, forward_batch)
        assert inputs.save_kv_cache, "keys that are stored are rotated"
        new = NewTokens(inputs.k, inputs.v, forward_batch.out_cache_loc, *inputs.rotation)
        return self._decode(inputs.q, None, layer, forward_batch, new=new)

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, v, rows = inputs.q, inputs.k, inputs.v, inputs.rows
        if rows is not None:  # a request's last token sees all of its context, as in decoding
            return self.forward_decode(q.index_select(0, rows), layer, forward_batch)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            return self._decode(q, None, layer, forward_batch)
        plan = self._plan
        pool = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if plan.paged is None and len(plan.dense) == 1:
            return _attend_densely(q, (k, v), pool, layer, plan.dense[0]).flatten(1)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if plan.paged is not None:  # first, because it writes garbage to rows of dense segments
            table = forward_batch.req_to_token_pool.req_to_token
            extend_attention(q, *pool, table, plan.paged, layer.scaling, out, sinks=layer.sinks)
        for segment in plan.dense:
            own = slice(segment.begin, segment.end)
            got = _attend_densely(q[own], (k[own], v[own]), pool, layer, segment)
            out[own] = got.flatten(1)
        return out

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self._decode(q, None, layer, forward_batch)

    def forward_decode_rounded(
        self,
        q: torch.Tensor,
        weight: ScaledWeight,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> RoundedRows | None:
        # A head is a group.
        rounded = empty_rows(len(q), weight, q.dtype) if weight.group == layer.head_dim else None
        if rounded is not None:
            forward_batch.begin_layer(layer.layer_id)
            self._decode(q, None, layer, forward_batch, rounded)
        return rounded

    def forward_decode_gated(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        return self._decode(q, gates, layer, forward_batch)

    def _decode(
        self,
        q: torch.Tensor,
        gates: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        rounded: RoundedRows | None = None,
        new: NewTokens | None = None,
    ) -> torch.Tensor:
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            rows, lens = forward_batch.contexts_of_tokens()
        return decode_attention(
            q,
            pool_k,
            pool_v,
            forward_batch.req_to_token_pool.req_to_token,
            rows,
            lens,
            layer.scaling,
            self._arrivals,
            written=forward_batch.most_new_tokens,
            gates=gates,
            sinks=layer.sinks,
            rounded=rounded,
            new=new,
        )

    def warm_up(self) -> None:
        """Let cuDNN make its plans for the usual lengths, which would cost a request a second. Run
        the kernels that join parts of contexts."""
        config = self._config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        joins = (
            (tokens, 1 << power)
            for tokens in range(1, _MOST_JOINED + 1)
            for power in range(
                most_splits(tokens, heads // kv_heads, kv_heads, head_dim).bit_length()
            )
        )
        out = torch.empty(0, dtype=config.dtype, device=config.device)
        warm_up_joins(joins, heads, head_dim, out)
        if not self._can_be_dense:
            return
        parts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        shape = (WARM_UP_TOKENS, sum(parts), config.head_dim)
        qkv = torch.zeros(shape, dtype=config.dtype, device=config.device)
        views = torch.split(qkv, parts, dim=1)
        # New tokens after a prefix are copied: see _attend_densely.
        copies = [part.contiguous() for part in views]
        prefix = copies[1].new_zeros((WARM_UP_PIECES[-1], *copies[1].shape[1:]))
        if config.has_sinks:
            lse = torch.zeros((heads, UNIT), device=config.device)
            add_sinks_(copies[0][:UNIT], lse, lse[:, 0].contiguous())
        for tokens in range(UNIT, WARM_UP_TOKENS + 1, UNIT):
            for q, k, v in (views, copies):
                dense_attention(q[:tokens], k[:tokens], v[:tokens], 1.0, causal=True)
            for piece in WARM_UP_PIECES:
                keys = prefix[:piece]
                dense_attention(copies[0][:tokens], keys, keys, 1.0, causal=False)


def _attend_densely(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    pool: tuple[torch.Tensor, torch.Tensor],
    layer: AttentionLayer,
    segment: _DenseSegment,
) -> torch.Tensor:
    """Attend from one request's new tokens to its whole context.

    Args:
        q: `[num_new, num_heads, head_dim]`.
        new: Keys and values of the new tokens, `[num_new, num_kv_heads, head_dim]` each.
        pool: The layer's keys and values, `[slots, num_kv_heads, head_dim]` each.

    Returns:
        Contiguous, of the shape of `q`.
    """
    plan, slots, scaling = segment.plan, segment.slots, layer.scaling
    k, v = new
    # cuDNN's plans depend on strides too: use either views of one tensor or copies for all.
    if plan.pad or pool[0].dtype != q.dtype:
        k, v = (_read(buffer, slots[plan.whole :], q.dtype) for buffer in pool)
        q = F.pad(q, (0, 0, 0, 0, plan.pad, 0))
    out, lse = dense_attention(q, k, v, scaling, causal=True)
    q = q.contiguous() if plan.pieces else q
    for begin, end in plan.pieces:
        piece_k, piece_v = (_read(buffer, slots[begin:end], q.dtype) for buffer in pool)
        # Prefix and new tokens are attended separately: cuDNN has no mask for both together.
        part = dense_attention(q, piece_k, piece_v, scaling, causal=False)
        lse = merge_into_(out, lse, *part)
    if layer.sinks is not None:
        add_sinks_(out, lse, layer.sinks)
    return out[plan.pad :]


def _read(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy `slots` (int64 `[n]`) out of the pool: `[n, num_kv_heads, head_dim]` of `dtype`."""
    if pool.dtype == dtype:
        return pool.index_select(0, slots)
    # Index operations are not implemented for fp8 everywhere, but they are for bytes.
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
