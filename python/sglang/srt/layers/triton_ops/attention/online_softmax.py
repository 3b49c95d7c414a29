"""Online softmax of query rows over a range of a paged context, for decode and extend."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_range(  # type: ignore[no-untyped-def]  # noqa: ANN201
    first: tl.tensor,
    last: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    least: tl.tensor,
    BLOCK_N: tl.constexpr,
):
    """The tokens `[begin, end)` of `[first, last)` that belong to one split, and the number of
    splits that are not empty.

    A split has whole blocks, and at least `least` tokens if there are as many. Splits past the last
    token are empty.
    """
    wanted = tl.minimum(splits, tl.maximum((last - first) // least, 1))
    per_part = tl.cdiv(tl.cdiv(last - first, wanted), BLOCK_N) * BLOCK_N
    begin = first + split * per_part
    return begin, tl.minimum(begin + per_part, last), tl.cdiv(last - first, per_part)


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    q_pos: tl.tensor,
    scale: tl.tensor,
    slot_stride: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One pass of online softmax (Milakov and Gimelshein, 2018), base 2.

    Slots of the context are looked up token by token, so one kernel serves all page sizes. EVEN:
    the range is whole blocks, and every row sees all of it.
    """
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        pos = start + tokens
        if EVEN:
            slot = tl.load(slots_ptr + pos).to(tl.int64)
        else:
            # Past the end: slot 0, the padding page, whose values are finite.
            slot = tl.load(slots_ptr + pos, mask=pos < end, other=0).to(tl.int64)
        at = slot[:, None] * slot_stride + dims[None, :]
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + at)
        else:
            k = tl.load(k_ptr + at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        seen = pos[None, :] < end
        if CAUSAL:
            seen = seen & (pos[None, :] <= q_pos[:, None])
        if WINDOW > 0:
            seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
        p, shrink, peak, mass = weigh(q, k, seen, peak, mass, scale, EVEN)
        if HEAD_DIM == BLOCK_D:
            v = tl.load(v_ptr + at)
        else:
            v = tl.load(v_ptr + at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="tf32x3")
    return peak, mass, acc


@triton.jit
def weigh(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q: tl.tensor,
    k: tl.tensor,
    seen: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    scale: tl.tensor,
    EVEN: tl.constexpr,
):
    """Weights of one block's values, the factor for the sums before it, and the new peak and mass.

    EVEN: every row sees all of the block, and `seen` is ignored.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="tf32x3") * scale
    if not EVEN:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    if EVEN:
        base = new_peak
    else:
        # For a row that has seen nothing yet, -inf minus -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    p = tl.exp2(scores - base[:, None])
    return p, shrink, new_peak, mass * shrink + tl.sum(p, axis=1)
