"""Warm-up of prefills: does a GPU's one-time work before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    StateBatch,
    compute_extend_positions,
)
from sglang.srt.layers.linear_attention.extend_plan import CHUNK, SHORT
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool

Forward: TypeAlias = Callable[[ForwardBatch], LogitsProcessorOutput]

NEW_TOKENS = (1, 4, 8, 16, 32, 64)
BETWEEN = tuple(1 << power for power in range(7, 14))
"""Further new tokens, since the kernels of experts depend on the tokens of an expert."""
IN_CHUNKS = SHORT + CHUNK
"""New tokens for models with recurrent states, just too many for the kernels of short prefills."""
PREFIX_TOKENS = 4096
UNEVEN_TOKENS = 96
"""Tokens added to a prefix of one pass, because prefixes of uneven length use other kernels."""


def warm_up_batches(
    req_to_token_pool: ReqToTokenPool, token_to_kv_pool: KVCache, longest_pass: int
) -> Iterator[ForwardBatch]:
    """Extend steps that together use every kernel of prefills, and as much memory as the longest
    pass.

    They read and write only the padding page. The table must be new, with rows of zeros.

    Args:
        longest_pass: Most new tokens of one pass.
    """
    context = req_to_token_pool.max_context_len
    row = torch.zeros(1, dtype=torch.int64, device=req_to_token_pool.device)
    has_states = StateBatch.running(req_to_token_pool, row) is not None
    for prefix, new in warm_up_lengths(context, longest_pass, has_states):
        states = StateBatch.running(req_to_token_pool, row)
        if states is not None and new > SHORT:
            # Like after a cache hit: with a snapshot, and tokens after it.
            states.track_slots, states.track_lens_cpu = row, [(new - 1) // CHUNK * CHUNK]
        zeros = torch.zeros(new, dtype=torch.int64, device=req_to_token_pool.device)
        yield ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=zeros,
            positions=compute_extend_positions([prefix], [new], req_to_token_pool.device),
            req_pool_indices=zeros[:1],
            req_pool_indices_cpu=[0],
            seq_lens=torch.tensor([prefix + new], device=req_to_token_pool.device),
            seq_lens_cpu=[prefix + new],
            out_cache_loc=zeros,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool=token_to_kv_pool,
            states=states,
            extend_prefix_lens_cpu=[prefix],
            extend_seq_lens_cpu=[new],
        )


def choose_greedily(forward: Forward, batch: ForwardBatch) -> torch.Tensor:
    """Run a step and choose its next tokens, int64 `[requests]`: several ranks have kernels for
    that too."""
    return forward(batch).logits.argmax()


def warm_up_lengths(
    context: int, longest_pass: int, has_states: bool = False
) -> list[tuple[int, int]]:
    """Lengths of prefix and new tokens of each step that fits into `context` tokens."""
    short = min(PREFIX_TOKENS, max(0, context - max(NEW_TOKENS)))
    new_long = min(longest_pass, context)
    prefixes = (0, min(longest_pass + UNEVEN_TOKENS, context - new_long))
    lengths = {(prefix, new) for prefix in (0, short) for new in NEW_TOKENS}
    lengths |= {(prefix, new_long) for prefix in prefixes}
    lengths |= {(0, new) for new in BETWEEN if new < new_long}
    if has_states:
        lengths |= {(prefix, IN_CHUNKS) for prefix in (0, min(short, context - IN_CHUNKS))}
    return sorted((prefix, new) for prefix, new in lengths if new and 0 <= prefix <= context - new)
