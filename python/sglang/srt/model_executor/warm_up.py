"""What a GPU does once for each kind of prefill, done before the first request waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    compute_extend_positions,
)

NEW_TOKENS = (1, 4, 8, 16, 32, 64)
PREFIX_TOKENS = 4096


def warm_up_batches(
    req_to_token_pool: ReqToTokenPool, token_to_kv_pool: KVCache
) -> Iterator[ForwardBatch]:
    """Extend steps that between them use every kernel of short prefills.

    They read and write the padding page alone. The table must be new: its rows are all zeros.
    """
    device = req_to_token_pool.device
    longest = req_to_token_pool.max_context_len - max(NEW_TOKENS)
    for prefix in sorted({0, min(PREFIX_TOKENS, max(0, longest))}):
        for new in NEW_TOKENS:
            if prefix + new > req_to_token_pool.max_context_len:
                continue
            zeros = torch.zeros(new, dtype=torch.int64, device=device)
            yield ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                input_ids=zeros,
                positions=compute_extend_positions([prefix], [new], device),
                req_pool_indices=zeros[:1],
                req_pool_indices_cpu=[0],
                seq_lens=torch.tensor([prefix + new], device=device),
                seq_lens_cpu=[prefix + new],
                out_cache_loc=zeros,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool=token_to_kv_pool,
                extend_prefix_lens_cpu=[prefix],
                extend_seq_lens_cpu=[new],
            )
