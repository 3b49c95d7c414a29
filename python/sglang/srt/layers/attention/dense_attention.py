"""Attention of long runs of new tokens, dense or latent, by cuDNN, the fastest kernels on Hopper.

`benchmark/results/` has the measurements. cuDNN makes a plan for each new shape, which takes the
CPU about 35 ms, longer than the attention of a layer. All lengths are multiples of `UNIT`, which
keeps shapes few. `plan_dense` cuts a request to fit, and Triton kernels compute the other tokens.

Latent attention of many new tokens projects rows up to keys and values: for many queries, scores
over keys cost less than over latent rows. Keys and values take many times the memory of rows, so
only some heads and tokens are projected at a time. A prefix is read piece by piece, and the pieces
are joined by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.partial_attention import attend, heads_first
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.layers.triton_ops.attention.online_softmax import merge_into_
from sglang.srt.mem_cache.device.row_buffers import gather_rows

UNIT: Final = 1024
"""Lengths are multiples of this many tokens; cuDNN is faster than Triton at this length or more."""
MAX_HEAD_DIM: Final = 192
MAX_V_HEAD_DIM: Final = 128
"""Head sizes of DeepSeek's models, which cuDNN computes at 75% of the device's peak."""
WARM_UP_TOKENS: Final = 8192
HEADS_AT_ONCE: Final = 32
"""Heads projected at a time. They fill the device; keys and values of 8,192 tokens take 100 and
70 MB."""
PIECE_UNITS: Final = 8
"""Longest piece of a prefix that is projected at a time, in `UNIT`s of tokens."""


@dataclass(frozen=True, slots=True)
class DensePlan:
    """How the attention of one request's new tokens is cut.

    Keys `[0, whole)` are read in pieces, which every query sees completely. Keys from `whole` to
    the plan's last new token are read causally. If these begin in the prefix, `pad` query rows are
    put first, so that row i sees keys up to i. Their output is dropped.
    """

    pieces: list[tuple[int, int]]
    """Ascending ranges of tokens, of lengths `UNIT` times a power of 2."""
    whole: int
    """Tokens read in pieces, a multiple of `UNIT`."""
    pad: int
    """Rows put before the first query: tokens of the prefix from `whole` on."""
    count: int
    """New tokens that cuDNN computes, or 0; `pad + count` is a multiple of `UNIT`."""


def plan_dense(prefix: int, num_new: int) -> DensePlan:
    """Cut a request that computes `num_new` tokens after `prefix`."""
    pad = prefix % UNIT
    whole = prefix - pad
    count = (pad + num_new) // UNIT * UNIT - pad
    if count < UNIT // 2:
        return DensePlan([], 0, 0, 0)
    return DensePlan(cut_prefix(whole), whole, pad, count)


def cut_prefix(whole: int, most_units: int | None = None) -> list[tuple[int, int]]:
    """Ascending ranges of the first `whole` tokens, of lengths `UNIT` times a power of 2.

    Args:
        whole: A multiple of `UNIT`.
        most_units: Longest piece, in `UNIT`s; None: no limit.
    """
    pieces, begin = [], 0
    while begin < whole:
        units = (whole - begin) // UNIT
        if most_units is not None:
            units = min(units, most_units)
        end = begin + (UNIT << units.bit_length() - 1)
        pieces.append((begin, end))
        begin = end
    return pieces


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query to all keys; with `causal`, from row i to the keys up to i.

    Args:
        q: bf16 or fp16 `[num_tokens, num_heads, head_dim]` on a CUDA device.
        k: `[num_keys, num_kv_heads, head_dim]`; `v` likewise, with `v_head_dim`.

    Returns:
        Contiguous `[num_tokens, num_heads, v_head_dim]`, and the scores' log-sum-exp (natural),
        contiguous fp32 `[num_heads, num_tokens]`.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        heads_first(q), heads_first(k), heads_first(v), None, True, 0.0, causal, scale=scaling
    )
    out: torch.Tensor = found[0][0].transpose(0, 1)
    lse: torch.Tensor = found[1].reshape(q.shape[1], q.shape[0])
    return out.contiguous(), lse.contiguous()


def attend_projected(
    q: torch.Tensor,
    new: torch.Tensor,
    pool: torch.Tensor,
    prefix: torch.Tensor | None,
    layer: LatentAttention,
    out: torch.Tensor,
) -> None:
    """Attend from new tokens of one request to its prefix and, causally, to each other.

    Args:
        q: `[n, num_heads, qk_head_dim]` on an accelerator.
        new: `[n, 1, row_dim]`: rows of the new tokens.
        pool: Stored rows, `[slots, 1, width]`; see `read_rows`.
        prefix: int64 `[prefix]`: slots of the prefix; None: no prefix.
        out: `[n, num_heads, v_head_dim]`, the last dimension dense; overwritten.
    """
    rank, dtype = layer.mla.kv_lora_rank, new.dtype
    known = 0 if prefix is None else len(prefix)
    pad, count = known % UNIT, len(q)
    behind = -(pad + count) % UNIT
    # cuDNN computes whole units. The prefix's end is put before the new tokens, with query rows
    # whose output is dropped. No query sees the padding keys after the last token.
    tail = F.pad(new, (0, 0, 0, 0, pad, behind))
    if prefix is not None and pad:
        tail[:pad] = gather_rows(pool, prefix[known - pad :], rank, dtype)
    pieces = [] if prefix is None else cut_prefix(known - pad, PIECE_UNITS)
    for begin in range(0, layer.num_heads, HEADS_AT_ONCE):
        heads = slice(begin, begin + HEADS_AT_ONCE)
        own = F.pad(q[:, heads], (0, 0, 0, 0, pad, behind))
        found, lse = _attend(own, *_project(tail, layer, heads), layer.scaling, causal=True)
        for first, end in pieces:
            assert prefix is not None
            rows = gather_rows(pool, prefix[first:end], rank, dtype)
            keys, values = _project(rows, layer, heads)
            part = _attend(own, keys, values, layer.scaling, causal=False)
            lse = merge_into_(found, lse, *part)
        out[:, heads] = found[pad : pad + count]


def warm_up_projected(q: torch.Tensor, v: torch.Tensor) -> None:
    """Let cuDNN make its plans for prefills of up to `WARM_UP_TOKENS` new tokens. This takes a
    second, which a request would otherwise wait.

    Args:
        q: A tensor like one token's queries, `[1, num_heads, qk_head_dim]`.
        v: A tensor like its values, `[1, num_heads, v_head_dim]`.
    """
    if not can_be_dense(q, v):
        return

    def rows(like: torch.Tensor, heads: int, tokens: int) -> torch.Tensor:
        return like.new_zeros((tokens, heads, like.shape[-1]))

    for heads in {min(HEADS_AT_ONCE, q.shape[1]), q.shape[1] % HEADS_AT_ONCE} - {0}:
        for tokens in range(UNIT, WARM_UP_TOKENS + 1, UNIT):
            queries = rows(q, heads, tokens)
            _attend(queries, queries, rows(v, heads, tokens), 1.0, causal=True)
            for piece in (UNIT << i for i in range(PIECE_UNITS.bit_length())):
                keys, values = rows(q, heads, piece), rows(v, heads, piece)
                _attend(queries, keys, values, 1.0, causal=False)


def _project(
    rows: torch.Tensor, layer: LatentAttention, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[n, heads, qk_head_dim]` and values `[n, heads, v_head_dim]` of rows."""
    mla = layer.mla
    keys_alone, values = layer.up_projection.forward(rows[:, 0, : mla.kv_lora_rank], heads)
    keys = values.new_empty((*keys_alone.shape[:2], mla.qk_head_dim))
    keys[..., : mla.qk_nope_head_dim] = keys_alone
    keys[..., mla.qk_nope_head_dim :] = rows[:, :, mla.kv_lora_rank :]
    # cuDNN's plans depend on strides too.
    return keys, values.contiguous()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_attention` if cuDNN supports dtype and sizes, else `attend`; the same shapes."""
    if can_be_dense(q, v):
        return dense_attention(q, k, v, scaling, causal=causal)
    out, lse = attend(heads_first(q), heads_first(k), heads_first(v), scale=scaling, causal=causal)
    return out[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def can_be_dense(q: torch.Tensor, v: torch.Tensor) -> bool:
    """True if cuDNN supports queries and values like these, `[..., head_dim]`."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    fits = head_dim <= MAX_HEAD_DIM and v_head_dim <= MAX_V_HEAD_DIM
    return q.is_cuda and q.element_size() == 2 and fits and not (head_dim % 8 or v_head_dim % 8)
