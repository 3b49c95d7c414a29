"""Warm-up of prefills: does a GPU's one-time work before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from sglang.srt.constrained.grammar import allocate_bitmask, apply_bitmask
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    StateBatch,
    compute_extend_positions,
)
from sglang.srt.layers.linear_attention.extend_plan import CHUNK, SHORT
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.models.causal_lm import CausalLM

NEW_TOKENS = (1, 4, 8, 16, 32, 64)
BETWEEN = tuple(size << power for power in range(7) for size in (128, 192))
"""Further new tokens, since the kernels of experts depend on the tokens of an expert."""
IN_CHUNKS = SHORT + CHUNK
"""New tokens for models with recurrent states, just too many for the kernels of short prefills."""
REQUESTS = (2, 4, 8, 16, 32, 64, 128)
"""Requests of one token each in a step. In the last layer, rows are requests, or the tokens whose
logprobs are wanted."""
PREFIX_TOKENS = 4096
UNEVEN_TOKENS = 96
"""Tokens added to a prefix of one pass, because prefixes of uneven length use other kernels."""


class Runner(Protocol):
    """The part of a `ModelRunner` that runs steps."""

    model: CausalLM

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput: ...

    def store_drafts(self, batch: ForwardBatch, hidden: torch.Tensor) -> None: ...


def warm_up_batches(
    req_to_token_pool: ReqToTokenPool, token_to_kv_pool: KVCache, longest_pass: int
) -> Iterator[ForwardBatch]:
    """Extend steps that together use every kernel of prefills, and as much memory as the longest
    pass.

    They read and write only the padding page. The table must be new, with rows of zeros.

    Args:
        longest_pass: Most new tokens of one pass.
    """
    pool, device = req_to_token_pool, req_to_token_pool.device
    has_states = StateBatch.running(pool, torch.zeros(1, dtype=torch.int64, device=device))
    lengths = warm_up_lengths(pool.max_context_len, longest_pass, has_states is not None)
    steps = [([prefix], [new]) for prefix, new in lengths]
    for prefix in sorted({0, _short_prefix(pool.max_context_len)}):
        steps += [([prefix] * count, [1] * count) for count in REQUESTS]
    for prefixes, news in steps:
        count, new = len(news), sum(news)
        zeros = torch.zeros(new, dtype=torch.int64, device=device)
        rows = zeros[:count]
        states = StateBatch.running(pool, rows)
        if states is not None and count == 1 and new > CHUNK:
            # Like after a cache hit: with a snapshot, and tokens after it.
            track = (new - 1) // CHUNK * CHUNK
            if token_to_kv_pool.page_size > CHUNK:
                # Groups of tokens end where pages do.
                page = token_to_kv_pool.page_size
                track = max(0, (prefixes[0] + new - 1) // page * page - prefixes[0])
            states.track_slots, states.track_lens_cpu = rows, [track]
        totals = [prefix + own for prefix, own in zip(prefixes, news, strict=True)]
        yield ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=zeros,
            positions=compute_extend_positions(prefixes, news, device),
            req_pool_indices=rows,
            req_pool_indices_cpu=[0] * count,
            seq_lens=torch.tensor(totals, device=device),
            seq_lens_cpu=totals,
            out_cache_loc=zeros,
            req_to_token_pool=pool,
            token_to_kv_pool=token_to_kv_pool,
            states=states,
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=news,
        )


def run_step(runner: Runner, batch: ForwardBatch) -> None:
    """Run a step, and choose the most likely next tokens. A draft layer stores the step too.

    Without a draft layer, the step runs once more with all tokens in the last layer: logprobs of a
    prompt need them.
    """
    layer = runner.model.draft_layer
    for captures in (False, True) if layer is None else (True,):
        batch.capture_hidden = captures
        output = runner.forward(batch)
        output.logits.argmax()
    if layer is not None:
        assert output.hidden_states is not None, "the step captured them"
        runner.store_drafts(batch, output.hidden_states)


def warm_up_masks(vocab_size: int, device: torch.device | str) -> None:
    """Run the kernels that keep tokens within grammars, for one row and for several."""
    for rows in (1, 2, 16):
        logits = torch.zeros((rows, vocab_size), device=device)
        apply_bitmask(logits, allocate_bitmask(rows, vocab_size), range(rows))


def warm_up_lengths(
    context: int, longest_pass: int, has_states: bool = False
) -> list[tuple[int, int]]:
    """Lengths of prefix and new tokens of each step that fits into `context` tokens."""
    short = _short_prefix(context)
    new_long = min(longest_pass, context)
    uneven = min(longest_pass + UNEVEN_TOKENS, context - new_long)
    lengths = {(prefix, new) for prefix in (0, short) for new in NEW_TOKENS}
    # A cached token that is computed again may be one more than the longest pass.
    lengths |= {(0, new_long), (uneven, min(new_long + 1, context - uneven))}
    lengths |= {(0, new) for new in BETWEEN if new < new_long}
    if has_states:
        lengths |= {(prefix, IN_CHUNKS) for prefix in (0, min(short, context - IN_CHUNKS))}
    return sorted((prefix, new) for prefix, new in lengths if new and 0 <= prefix <= context - new)


def _short_prefix(context: int) -> int:
    """Prefix of short steps, for kernels that long contexts use."""
    return min(PREFIX_TOKENS, max(0, context - max(NEW_TOKENS)))
