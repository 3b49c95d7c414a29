"""An indexer's scores, and the top-k tokens that sparse attention (DSA) reads, on a GPU.

The results are those of `layers/attention/dsa_backend.py`, even for ties: among equal scores the
first tokens win.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

PROGRAMS: Final = 512
"""Programs of the scores that fill the device."""
_LAUNCH: Final = (128, 128, 3)
"""Rows of a program's products (tokens times heads), keys of a block, stages."""
_FP32_LAUNCH: Final = (64, 64, 1)
_CHOICE_BLOCK: Final = 16384
_CHOICE_BLOCK_A_WARP: Final = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _score_kernel(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Scores of TOKENS tokens that have one list; programs along axis 1 share its blocks."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    lens = tl.load(lens_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)
    longest = tl.max(lens, axis=0)
    product = tl.arange(0, TOKENS * HEADS)
    token, head = first + product // HEADS, product % HEADS
    is_there = (token < num_tokens) & (head < NUM_HEADS)
    dims = tl.arange(0, BLOCK_D)
    q_at = (token * q_stride + head * DIM)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_there[:, None] & (dims < DIM)[None, :], other=0.0)
    weights = tl.load(weights_ptr + token * NUM_HEADS + head, mask=is_there, other=0.0)
    slots = table_ptr + tl.load(rows_ptr + first).to(tl.int64) * table_stride
    for start in range(tl.program_id(1) * BLOCK, longest, tl.num_programs(1) * BLOCK):
        pos = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + pos, mask=pos < longest, other=0).to(tl.int64)
        keys = tl.load(
            keys_ptr + slot[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0
        )
        products = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="tf32x3")
        products = tl.maximum(products, 0.0) * weights[:, None]
        scores = tl.sum(tl.reshape(products, [TOKENS, HEADS, BLOCK]), axis=1)
        at = tokens[:, None] * out_stride + pos[None, :]
        tl.store(out_ptr + at, scores, mask=pos[None, :] < lens[:, None])


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    longest: int,
    *,
    one_list: bool = False,
) -> torch.Tensor:
    """Scores of the tokens of lists of slots.

    Args:
        q: Contiguous `[num_tokens, heads, head_dim]` of the indexer.
        weights: Contiguous fp32 `[num_tokens, heads]`.
        keys: Contiguous `[slots, head_dim]`.
        table: int32 `[lists, max_length]`, the last dimension dense.
        rows: Integer `[num_tokens]`: the list of each token.
        lens: Integer `[num_tokens]`: number of tokens of the list that get a score.
        longest: Upper bound of `lens`, which decides the launch.
        one_list: If true, all tokens have the same list, which is read once for several of them.

    Returns:
        fp32 `[num_tokens, longest]`; garbage past a token's length.
    """
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous() and weights.is_contiguous() and keys.is_contiguous()
    heads = max(16, triton.next_power_of_2(num_heads))
    most_rows, block, num_stages = _LAUNCH if q.element_size() == 2 else _FP32_LAUNCH
    together = max(1, most_rows // heads) if one_list else 1
    groups = triton.cdiv(num_tokens, together)
    programs = min(triton.cdiv(longest, block), max(1, PROGRAMS // groups))
    scores = torch.empty((num_tokens, longest), dtype=torch.float32, device=q.device)
    _score_kernel[(groups, programs)](
        q,
        weights,
        keys,
        table,
        rows,
        lens,
        scores,
        num_tokens,
        q.stride(0),
        table.stride(0),
        scores.stride(0),
        NUM_HEADS=num_heads,
        DIM=dim,
        TOKENS=together,
        HEADS=heads,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK=block,
        num_warps=8 if together * heads >= 128 else 4,
        num_stages=num_stages,
    )
    return scores


@triton.jit
def _keys(scores: tl.tensor, pos: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Scores as uint32 keys of the same order; -0 counts as 0. Past `length`: 0, the lowest key."""
    score = tl.load(scores + pos, mask=pos < length, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    flip = (bits >> 31) | -2147483648
    return tl.where(pos < length, bits ^ flip, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _counts(key: tl.tensor, lowest: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Masks of the keys that reach one, two and three steps above `lowest`, in 20 bits each to be
    summed: contexts have less than a million tokens."""
    found = (key >= lowest + step).to(tl.int64)
    found += (key >= lowest + 2 * step).to(tl.int64) << 20
    return found + ((key >= lowest + 3 * step).to(tl.int64) << 40)


@triton.jit
def _raised(lowest: tl.tensor, step: tl.tensor, counts: tl.tensor, TOPK: tl.constexpr) -> tl.tensor:
    """The highest of four thresholds that at least TOPK keys reach."""
    total = tl.sum(counts, axis=0)
    raised = tl.where((total & 0xFFFFF) >= TOPK, lowest + step, lowest)
    raised = tl.where((total >> 20 & 0xFFFFF) >= TOPK, lowest + 2 * step, raised)
    return tl.where((total >> 40) >= TOPK, lowest + 3 * step, raised)


@triton.jit
def _take(
    key: tl.tensor,
    pos: tl.tensor,
    lowest: tl.tensor,
    missing: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Write the slots of keys above `lowest`, and of the first `missing` keys that equal it.

    Returns:
        The number of keys that equal it, and the number of slots written.
    """
    is_equal = key == lowest
    both = (key > lowest).to(tl.int64) + (is_equal.to(tl.int64) << 32)
    until = tl.cumsum(both, axis=0)
    equal, above = (until >> 32).to(tl.int32), until.to(tl.int32)
    chosen = (key > lowest) | (is_equal & (equal <= missing))
    place = above + tl.minimum(equal, tl.maximum(missing, 0)) - 1
    tl.store(out + place, tl.load(slots + pos, mask=chosen, other=0), mask=chosen)
    return tl.sum(is_equal.to(tl.int32), axis=0), tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def _choose_kernel(
    scores_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scores_stride: tl.tensor,
    table_stride: tl.tensor,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the lowest chosen key, two bits at a time, then take all keys from it up.

    A histogram of digits would read the keys less often, but Triton's takes four times as long. Up
    to BLOCK keys stay in registers.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + token).to(tl.int32)
    slots = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
    out = out_ptr + token * TOPK
    places = tl.arange(0, BLOCK)
    if length <= TOPK:
        for start in range(0, length, BLOCK):
            pos = start + places
            is_there = pos < length
            tl.store(out + pos, tl.load(slots + pos, mask=is_there, other=0), mask=is_there)
        return
    scores = scores_ptr + token * scores_stride
    lowest = tl.zeros([], tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    missing = tl.full([], TOPK, tl.int32)
    if length <= BLOCK:
        key = _keys(scores, places, length)
        for _ in range(16):
            lowest = _raised(lowest, step, _counts(key, lowest, step), TOPK)
            step = step >> 2
        missing -= tl.sum((key > lowest).to(tl.int32), axis=0)
        _take(key, places, lowest, missing, slots, out)
        return
    for _ in range(16):
        counts = tl.zeros([BLOCK], tl.int64)
        for start in range(0, length, BLOCK):
            counts += _counts(_keys(scores, start + places, length), lowest, step)
        lowest = _raised(lowest, step, counts, TOPK)
        step = step >> 2
    for start in range(0, length, BLOCK):
        key = _keys(scores, start + places, length)
        missing -= tl.sum((key > lowest).to(tl.int32), axis=0)
    for start in range(0, length, BLOCK):
        pos = start + places
        key = _keys(scores, pos, length)
        equal, written = _take(key, pos, lowest, missing, slots, out)
        missing -= equal
        out += written


def choose_slots(
    scores: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """The slots of the `topk` best tokens of each list, in the list's order.

    Args:
        scores: fp32 `[num_tokens, longest]`, from `index_scores`.
        table: As in `index_scores`; `rows` and `lens` likewise.

    Returns:
        int32 `[num_tokens, topk]`. A list of at most `topk` tokens is returned whole, followed by
        garbage.
    """
    out = torch.empty((len(scores), topk), dtype=torch.int32, device=scores.device)
    block = min(_CHOICE_BLOCK, max(128, triton.next_power_of_2(scores.shape[1])))
    _choose_kernel[(len(scores),)](
        scores,
        table,
        rows,
        lens,
        out,
        scores.stride(0),
        table.stride(0),
        TOPK=topk,
        BLOCK=block,
        num_warps=max(4, block // _CHOICE_BLOCK_A_WARP),
    )
    return out
