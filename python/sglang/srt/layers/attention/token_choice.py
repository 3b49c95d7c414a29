"""Choice of the tokens that sparse attention (DSA) reads, by an indexer's scores.

The choice depends only on scores and positions, not on the tokens' slots.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.layers.radix_attention import IndexQuery

SCORE_BYTES: Final = 32 << 20
"""Upper bound, in bytes, of products of queries and keys held before the sum over heads."""


def index_scores(query: IndexQuery, keys: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
    """Scores of all tokens of one context, for some of its tokens.

    Args:
        query: Indexer queries of `n` tokens.
        keys: `[context, head_dim]`: the indexer's keys, in the order of the context.
        positions: int64 `[n]`: positions of the querying tokens in the context.

    Returns:
        fp32 `[n, context]`; -inf for tokens after the querying one.
    """
    n, heads, dim = query.q.shape
    q = query.q.reshape(n * heads, dim).float()
    weights = query.weights.unsqueeze(1)
    step = max(1, SCORE_BYTES // (4 * n * heads))
    parts = []
    for begin in range(0, len(keys), step):
        products = (q @ keys[begin : begin + step].float().t()).relu_()
        parts.append(torch.bmm(weights, products.view(n, heads, -1)).squeeze(1))
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    places = torch.arange(len(keys), device=keys.device)
    return scores.masked_fill_(places > positions.unsqueeze(1), -torch.inf)


def choose_tokens(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Choose the `topk` best tokens of each row; among equal scores the first tokens win.

    Ties are common, because relu makes many scores exactly 0. `torch.topk` does not define its
    choice among equal scores, so only its values are used. Nothing is read back to the CPU.

    Args:
        scores: fp32 `[n, context]`, with at least `topk` tokens.

    Returns:
        int64 `[n, topk]`, ascending.
    """
    last = scores.topk(topk, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = scores > last, scores == last
    missing = topk - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= missing))
    # A chosen token's rank is its column; the other tokens go to a column that is cut off.
    ranks = (chosen.cumsum(dim=-1) - 1).masked_fill_(~chosen, topk)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    # Zeros, so that entries that NaN scores leave unset are valid positions too.
    out = torch.zeros(len(scores), topk + 1, dtype=torch.int64, device=scores.device)
    return out.scatter_(1, ranks, places)[:, :topk]
