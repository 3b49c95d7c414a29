"""Latent attention of many new tokens to keys and values that are projected up, under a mask.

Sparse attention (DSA) of a token reads the rows that an indexer chose. In short contexts most rows
are chosen, and attention to all keys, of which a mask hides some, costs fewer operations: a key and
a value of a head have 320 elements in DeepSeek's models, a latent row twice has 1,088, and tokens
share the keys that a program reads. The computation is that of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_LAUNCH: Final = (64, 64, 4, 2)
"""Tokens and keys of a block, warps, stages: the fastest setting. Two programs share a
multiprocessor, and one multiplies while the other takes exponentials."""
_FP32_LAUNCH: Final = (32, 32, 4, 1)
MASK_ALIGNMENT: Final = 128
"""Rows of a mask have a multiple of this many bytes."""


@triton.jit(do_not_specialize=["num_tokens", "first_position"])
def _masked_kernel(
    nope: tl.tensor,
    rope: tl.tensor,
    projected_keys: tl.tensor,
    projected_values: tl.tensor,
    key_ropes: tl.tensor,
    mask_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    first_position: tl.tensor,
    mask_stride: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    scale: tl.tensor,
    KEY_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Grid `(token blocks, heads)`; the last blocks, which see most keys, begin first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    begin = block * TOKENS
    token = begin + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    q = nope.load([begin, head * QUERY_STEP])
    q_rope = rope.load([begin, head * QUERY_STEP + KEY_DIM])
    masks = mask_ptr + token.to(tl.int64)[:, None] * mask_stride
    peak = tl.full([TOKENS], -1e30, tl.float32)
    mass = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_DIM], tl.float32)
    end = first_position + tl.minimum(begin + TOKENS, num_tokens)
    column = head * (KEY_DIM + VALUE_DIM)
    for start in range(0, end, KEYS):
        keys = projected_keys.load([start, column])
        scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
        keys = key_ropes.load([start, RANK])
        scores = tl.dot(q_rope, tl.trans(keys), scores, input_precision="tf32x3") * scale
        at = start + tl.arange(0, KEYS)
        is_seen = tl.load(masks + at[None, :], mask=is_token[:, None], other=0)
        scores = tl.where(is_seen != 0, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(scores - new_peak[:, None])
        mass = mass * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        values = projected_values.load([start, column + KEY_DIM])
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="tf32x3")
        peak = new_peak
    acc = acc / mass[:, None]
    at = out_ptr + token.to(tl.int64)[:, None] * out_token + head * out_head
    at += tl.arange(0, VALUE_DIM)[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


def takes(rank: int, nope_dim: int, rope_dim: int, value_dim: int) -> bool:
    """True if the kernel takes latent vectors and heads of these sizes. Blocks are whole heads, so
    they have powers of two; what the memory accelerator reads begins at multiples of 16 bytes."""
    heads = (nope_dim, rope_dim, value_dim)
    return rank % 8 == 0 and all(
        size >= 16 and size == triton.next_power_of_2(size) for size in heads
    )


def mask_of(chosen: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The mask of chosen tokens.

    Args:
        chosen: Integer `[n, topk]`: positions below `num_keys`.

    Returns:
        uint8 `[n, columns]`, at least `num_keys` columns: 1 for chosen tokens, else 0.
    """
    columns = triton.cdiv(num_keys, MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros((len(chosen), columns), dtype=torch.uint8, device=chosen.device)
    return mask.scatter_(1, chosen.long(), 1)


def masked_attention(
    q: torch.Tensor,
    projected: torch.Tensor,
    rows: torch.Tensor,
    mask: torch.Tensor,
    first_position: int,
    scaling: float,
    out: torch.Tensor,
    *,
    launch: tuple[int, int, int, int] | None = None,
) -> None:
    """Attend from consecutive tokens of one request to tokens of its context.

    Args:
        q: `[n, num_heads, nope_dim + rope_dim]`; the last two dimensions dense.
        projected: Contiguous `[context, num_heads, nope_dim + v_head_dim]`: keys and values.
        rows: Contiguous `[context, rank + rope_dim]`: the rows that were projected.
        mask: From `mask_of`. Each token sees at least one key, and none after itself.
        first_position: Position of the first token in the context.
        out: `[n, num_heads, v_head_dim]`, the last dimension dense; overwritten.
        launch: In the form of `_LAUNCH`; None: the fastest.
    """
    n, num_heads, query_dim = q.shape
    value_dim = out.shape[-1]
    key_dim = projected.shape[-1] - value_dim
    rope_dim = query_dim - key_dim
    assert projected.is_contiguous() and rows.is_contiguous() and out.stride(-1) == 1
    if launch is None:
        launch = _LAUNCH if q.element_size() == 2 else _FP32_LAUNCH
    tokens, keys, num_warps, num_stages = launch
    assert MASK_ALIGNMENT % keys == 0 and mask.stride(-1) == 1
    queries = q.view(n, num_heads * query_dim)
    _masked_kernel[(triton.cdiv(n, tokens), num_heads)](
        TensorDescriptor.from_tensor(queries, [tokens, key_dim]),
        TensorDescriptor.from_tensor(queries, [tokens, rope_dim]),
        TensorDescriptor.from_tensor(projected.flatten(1), [keys, key_dim]),
        TensorDescriptor.from_tensor(projected.flatten(1), [keys, value_dim]),
        TensorDescriptor.from_tensor(rows, [keys, rope_dim]),
        mask,
        out,
        n,
        first_position,
        mask.stride(0),
        out.stride(0),
        out.stride(1),
        scaling * math.log2(math.e),
        KEY_DIM=key_dim,
        ROPE_DIM=rope_dim,
        VALUE_DIM=value_dim,
        QUERY_STEP=query_dim,
        RANK=rows.shape[1] - rope_dim,
        TOKENS=tokens,
        KEYS=keys,
        num_warps=num_warps,
        num_stages=num_stages,
    )
