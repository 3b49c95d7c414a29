"""Attention over parts of a context, and the merge of parts.

A softmax over a union of keys is the average of the softmaxes over its parts, weighted by the
parts' sums of exponentials (as in FlashAttention and Flash-Decoding). A context can therefore be
read in place, piece by piece, without being gathered first.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

SCORE_BYTES: Final = 256 << 20
"""Upper bound, in bytes, of the scores computed at a time without an attention kernel."""


class Partial(NamedTuple):
    """Attention over some keys."""

    out: torch.Tensor
    """`[n, heads, rows, v_head_dim]`, in the queries' dtype."""
    lse: torch.Tensor
    """fp32 `[n, heads, rows]`: log of the sum of exponentials of the scaled scores."""


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """View `[tokens, heads, head_dim]` as `[1, heads, tokens, head_dim]`."""
    return x.transpose(0, 1).unsqueeze(0)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Partial:
    """Attention with its log-sum-exp.

    Args:
        q: `[n, heads, rows, head_dim]`, any strides with a dense last dimension.
        k: `[n, kv_heads, keys, head_dim]`; `kv_heads` divides `heads`.
        v: `[n, kv_heads, keys, v_head_dim]`. On a CPU, if `v_head_dim` is not `head_dim`, the
            narrower tensors are copied with padding.
        scale: Factor of the scores.
        causal: Row i sees keys 0 to i; there are as many rows as keys.
        mask: Added to the scores, broadcast to `[n, heads, rows, keys]`; not with `causal`.
    """
    if not q.is_cpu:
        return _attend_plainly(q, k, v, scale=scale, causal=causal, mask=mask)
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if v_head_dim < head_dim:
        v = F.pad(v, (0, head_dim - v_head_dim))
    elif v_head_dim > head_dim:
        q, k = (F.pad(x, (0, v_head_dim - head_dim)) for x in (q, k))
    # The CPU kernel of scaled_dot_product_attention, called by name because the public function
    # drops the log-sum-exp.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return Partial(out if out.shape[-1] == v_head_dim else out[..., :v_head_dim], lse)


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """`attend` in elementary operations, for devices without such a kernel. It computes blocks of
    rows with at most `SCORE_BYTES` of scores."""
    group = q.shape[1] // k.shape[1]
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = wide_k if v is k else v.float().repeat_interleave(group, dim=1)
    n, heads, rows, _ = q.shape
    step = max(1, SCORE_BYTES // (4 * n * heads * k.shape[2]))
    outs, lses = [], []
    for begin in range(0, rows, step):
        block = slice(begin, begin + step)
        scores = torch.matmul(q[:, :, block].float(), wide_k.transpose(-1, -2)) * scale
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., block, :]
        if causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(ones.triu(1 + begin), -torch.inf)
        lses.append(scores.logsumexp(dim=-1))
        weights = (scores - lses[-1].unsqueeze(-1)).exp_()
        outs.append(torch.matmul(weights, wide_v).to(q.dtype))
    return Partial(torch.cat(outs, dim=2), torch.cat(lses, dim=2))


def merge_two(a: Partial, b: Partial) -> torch.Tensor:
    """Attention over the union of two disjoint sets of keys: `[n, heads, rows, head_dim]`."""
    weight = torch.sigmoid(a.lse - b.lse).unsqueeze(-1)
    return torch.lerp(b.out.float(), a.out.float(), weight).to(b.out.dtype)


def with_sinks(part: Partial, sinks: torch.Tensor | None) -> Partial:
    """The part, with one more logit for each row in its softmax, which has no value.

    Only one of the parts of a row may have it.

    Args:
        sinks: fp32, broadcast to `part.lse`; None: the part stays as it is.
    """
    if sinks is None:
        return part
    weight = torch.sigmoid(part.lse - sinks).unsqueeze(-1)
    out = (part.out * weight).to(part.out.dtype)
    return Partial(out, torch.logaddexp(part.lse, sinks))


class RunningAttention:
    """Attention over parts of a context that are added one by one, in fp32."""

    def __init__(self, first: Partial) -> None:
        self.out = first.out.float()
        self.lse = first.lse

    def add_(self, part: Partial) -> None:
        """Add a part with keys of no earlier part."""
        weight = torch.sigmoid(part.lse - self.lse).unsqueeze(-1)
        self.out.lerp_(part.out.float(), weight)
        self.lse = torch.logaddexp(self.lse, part.lse)


def merge_parts(parts: Partial, owners: torch.Tensor, num_owners: int) -> Partial:
    """Join any number of parts for each of several queries.

    Args:
        parts: Stacked along the first dimension.
        owners: int64 `[n]`: the query that each part belongs to; every query has a part.

    Returns:
        `out` `[num_owners, heads, rows, head_dim]`.
    """
    shape = (num_owners, *parts.lse.shape[1:])
    index = owners.view(-1, 1, 1).expand_as(parts.lse)
    peak = torch.full(shape, -torch.inf, device=parts.lse.device)
    peak = peak.scatter_reduce(0, index, parts.lse, "amax")
    weight = (parts.lse - peak.index_select(0, owners)).exp()
    total = torch.zeros(shape, device=weight.device).index_add_(0, owners, weight)
    out = torch.zeros((*shape, parts.out.shape[-1]), device=weight.device)
    out.index_add_(0, owners, parts.out * weight.unsqueeze(-1))
    return Partial((out / total.unsqueeze(-1)).to(parts.out.dtype), peak + total.log())
