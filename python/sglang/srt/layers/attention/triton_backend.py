"""Attention on CUDA: Triton kernels over the paged pool, and cuDNN for long runs of new tokens.

What attention sees is what the pool stores, also of the tokens of the same step: a warm cache
gives the same words as a cold one, whatever the dtype of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.dense_attention import dense_attention
from sglang.srt.layers.attention.triton_ops.combine import merge_into_
from sglang.srt.layers.attention.triton_ops.decode import decode_attention
from sglang.srt.layers.attention.triton_ops.extend import (
    ExtendWork,
    extend_attention,
    plan_blocks,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DENSE_TOKENS = 1024
"""New tokens of one request from which on cuDNN pays."""
DENSE_HEAD_DIM = 128


class _DenseSegment(NamedTuple):
    """A request whose new tokens, rows `[begin, end)` of the batch, go through cuDNN."""

    begin: int
    end: int
    prefix_slots: torch.Tensor | None
    """int64 `[prefix]`."""
    new_slots: torch.Tensor
    """int64 `[end - begin]`."""


@dataclass(slots=True)
class _ExtendPlan:
    """One batch's work, shared by all layers."""

    dense: list[_DenseSegment] = field(default_factory=list)
    paged: ExtendWork | None = None


class TritonAttnBackend(AttentionBackend):
    """Holds the plan of the batch that is being run. Decoding needs none: see `decode_attention`.

    Args of the constructor:
        num_heads: Query heads of this rank; `num_kv_heads` likewise.
        head_dim: Elements of one head.
        dtype: Of the queries.
    """

    can_be_captured = True

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._can_be_dense = (
            dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= DENSE_HEAD_DIM
        )
        self._plan = _ExtendPlan()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_extend():
            return
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        extend_lens = forward_batch.extend_seq_lens_cpu
        assert prefix_lens is not None
        assert extend_lens is not None
        rows = forward_batch.req_pool_indices.tolist()
        table = forward_batch.req_to_token_pool.req_to_token
        plan = _ExtendPlan()
        paged: list[tuple[int, int, int, int]] = []
        begin = 0
        for row, prefix, count in zip(rows, prefix_lens, extend_lens, strict=True):
            end = begin + count
            if self._can_be_dense and count >= DENSE_TOKENS:
                slots = table[row, :prefix].to(torch.int64) if prefix else None
                new_slots = forward_batch.out_cache_loc[begin:end]
                plan.dense.append(_DenseSegment(begin, end, slots, new_slots))
            else:
                paged.append((row, begin, prefix, count))
            begin = end
        if paged:
            blocks, block_rows, splits = plan_blocks(
                paged, group=self._group, num_kv_heads=self._num_kv_heads
            )
            # Splits need memory for the whole batch; beside long requests nothing is to be won.
            plan.paged = ExtendWork(
                torch.tensor(blocks, dtype=torch.int32).to(table.device, non_blocking=True),
                block_rows,
                1 if plan.dense else splits,
            )
        self._plan = plan

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        plan = self._plan
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if plan.paged is None and len(plan.dense) == 1:
            return self._attend_densely(q, k, v, pool_k, pool_v, layer, plan.dense[0]).flatten(1)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if plan.paged is not None:
            table = forward_batch.req_to_token_pool.req_to_token
            extend_attention(q, pool_k, pool_v, table, plan.paged, layer.scaling, out)
        for segment in plan.dense:
            rows = slice(segment.begin, segment.end)
            got = self._attend_densely(q[rows], k[rows], v[rows], pool_k, pool_v, layer, segment)
            out[rows] = got.flatten(1)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return decode_attention(
            q,
            pool_k,
            pool_v,
            forward_batch.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            layer.scaling,
        )

    def _attend_densely(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool_k: torch.Tensor,
        pool_v: torch.Tensor,
        layer: RadixAttention,
        segment: _DenseSegment,
    ) -> torch.Tensor:
        if pool_k.dtype != q.dtype:
            k = _read(pool_k, segment.new_slots, q.dtype)
            v = _read(pool_v, segment.new_slots, q.dtype)
        out, lse = dense_attention(q, k, v, layer.scaling, causal=True)
        if segment.prefix_slots is not None:
            # One mask cannot say both, and two calls read nothing twice.
            prefix_k = _read(pool_k, segment.prefix_slots, q.dtype)
            prefix_v = _read(pool_v, segment.prefix_slots, q.dtype)
            before = dense_attention(q, prefix_k, prefix_v, layer.scaling, causal=False)
            merge_into_(out, lse, *before)
        return out


def _read(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy slots out of the pool: `[slots, num_kv_heads, head_dim]`."""
    if pool.dtype == dtype:
        return pool.index_select(0, slots)
    # Index operations on fp8 are not implemented everywhere; bytes are.
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
