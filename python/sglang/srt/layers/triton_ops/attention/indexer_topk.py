"""An indexer's scores, and the top-k tokens that sparse attention (DSA) reads, on a GPU.

The results are those of `layers/attention/dsa_backend.py`, even for ties: among equal scores the
first tokens win.

Keys in fp8 are multiplied by queries in fp8: each head's query is rounded like a key, and its scale
goes into the head's weight (as in DeepSeek-V3.2's reference).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.ordered import ordered
from sglang.srt.mem_cache.device.fp8_rows import FP8_MAX, LEAST_SCALE
from sglang.srt.mem_cache.device.fp8_rows_triton import typed_views

PROGRAMS: Final = 512
"""Programs of the scores that fill the device."""
_LAUNCH: Final = (256, 64, 8, 3)
"""Most queries of a program (tokens times heads), keys of a block, warps, stages."""
_FP8_LAUNCH: Final = (128, 128, 4, 3)
_FEW_LAUNCH: Final = (64, 128, 4, 3)
"""The same for one token at a time."""
_FP32_LAUNCH: Final = (64, 64, 4, 1)
_MANY_TOKENS: Final = 64
"""For this many tokens or more that have one list, its keys in fp8 are copied first."""
_CHOICE_WARPS: Final = 8
_FEW_TOKENS: Final = 128
"""Up to this many tokens, each has a multiprocessor to itself."""
_CHOICE_WARPS_OF_FEW: Final = 32
_FEWEST_CANDIDATES: Final = 128
_SCORES_ALIGNMENT: Final = 16
"""Rows of scores start at multiples of this, so that four scores are read at once."""


@triton.jit
def _rounded_queries(
    q: tl.tensor, weights: tl.tensor, LARGEST: tl.constexpr, LEAST: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Queries in fp8, one scale for a row, and the weights of rows times these scales."""
    x = q.to(tl.float32)
    largest = tl.full([weights.shape[0]], LARGEST, tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), largest)
    scale = tl.where(scale < LEAST, 1.0, scale)
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return code.to(tl.float8e4nv), weights * scale


@triton.jit(do_not_specialize=["num_tokens"])
def _score_kernel(
    q_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    scales_ptr: tl.tensor,
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
    IS_FP8: tl.constexpr,
    IS_LISTED: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Scores of TOKENS tokens that have one list; programs along axis 1 share its blocks.

    Keys are at the slots of the list, a scale behind each in fp8; or, if not IS_LISTED, in fp8 in
    the order of the list, with scales of their own. They are the left operand, so that the sum over
    heads stays within the four threads that share a row of a product.
    """
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
    row = DIM
    if IS_FP8 and IS_LISTED:
        row = DIM + 4
    if IS_FP8:
        q, weights = _rounded_queries(q, weights, LARGEST, LEAST)
    slots = table_ptr + tl.load(rows_ptr + first).to(tl.int64) * table_stride
    for start in range(tl.program_id(1) * BLOCK, longest, tl.num_programs(1) * BLOCK):
        pos = start + tl.arange(0, BLOCK)
        slot = pos.to(tl.int64)
        if IS_LISTED:
            slot = tl.load(slots + pos, mask=pos < longest, other=0).to(tl.int64)
        is_key = (dims < DIM)[None, :]
        if not IS_LISTED:
            is_key &= (pos < longest)[:, None]
        keys = tl.load(keys_ptr + slot[:, None] * row + dims[None, :], mask=is_key, other=0.0)
        products = tl.dot(keys.to(q.dtype), tl.trans(q), input_precision="tf32x3")
        products = tl.maximum(products, 0.0) * weights[None, :]
        scores = tl.sum(tl.reshape(products, [BLOCK, TOKENS, HEADS]), axis=2)
        if IS_FP8:
            at_scale = scales_ptr + slot
            if IS_LISTED:
                at_scale = scales_ptr + slot * (row // 4) + DIM // 4
            scores *= tl.load(at_scale, mask=pos < longest, other=0.0)[:, None]
        at = tokens[None, :] * out_stride + pos[:, None]
        tl.store(out_ptr + at, scores, mask=pos[:, None] < lens[None, :])


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
        keys: Contiguous `[slots, head_dim]`; or in fp8, uint8 `[slots, head_dim + 4]`.
        table: int32 `[lists, max_length]`, the last dimension dense.
        rows: Integer `[num_tokens]`: the list of each token.
        lens: Integer `[num_tokens]`: number of tokens of the list that get a score.
        longest: Upper bound of `lens`, which decides the launch.
        one_list: If true, all tokens have the same list, which is read once for several of them.

    Returns:
        fp32 `[num_tokens, longest]`, a view of longer rows; garbage past a token's length.
    """
    num_tokens, num_heads, dim = q.shape
    assert q.is_contiguous() and weights.is_contiguous() and keys.is_contiguous()
    is_fp8 = keys.dtype == torch.uint8
    codes, scales = typed_views(keys)[:2] if is_fp8 else (keys, keys)
    is_listed = not (is_fp8 and one_list and num_tokens >= _MANY_TOKENS)
    if not is_listed:
        # Rows of 132 bytes are read four bytes at a time, again for each few tokens.
        own = keys.index_select(0, table[rows[0], :longest].long())
        codes = own[:, :dim].contiguous().view(torch.float8_e4m3fn)
        scales = own[:, dim:].contiguous().view(torch.float32)
    heads = max(16, triton.next_power_of_2(num_heads))
    launch = _FP8_LAUNCH if is_fp8 else _LAUNCH if one_list else _FEW_LAUNCH
    most, block, num_warps, num_stages = launch if q.element_size() == 2 else _FP32_LAUNCH
    together = max(1, most // heads) if one_list else 1
    groups = triton.cdiv(num_tokens, together)
    programs = min(triton.cdiv(longest, block), max(1, PROGRAMS // groups))
    stride = triton.cdiv(longest, _SCORES_ALIGNMENT) * _SCORES_ALIGNMENT
    scores = torch.empty((num_tokens, stride), dtype=torch.float32, device=q.device)
    _score_kernel[(groups, programs)](
        q,
        weights,
        codes,
        scales,
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
        BLOCK_D=max(32 if is_fp8 else 16, triton.next_power_of_2(dim)),
        BLOCK=block,
        IS_FP8=is_fp8,
        IS_LISTED=is_listed,
        LARGEST=FP8_MAX,
        LEAST=LEAST_SCALE,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return scores[:, :longest]


@triton.jit
def _keys(scores: tl.tensor, pos: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Scores as int32 keys of the same order. Past `length`: the lowest key."""
    score = tl.load(scores + pos, mask=pos < length, other=0.0)
    return tl.where(pos < length, ordered(score), -2147483648)


@triton.jit
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The middle, rounded up. The sum of the two could overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _narrowed(
    low: tl.tensor,
    high: tl.tensor,
    middle: tl.tensor,
    count: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """New bounds of a threshold, given that `count` keys reach `middle`. They are equal if that is
    at most MOST."""
    is_reached = count >= LEAST
    lower = tl.where(is_reached, high, middle - 1)
    lower = tl.where(is_reached & (count <= MOST), middle, lower)
    return tl.where(is_reached, middle, low), lower


@triton.jit
def _threshold(
    key: tl.tensor, low: tl.tensor, high: tl.tensor, LEAST: tl.constexpr, MOST: tl.constexpr
) -> tl.tensor:
    """A threshold that LEAST to MOST keys reach; if there is none, the highest that at least LEAST
    reach. At least LEAST keys reach `low`, and none exceeds `high`."""
    while low < high:
        middle = _between(low, high)
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        low, high = _narrowed(low, high, middle, count, LEAST, MOST)
    return low


@triton.jit
def _threshold_of_row(
    scores: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> tl.tensor:
    """`_threshold` of a whole row of scores."""
    places = tl.arange(0, MOST)
    while low < high:
        middle = _between(low, high)
        counts = tl.zeros([MOST], tl.int32)
        for start in range(0, length, MOST):
            counts += (_keys(scores, start + places, length) >= middle).to(tl.int32)
        low, high = _narrowed(low, high, middle, tl.sum(counts, axis=0), LEAST, MOST)
    return low


@triton.jit
def _columns(x: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The columns of `[ROWS, 4]`. A thread keeps its rows."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _read(
    source: tl.tensor, at: tl.tensor, length: tl.tensor, IS_PACKED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and positions of a row of scores, or of packed candidates. Past `length`: the lowest
    key."""
    # A mask of whole groups of four, which are read at once.
    is_read = at < (length + 3) // 4 * 4
    if IS_PACKED:
        packed = tl.load(source + at, mask=is_read, other=0)
        key, pos = (packed >> 32).to(tl.int32), packed.to(tl.int32)
    else:
        key, pos = ordered(tl.load(source + at, mask=is_read, other=0.0)), at
    return tl.where(at < length, key, -2147483648), pos


@triton.jit
def _counts(key: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Keys above `low`, and in the upper 16 bits keys that equal it."""
    return (key > low).to(tl.int32) + ((key == low).to(tl.int32) << 16)


@triton.jit
def _put(
    key: tl.tensor,
    pos: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    limit: tl.tensor,
    above: tl.tensor,
    equal: tl.tensor,
    slots: tl.tensor,
    target: tl.tensor,
    WIDTH: tl.constexpr,
    IS_LAST: tl.constexpr,
) -> tl.tensor:
    """Write keys above `low`, and the first `limit` keys that equal it, as `_compact` says.

    Args:
        before: `_counts` of the keys of this block before each key.
        above: Number of keys above `low` in earlier blocks; `equal` likewise.

    Returns:
        `before`, with these keys.
    """
    until = before + _counts(key, low)
    equal_until = equal + (until >> 16)
    is_kept = (key > low) | ((key == low) & (equal_until <= limit))
    place = above + (until & 0xFFFF) + tl.minimum(equal_until, limit) - 1
    if IS_LAST:
        tl.store(target + place, tl.load(slots + pos, mask=is_kept, other=0), mask=is_kept)
    else:
        packed = (key.to(tl.int64) << 32) | pos.to(tl.int64)
        tl.store(target + place, packed, mask=is_kept & (place < WIDTH))
    return until


@triton.jit
def _compact(
    source: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    limit: tl.tensor,
    slots: tl.tensor,
    target: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_LAST: tl.constexpr,
) -> tl.tensor:
    """Copy keys above `low`, and the first `limit` keys that equal it, in their order.

    A thread takes eight keys in a row. Its counts are summed before they are added up across
    threads, and no data move between threads.

    Args:
        source: A row of scores; if IS_PACKED, candidates.
        target: If IS_LAST, slots of the keys' tokens are written. Else candidates: keys in the
            upper 32 bits and positions in the lower; WIDTH of them, later ones are dropped.

    Returns:
        Number of keys, with dropped ones.
    """
    rows = tl.arange(0, ROWS) * 8
    first_at = rows[:, None] + tl.arange(0, 4)[None, :]
    above = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in range(0, length, ROWS * 8):
        at = start + first_at
        key, pos = _read(source, at, length, IS_PACKED)
        next_key, next_pos = _read(source, at + 4, length, IS_PACKED)
        own = tl.sum(_counts(key, low) + _counts(next_key, low), axis=1)
        until = tl.cumsum(own, axis=0) - own
        k0, k1, k2, k3 = _columns(key, ROWS)
        p0, p1, p2, p3 = _columns(pos, ROWS)
        until = _put(k0, p0, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        until = _put(k1, p1, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        until = _put(k2, p2, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        until = _put(k3, p3, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        k0, k1, k2, k3 = _columns(next_key, ROWS)
        p0, p1, p2, p3 = _columns(next_pos, ROWS)
        until = _put(k0, p0, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        until = _put(k1, p1, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        until = _put(k2, p2, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        _put(k3, p3, until, low, limit, above, equal, slots, target, WIDTH, IS_LAST)
        total = tl.sum(own, axis=0)
        above += total & 0xFFFF
        equal += total >> 16
    return above + tl.minimum(equal, limit)


@triton.jit
def _choose_kernel(
    scores_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scores_stride: tl.tensor,
    table_stride: tl.tensor,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Find a threshold that little more than TOPK keys reach, copy these, and choose among them.

    Keys whose positions are equal modulo WIDTH form a group. The TOPK-th best of the groups' best
    keys is reached by at least TOPK keys. By chance few more do: 1.4 times as many if groups are
    large. WIDTH is at least twice TOPK.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + token).to(tl.int32)
    slots = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
    out = out_ptr + token * TOPK
    places = tl.arange(0, WIDTH)
    if length <= TOPK:
        is_there = places < length
        tl.store(out + places, tl.load(slots + places, mask=is_there, other=0), mask=is_there)
        return
    scores = scores_ptr + token * scores_stride
    best = _keys(scores, places, length)
    if length <= WIDTH:
        low = tl.min(tl.where(places < length, best, 0x7FFFFFFF), axis=0)
        low = _threshold(best, low, tl.max(best, axis=0), TOPK, TOPK)
        missing = TOPK - tl.sum((best > low).to(tl.int32), axis=0)
        _compact(scores, length, low, missing, slots, out, WIDTH, ROWS, False, True)
        return
    whole = length // WIDTH * WIDTH
    for start in range(WIDTH, whole, WIDTH):
        best = tl.maximum(best, ordered(tl.load(scores + start + places)))
    best = tl.maximum(best, _keys(scores, whole + places, length))
    high = tl.max(best, axis=0)
    low = _threshold(best, tl.min(best, axis=0), high, TOPK, TOPK + TOPK // 32)
    candidates = candidates_ptr + token * WIDTH
    found = _compact(scores, length, low, TOPK, slots, candidates, WIDTH, ROWS, False, False)
    if found > WIDTH:
        # The best keys are in few groups.
        low = _threshold_of_row(scores, length, low, high, TOPK, WIDTH)
        found = _compact(scores, length, low, TOPK, slots, candidates, WIDTH, ROWS, False, False)
    tl.debug_barrier()
    best, _ = _read(candidates, places, found, True)
    low = _threshold(best, low, high, TOPK, TOPK)
    missing = TOPK - tl.sum((best > low).to(tl.int32), axis=0)
    _compact(candidates, found, low, missing, slots, out, WIDTH, ROWS, True, True)


def choose_slots(
    scores: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of the `topk` best tokens of each list, in the list's order.

    Args:
        scores: fp32 `[num_tokens, longest]`, from `index_scores`.
        table: As in `index_scores`; `rows` and `lens` likewise.
        out: Contiguous tensor for the result; None: a new one.

    Returns:
        int32 `[num_tokens, topk]`. A list of at most `topk` tokens is returned whole, followed by
        garbage.
    """
    num_tokens, device = len(scores), scores.device
    assert scores.stride(0) % 4 == 0, "rows of scores are read in groups of four"
    if out is None:
        out = torch.empty((num_tokens, topk), dtype=torch.int32, device=device)
    assert out.is_contiguous()
    width = max(_FEWEST_CANDIDATES, 2 * triton.next_power_of_2(topk))
    candidates = torch.empty((num_tokens, width), dtype=torch.int64, device=device)
    num_warps = _CHOICE_WARPS_OF_FEW if num_tokens <= _FEW_TOKENS else _CHOICE_WARPS
    _choose_kernel[(num_tokens,)](
        scores,
        table,
        rows,
        lens,
        candidates,
        out,
        scores.stride(0),
        table.stride(0),
        TOPK=topk,
        WIDTH=width,
        ROWS=32 * num_warps,
        num_warps=num_warps,
    )
    return out
