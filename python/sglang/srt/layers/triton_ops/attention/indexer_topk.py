"""The top-k tokens that sparse attention (DSA) reads, by an indexer's scores, on a GPU.

The results are those of `layers/attention/dsa_backend.py`, even for ties: among equal scores the
first tokens win.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.ordered import ordered

_CHOICE_WARPS: Final = 8
_FEW_TOKENS: Final = 128
"""Up to this many tokens, each has a multiprocessor to itself."""
_CHOICE_WARPS_OF_FEW: Final = 32
_FEWEST_CANDIDATES: Final = 128


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
    STRIDE: tl.constexpr,
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
        slot = tl.load(slots + pos * STRIDE, mask=is_kept, other=0) // STRIDE
        tl.store(target + place, slot, mask=is_kept)
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
    STRIDE: tl.constexpr,
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
        until = _put(k0, p0, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        until = _put(k1, p1, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        until = _put(k2, p2, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        until = _put(k3, p3, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        k0, k1, k2, k3 = _columns(next_key, ROWS)
        p0, p1, p2, p3 = _columns(next_pos, ROWS)
        until = _put(k0, p0, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        until = _put(k1, p1, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        until = _put(k2, p2, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
        _put(k3, p3, until, low, limit, above, equal, slots, target, WIDTH, STRIDE, IS_LAST)
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
) -> None:
    """Find a threshold that little more than TOPK keys reach, copy these, and choose among them.

    Keys whose positions are equal modulo WIDTH form a group. The TOPK-th best of the groups' best
    keys is reached by at least TOPK keys. By chance few more do: 1.4 times as many if groups are
    large. WIDTH is at least twice TOPK.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + token).to(tl.int32) // STRIDE
    slots = table_ptr + tl.load(rows_ptr + token).to(tl.int64) * table_stride
    out = out_ptr + token * TOPK
    places = tl.arange(0, WIDTH)
    if length <= TOPK:
        found = tl.load(slots + places * STRIDE, mask=places < length, other=-STRIDE) // STRIDE
        tl.store(out + places, found, mask=places < TOPK)
        return
    scores = scores_ptr + token * scores_stride
    best = _keys(scores, places, length)
    if length <= WIDTH:
        low = tl.min(tl.where(places < length, best, 0x7FFFFFFF), axis=0)
        low = _threshold(best, low, tl.max(best, axis=0), TOPK, TOPK)
        missing = TOPK - tl.sum((best > low).to(tl.int32), axis=0)
        _compact(scores, length, low, missing, slots, out, WIDTH, STRIDE, ROWS, False, True)
        return
    whole = length // WIDTH * WIDTH
    for start in range(WIDTH, whole, WIDTH):
        best = tl.maximum(best, ordered(tl.load(scores + start + places)))
    best = tl.maximum(best, _keys(scores, whole + places, length))
    high = tl.max(best, axis=0)
    low = _threshold(best, tl.min(best, axis=0), high, TOPK, TOPK + TOPK // 32)
    candidates = candidates_ptr + token * WIDTH
    found = _compact(
        scores, length, low, TOPK, slots, candidates, WIDTH, STRIDE, ROWS, False, False
    )
    if found > WIDTH:
        # The best keys are in few groups.
        low = _threshold_of_row(scores, length, low, high, TOPK, WIDTH)
        found = _compact(
            scores, length, low, TOPK, slots, candidates, WIDTH, STRIDE, ROWS, False, False
        )
    tl.debug_barrier()
    best, _ = _read(candidates, places, found, True)
    low = _threshold(best, low, high, TOPK, TOPK)
    missing = TOPK - tl.sum((best > low).to(tl.int32), axis=0)
    _compact(candidates, found, low, missing, slots, out, WIDTH, STRIDE, ROWS, True, True)


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
        STRIDE=stride,
        ROWS=32 * num_warps,
        num_warps=num_warps,
    )
    return out
