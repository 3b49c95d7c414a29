"""The top-k tokens that sparse attention (DSA) reads, by an indexer's scores, on a GPU.

The results are those of `layers/attention/dsa_backend.py`, even for ties: among equal scores the
first tokens win.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start
from sglang.srt.layers.triton_ops.ordered import ordered

_LAUNCH: Final = (8, 1)
"""Warps of a program; bounds that a step towards a threshold compares keys with."""
_FEW_TOKENS: Final = 128
"""Up to this many tokens, each has a multiprocessor to itself."""
_LAUNCH_OF_FEW: Final = (32, 4)
"""As `_LAUNCH`. In a step of so many warps, most of the time they wait for one another."""
_FEWEST_CANDIDATES: Final = 128
_BLOCKS = tl.constexpr(8)
"""Blocks of scores that are read at once."""
_LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _keys(scores: tl.tensor, pos: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Scores as int32 keys of the same order. Past `length`: the lowest key."""
    score = tl.load(scores + pos, mask=pos < length, other=0.0)
    return tl.where(pos < length, ordered(score), _LOWEST)


@triton.jit
def _best_of(
    best: tl.tensor,
    scores: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    length: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """`best`, or greater keys of the blocks from `start` on. No load waits for another, or for
    `length`: a row of scores has `width`."""
    at = start + tl.arange(0, WIDTH)
    read: tl.tuple = ()
    for n in tl.static_range(_BLOCKS):
        read += (tl.load(scores + at + n * WIDTH, mask=at + n * WIDTH < width, other=0.0),)
    for n in tl.static_range(_BLOCKS):
        best = tl.maximum(best, tl.where(at + n * WIDTH < length, ordered(read[n]), _LOWEST))
    return best


@triton.jit
def _bounds(low: tl.tensor, high: tl.tensor, BOUNDS: tl.constexpr) -> tl.tensor:
    """Keys `[BOUNDS]` above `low`, up to `high`, which divide this range into equal parts."""
    # Differences of int32 need 32 bits without a sign.
    size = high.to(tl.uint32) - low.to(tl.uint32)
    each = size // (BOUNDS + 1) + 1
    above = tl.minimum((tl.arange(0, BOUNDS) + 1).to(tl.uint32) * each, size)
    return (low.to(tl.uint32) + above).to(tl.int32)


@triton.jit
def _narrowed(
    low: tl.tensor,
    high: tl.tensor,
    bounds: tl.tensor,
    counts: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """New ends of the range of a threshold, given how many keys reach each of `bounds`. They are
    equal if one of these is a threshold."""
    is_reached = counts >= LEAST
    new_low = tl.maximum(low, tl.max(tl.where(is_reached, bounds, low), axis=0))
    new_high = tl.min(tl.where(is_reached, high, bounds - 1), axis=0)
    is_found = tl.max((is_reached & (counts <= MOST)).to(tl.int32), axis=0) > 0
    return new_low, tl.where(is_found, new_low, new_high)


@triton.jit
def _threshold(
    key: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BOUNDS: tl.constexpr,
) -> tl.tensor:
    """A threshold that LEAST to MOST keys reach; if there is none, the highest that at least LEAST
    reach. At least LEAST keys reach `low`, and none exceeds `high`."""
    while low < high:
        bounds = _bounds(low, high, BOUNDS)
        counts = tl.sum((key[:, None] >= bounds[None, :]).to(tl.int32), axis=0)
        low, high = _narrowed(low, high, bounds, counts, LEAST, MOST)
    return low


@triton.jit
def _threshold_of_row(
    scores: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BOUNDS: tl.constexpr,
) -> tl.tensor:
    """`_threshold` of a whole row of scores."""
    places = tl.arange(0, MOST)
    while low < high:
        bounds = _bounds(low, high, BOUNDS)
        counts = tl.zeros([MOST, BOUNDS], tl.int32)
        for start in range(0, length, MOST):
            key = _keys(scores, start + places, length)
            counts += (key[:, None] >= bounds[None, :]).to(tl.int32)
        low, high = _narrowed(low, high, bounds, tl.sum(counts, axis=0), LEAST, MOST)
    return low


@triton.jit
def _columns(x: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The columns of `[ROWS, 4]`. A thread keeps its rows."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _read(scores: tl.tensor, at: tl.tensor, length: tl.tensor) -> tl.tensor:
    """`_keys`, of which four are read at once."""
    score = tl.load(scores + at, mask=at < (length + 3) // 4 * 4, other=0.0)
    return tl.where(at < length, ordered(score), _LOWEST)


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
    target: tl.tensor,
    WIDTH: tl.constexpr,
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
    packed = (key.to(tl.int64) << 32) | pos.to(tl.int64)
    tl.store(target + place, packed, mask=is_kept & (place < WIDTH))
    return until


@triton.jit
def _compact(
    scores: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Copy keys above `low`, and the first `limit` keys that equal it, in their order.

    A thread takes eight keys in a row. Its counts are summed before they are added up across
    threads, and no data move between threads.

    Args:
        scores: A row of scores.
        target: Candidates are written: keys in the upper 32 bits and positions in the lower; WIDTH
            of them, later ones are dropped.

    Returns:
        Number of keys, with dropped ones.
    """
    rows = tl.arange(0, ROWS) * 8
    first_at = rows[:, None] + tl.arange(0, 4)[None, :]
    above = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in range(0, length, ROWS * 8):
        at = start + first_at
        key = _read(scores, at, length)
        next_key = _read(scores, at + 4, length)
        own = tl.sum(_counts(key, low) + _counts(next_key, low), axis=1)
        until = tl.cumsum(own, axis=0) - own
        k0, k1, k2, k3 = _columns(key, ROWS)
        n0, n1, n2, n3 = _columns(next_key, ROWS)
        pos = start + rows
        until = _put(k0, pos, until, low, limit, above, equal, target, WIDTH)
        until = _put(k1, pos + 1, until, low, limit, above, equal, target, WIDTH)
        until = _put(k2, pos + 2, until, low, limit, above, equal, target, WIDTH)
        until = _put(k3, pos + 3, until, low, limit, above, equal, target, WIDTH)
        until = _put(n0, pos + 4, until, low, limit, above, equal, target, WIDTH)
        until = _put(n1, pos + 5, until, low, limit, above, equal, target, WIDTH)
        until = _put(n2, pos + 6, until, low, limit, above, equal, target, WIDTH)
        _put(n3, pos + 7, until, low, limit, above, equal, target, WIDTH)
        total = tl.sum(own, axis=0)
        above += total & 0xFFFF
        equal += total >> 16
    return above + tl.minimum(equal, limit)


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["rows_ptr", "lens_ptr"]
)
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
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Find a threshold that little more than TOPK keys reach, copy these, and choose among them.

    Keys whose positions are equal modulo WIDTH form a group. The TOPK-th best of the groups' best
    keys is reached by at least TOPK keys. By chance few more do: 1.4 times as many if groups are
    large. WIDTH is at least twice TOPK.
    """
    token = tl.program_id(0).to(tl.int64)
    out = out_ptr + token * TOPK
    places = tl.arange(0, WIDTH)
    scores = scores_ptr + token * scores_stride
    await_kernels_before(EARLY)
    length = tl.load(lens_ptr + token).to(tl.int32) // STRIDE
    slots = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
    best = tl.full([WIDTH], _LOWEST, tl.int32)
    best = _best_of(best, scores, 0, scores_stride, length, WIDTH)
    if length <= TOPK:
        every = tl.load(slots + places * STRIDE, mask=places < length, other=-STRIDE) // STRIDE
        tl.store(out + places, every, mask=places < TOPK)
        return
    for start in range(_BLOCKS * WIDTH, length, _BLOCKS * WIDTH):
        best = _best_of(best, scores, start, scores_stride, length, WIDTH)
    low = tl.min(tl.where(places < length, best, 0x7FFFFFFF), axis=0)
    high = tl.max(best, axis=0)
    pos = places
    found = length
    if length > WIDTH:
        low = _threshold(best, low, high, TOPK, TOPK + TOPK // 32, BOUNDS)
        candidates = candidates_ptr + token * WIDTH
        found = _compact(scores, length, low, TOPK, candidates, WIDTH, ROWS)
        if found > WIDTH:
            # The best keys are in few groups.
            low = _threshold_of_row(scores, length, low, high, TOPK, WIDTH, BOUNDS)
            found = _compact(scores, length, low, TOPK, candidates, WIDTH, ROWS)
        tl.debug_barrier()
        packed = tl.load(candidates + places, mask=places < found, other=0)
        best = tl.where(places < found, (packed >> 32).to(tl.int32), _LOWEST)
        pos = packed.to(tl.int32)
    # Read before they are needed, and all at once.
    slot = tl.load(slots + pos * STRIDE, mask=places < found, other=0)
    low = _threshold(best, low, high, TOPK, TOPK, BOUNDS)
    counts = _counts(best, low)
    until = tl.cumsum(counts, axis=0)
    missing = TOPK - (tl.sum(counts, axis=0) & 0xFFFF)
    is_chosen = (best > low) | ((best == low) & (until >> 16 <= missing))
    place = (until & 0xFFFF) + tl.minimum(until >> 16, missing) - 1
    tl.store(out + place, slot // STRIDE, mask=is_chosen)


def choose_slots(
    scores: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    topk: int,
    *,
    out: torch.Tensor | None = None,
    stride: int = 1,
) -> torch.Tensor:
    """The slots of the `topk` best tokens of each list, in the list's order.

    Args:
        scores: fp32 `[num_tokens, longest]`, from `index_scores`.
        table: See `index_scores`, for `rows` and `lens` too.
        out: Contiguous tensor for the result; None: a new one.
        stride: See `index_scores`. Slots divided by it are returned: items of groups.

    Returns:
        int32 `[num_tokens, topk]`. A list of at most `topk` tokens is returned whole, followed by
        -1.
    """
    num_tokens, device = len(scores), scores.device
    assert scores.stride(0) % 4 == 0, "rows of scores are read in groups of four"
    if out is None:
        out = torch.empty((num_tokens, topk), dtype=torch.int32, device=device)
    assert out.is_contiguous()
    width = max(_FEWEST_CANDIDATES, 2 * triton.next_power_of_2(topk))
    candidates = torch.empty((num_tokens, width), dtype=torch.int64, device=device)
    num_warps, bounds = _LAUNCH_OF_FEW if num_tokens <= _FEW_TOKENS else _LAUNCH
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
        STRIDE=stride,
        ROWS=32 * num_warps,
        BOUNDS=bounds,
        num_warps=num_warps,
        **early_start(scores),
    )
    return out
