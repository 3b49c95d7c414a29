"""Attention on Ascend NPUs by their fused operator. It has not run on hardware.

Decoding reads the pool's pages in place. For prefills the operator takes only pages of 128 tokens,
so each request's context is gathered once per layer and attended to by itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from sglang.srt.hardware_backend.npu import fused_attention
from sglang.srt.hardware_backend.npu.fused_attention import FusedAttention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """Requests that one call of the operator decodes: `[begin, end)` of the batch."""

    begin: int
    end: int
    block_table: torch.Tensor
    """int32 `[end - begin, pages]`: pages of each context; entries past its end are unused."""
    seq_lens: list[int]
    """Tokens of each context."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request: its new tokens are `[begin, end)` of the step."""

    begin: int
    end: int
    slots: torch.Tensor
    """int64 `[context]`: slots of the whole context, new tokens included."""


class AscendAttnBackend(AttentionBackend):
    """Calls the operator once for a decode step, and once for each request of a prefill."""

    def __init__(self, config: AttentionConfig) -> None:
        """Raises ValueError if the operator does not support the model or is not installed."""
        check_ascend(config)
        self._page_size = config.page_size
        self._attention = FusedAttention(config.num_heads, config.num_kv_heads, config.device)
        self._decode_calls: list[_DecodeCall] = []
        self._prefills: list[_Prefill] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode():
            self._decode_calls = self._plan_decode(forward_batch)
        else:
            self._prefills = self._plan_prefills(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        last_only = rows is not None
        outs = [
            self._attention.attend_causally(
                q[one.end - 1 if last_only else one.begin : one.end].contiguous(),
                pool_k.index_select(0, one.slots),
                pool_v.index_select(0, one.slots),
                layer.scaling,
            )
            for one in self._prefills
        ]
        return torch.cat(outs).flatten(1)

    def forward_decode(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        k, v = (
            buffer.view(-1, self._page_size, buffer.shape[1] * buffer.shape[2])
            for buffer in forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        q = q.contiguous()
        outs = [
            self._attention.attend_pages(
                q[call.begin : call.end], (k, v), call.block_table, call.seq_lens, layer.scaling
            )
            for call in self._decode_calls
        ]
        return torch.cat(outs).flatten(1)

    def _plan_decode(self, batch: ForwardBatch) -> list[_DecodeCall]:
        """Split the batch into calls, usually one. The operator counts a shared page for each of
        its requests, and refuses more pages than the pool has; further calls take the rest."""
        size = self._page_size
        pool_pages = batch.token_to_kv_pool.size // size + 1
        pages = [-(-length // size) for length in batch.seq_lens_cpu]
        cuts, taken = [0], 0
        for index, count in enumerate(pages):
            if taken + count > pool_pages:
                cuts.append(index)
                taken = 0
            taken += count
        cuts.append(len(pages))
        slots = batch.req_to_token_pool.req_to_token
        calls = []
        for begin, end in itertools.pairwise(cuts):
            firsts = slots[:, : max(pages[begin:end]) * size : size]
            table = firsts.index_select(0, batch.req_pool_indices[begin:end]) // size
            calls.append(_DecodeCall(begin, end, table, batch.seq_lens_cpu[begin:end]))
        return calls

    def _plan_prefills(self, batch: ForwardBatch) -> list[_Prefill]:
        assert batch.extend_seq_lens_cpu is not None
        rows = batch.req_pool_indices_cpu or batch.req_pool_indices.tolist()
        slots = batch.req_to_token_pool.req_to_token
        plan, begin = [], 0
        lens = zip(rows, batch.seq_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        for row, length, num_new in lens:
            plan.append(_Prefill(begin, begin + num_new, slots[row, :length].long()))
            begin += num_new
        return plan


def check_ascend(config: AttentionConfig) -> None:
    """Raise ValueError, which names the flag to change, if the operator does not support the
    model."""
    name, remedy = "attention backend 'ascend'", "use torch_native"
    if config.dtype not in fused_attention.DTYPES or config.kv_dtype != config.dtype:
        raise ValueError(
            f"{name} takes --dtype bfloat16 or float16 and --kv-cache-dtype auto, not "
            f"{config.dtype} with keys and values in {config.kv_dtype}: {remedy}"
        )
    if config.page_size not in fused_attention.PAGE_TOKENS:
        raise ValueError(
            f"{name} takes a --page-size of a multiple of 16 up to 512, not {config.page_size}; "
            "128 is what its documentation recommends"
        )
    fits = (
        config.head_dim in fused_attention.HEAD_DIMS
        and config.group <= fused_attention.MAX_GROUP
        and config.num_heads * config.head_dim <= fused_attention.MAX_TOKEN_ELEMENTS
    )
    if not fits:
        raise ValueError(
            f"{name} does not take {config.num_heads} heads of {config.head_dim} elements over "
            f"{config.num_kv_heads} KV heads: {remedy}"
        )
