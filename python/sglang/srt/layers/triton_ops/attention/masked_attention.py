"""Latent attention of many new tokens to keys and values that are projected up, under a mask.

Sparse attention (DSA) of a token reads the rows that an indexer chose. In short contexts most rows
are chosen, and it takes fewer operations to attend to all keys and mask the others: a key and a
value of a head have 320 elements in DeepSeek's models, a latent row twice has 1,088, and tokens
share the keys that a program reads. The computation is that of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_LAUNCH: Final = (128, 64, 8, 3)
"""Tokens and keys of a block, warps, stages: the fastest setting."""
_FP32_LAUNCH: Final = (32, 32, 4, 1)
_WORD: Final = 64
"""Keys of a mask's word, a bit each."""
_WORDS: Final = 64
"""Words that a program packs."""


@triton.jit(do_not_specialize=["words"])
def _pack_kernel(
    bytes_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    words: tl.tensor,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Grid `(tokens, words / WORDS)`: bytes that are 0 or 1 become bits."""
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    at = tl.program_id(0).to(tl.int64) * words + word
    bit = tl.arange(0, WORD)
    is_word = word < words
    bits = tl.load(bytes_ptr + at[:, None] * WORD + bit[None, :], mask=is_word[:, None], other=0)
    packed = tl.sum(bits.to(tl.int64) << bit.to(tl.int64)[None, :], axis=1)
    tl.store(mask_ptr + at, packed, mask=is_word)


@triton.jit
def _word_of(
    masks: tl.tensor, start: tl.tensor, is_token: tl.tensor, WORD: tl.constexpr
) -> tl.tensor:
    """The bits of the keys from `start` on, for each token."""
    word = tl.load(masks + start // WORD, mask=is_token, other=0)
    return word >> (start % WORD)


@triton.jit(do_not_specialize=["num_tokens", "first_position", "mask_stride"])
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
    WORD: tl.constexpr,
) -> None:
    """Grid `(token blocks, heads)`; the last blocks, which see most keys, begin first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    begin = block * TOKENS
    token = begin + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    q = nope.load([begin, head * QUERY_STEP])
    q_rope = rope.load([begin, head * QUERY_STEP + KEY_DIM])
    masks = mask_ptr + token.to(tl.int64) * mask_stride
    key = tl.arange(0, KEYS).to(tl.int64)
    in_byte, byte = (key % 8)[None, :], (key // 8 * 8)[None, :]
    peak = tl.full([TOKENS], -1e30, tl.float32)
    mass = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_DIM], tl.float32)
    end = first_position + tl.minimum(begin + TOKENS, num_tokens)
    column = head * (KEY_DIM + VALUE_DIM)
    bits = _word_of(masks, 0, is_token, WORD)
    for start in range(0, end, KEYS):
        # Read before the products, so that nothing waits for it; the last one is not used.
        next_bits = _word_of(masks, start + KEYS, is_token, WORD)
        keys = projected_keys.load([start, column])
        scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3")
        keys = key_ropes.load([start, RANK])
        scores = tl.dot(q_rope, tl.trans(keys), scores, input_precision="tf32x3")
        # A thread has the same two bits of each byte: one shift by a variable, others by constants.
        is_seen = ((bits[:, None] >> in_byte) >> byte) & 1
        scores = tl.where(is_seen != 0, scores, float("-inf"))
        bits = next_bits
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        shrink = tl.exp2(peak - new_peak)
        p = tl.exp2(scores * scale - new_peak[:, None])
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
        int64 `[n, words]`: a bit for each key, the lowest first; 1 if chosen. There is one word
        more than keys need.
    """
    n, words = len(chosen), triton.cdiv(num_keys, _WORD) + 1
    chosen_bytes = torch.zeros((n, words * _WORD), dtype=torch.uint8, device=chosen.device)
    chosen_bytes.scatter_(1, chosen.long(), 1)
    mask = torch.empty((n, words), dtype=torch.int64, device=chosen.device)
    _pack_kernel[(n, triton.cdiv(words, _WORDS))](
        chosen_bytes, mask, words, WORD=_WORD, WORDS=_WORDS
    )
    return mask


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
        scaling: Positive factor of the scores.
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
    assert _WORD % keys == 0 and mask.stride(-1) == 1
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
        WORD=_WORD,
        num_warps=num_warps,
        num_stages=num_stages,
    )
