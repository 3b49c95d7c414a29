"""Latent attention of many new tokens: rows are projected up, and attended to as keys and values.

Scores of many queries cost less over keys than over latent rows. Keys and values take many times the
memory of rows, so they exist for some heads and some tokens at a time, and a prefix is read piece
by piece; the pieces are joined by their log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.partial_attention import attend, heads_first
from sglang.srt.layers.attention.triton_ops.combine import merge_into_

if TYPE_CHECKING:
    from sglang.srt.layers.mla.latent_attention import LatentAttention

PROJECTED_BYTES: Final = 256 << 20
"""Most that keys and values of some heads take, each."""
PIECE_TOKENS: Final = 8192
_HEAD_DIM_UNIT: Final = 8


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
        new: `[n, 1, row_dim]`: their rows.
        pool: `[slots, 1, row_dim]`.
        prefix: int64 `[prefix]`: slots; None: there is none.
        out: `[n, num_heads, v_head_dim]`, the last dimension dense: takes what comes out.
    """
    n, num_heads, head_dim = q.shape
    pieces = () if prefix is None else prefix.split(PIECE_TOKENS)
    longest = max(n, *(len(piece) for piece in pieces)) if pieces else n
    step = max(1, PROJECTED_BYTES // (longest * head_dim * q.element_size()))
    for begin in range(0, num_heads, step):
        heads = slice(begin, min(begin + step, num_heads))
        own = q[:, heads]
        found, lse = _attend(own, *_project(new, layer, heads), layer, causal=True)
        for piece in pieces:
            keys, values = _project(pool.index_select(0, piece), layer, heads)
            lse = merge_into_(found, lse, *_attend(own, keys, values, layer, causal=False))
        out[:, heads] = found


def _project(
    rows: torch.Tensor, layer: LatentAttention, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[n, heads, qk_head_dim]` and values `[n, heads, v_head_dim]` of rows."""
    mla = layer.mla
    keys_alone, values = layer.up_projection.forward(rows[:, 0, : mla.kv_lora_rank], heads)
    keys = values.new_empty((*keys_alone.shape[:2], mla.qk_head_dim))
    keys[..., : mla.qk_nope_head_dim] = keys_alone
    keys[..., mla.qk_nope_head_dim :] = rows[:, :, mla.kv_lora_rank :]
    return keys, values


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LatentAttention, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[n, heads, v_head_dim]` and natural logarithms of masses `[heads, n]`; contiguous."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if q.is_cuda and q.element_size() == 2 and head_dim % _HEAD_DIM_UNIT == 0:
        # The kernel takes values of the size of keys.
        v = F.pad(v, (0, head_dim - v_head_dim))
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            heads_first(q), heads_first(k), heads_first(v), 0.0, causal, False, scale=layer.scaling
        )
        out, lse = found[0], found[1]
    else:
        out, lse = attend(
            heads_first(q), heads_first(k), heads_first(v), scale=layer.scaling, causal=causal
        )
    return out[0, ..., :v_head_dim].transpose(0, 1).contiguous(), lse[0].contiguous()
