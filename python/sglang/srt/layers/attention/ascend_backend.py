"""Attention on Ascend NPUs by `torch_npu.npu_fused_infer_attention_score`, within its documented
limits. It has not run on hardware.

    keys and values in pages     queries of one token; pages of a multiple of 16 tokens, 512 at most
    keys and values in one piece queries of any number of tokens

Both in float16 or bfloat16. Decoding reads the pool's pages in place. For prefills the operator
takes only pages of 128 tokens, so each request's context is gathered once per layer and attended to
by itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang.srt.hardware_backend.npu.runtime import load_torch_npu
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    Segment,
)

_PAGE_TOKENS: Final = range(16, 513, 16)
"""Pages that the operator reads."""
_HEAD_DIMS: Final = range(16, 513, 16)
_MAX_GROUP: Final = 64
"""Most query heads of a KV head."""
_MAX_TOKEN_ELEMENTS: Final = 65534
"""Most elements of all query heads of a token."""
_DTYPES: Final = (torch.float16, torch.bfloat16)

_LAYOUT: Final = "BSND"
_MASK_SIZE: Final = 2048
_CAUSAL: Final = 3
"""`sparse_mode`: the last query sees all keys; each earlier query sees one key less."""
_MAX_ELEMENTS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """Requests that one call of the operator decodes: `[begin, end)` of the batch."""

    begin: int
    end: int
    block_table: torch.Tensor
    """int32 `[end - begin, pages]`: pages of each context; entries past its end are unused."""
    seq_lens: list[int]
    """Tokens of each context. Together they have at most as many pages as the pool."""


class AscendAttnBackend(AttentionBackend):
    """Calls the operator once for a decode step, and once for each request of a prefill."""

    def __init__(self, config: AttentionConfig) -> None:
        """Raises ValueError if the operator does not support the model or is not installed."""
        check_ascend(config)
        self._page_size = config.page_size
        library = load_torch_npu("--attention-backend ascend")
        self._operator: Any = library.npu_fused_infer_attention_score
        self._heads = {"num_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
        ones = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=config.device)
        self._causal_mask = ones.triu(1)
        """The mask that the operator expects instead of the batch's own; True hides a key."""
        self._decode_calls: list[_DecodeCall] = []
        self._prefills: list[tuple[Segment, torch.Tensor]] = []
        """Requests, with the slots of the whole context: int64 `[context]`."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode():
            self._decode_calls = self._plan_decode(forward_batch)
        else:
            table = forward_batch.req_to_token_pool.req_to_token
            self._prefills = [
                (one, table[one.row, : one.prefix + one.new].long())
                for one in forward_batch.segments()
            ]

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        pool_k, pool_v = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        outs = []
        for one, slots in self._prefills:
            own = inputs.q[one.begin if inputs.rows is None else one.end - 1 : one.end].contiguous()
            # A single query sees all keys, and the operator takes no mask for it.
            causal = {"atten_mask": self._causal_mask, "sparse_mode": _CAUSAL}
            out = self._call(
                own.unsqueeze(0),
                pool_k.index_select(0, slots).unsqueeze(0),
                pool_v.index_select(0, slots).unsqueeze(0),
                scale=layer.scaling,
                **(causal if len(own) > 1 else {}),
            )
            outs.append(out.squeeze(0))
        return torch.cat(outs).flatten(1)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        k, v = (
            buffer.view(-1, self._page_size, buffer.shape[1] * buffer.shape[2])
            for buffer in forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        assert k.numel() <= _MAX_ELEMENTS, f"a layer's {k.numel()} elements exceed int32"
        q = q.contiguous().unsqueeze(1)
        outs = [
            self._call(
                q[call.begin : call.end],
                k,
                v,
                block_table=call.block_table,
                actual_seq_lengths_kv=call.seq_lens,
                block_size=self._page_size,
                scale=layer.scaling,
            )
            for call in self._decode_calls
        ]
        return torch.cat(outs).flatten(1)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        out, _ = self._operator(q, k, v, input_layout=_LAYOUT, **settings, **self._heads)
        assert isinstance(out, torch.Tensor)
        return out

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


def check_ascend(config: AttentionConfig) -> None:
    """Raise ValueError, which names the flag to change, if the operator does not support the
    model."""
    name, remedy = "attention backend 'ascend'", "use torch_native"
    if config.dtype not in _DTYPES or config.kv_dtype != config.dtype:
        raise ValueError(
            f"{name} takes --dtype bfloat16 or float16 and --kv-cache-dtype auto, not "
            f"{config.dtype} with keys and values in {config.kv_dtype}: {remedy}"
        )
    if config.page_size not in _PAGE_TOKENS:
        raise ValueError(
            f"{name} takes a --page-size of a multiple of 16 up to 512, not {config.page_size}; "
            "128 is what its documentation recommends"
        )
    fits = (
        config.head_dim in _HEAD_DIMS
        and config.group <= _MAX_GROUP
        and config.num_heads * config.head_dim <= _MAX_TOKEN_ELEMENTS
    )
    if not fits:
        raise ValueError(
            f"{name} does not take {config.num_heads} heads of {config.head_dim} elements over "
            f"{config.num_kv_heads} KV heads: {remedy}"
        )
