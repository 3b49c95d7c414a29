"""Rows of groups of tokens, and the tokens that wait for the end of their group; the computation is
that of `layers/compressed/compressor.py`.

A row reads the tokens of its group and, with an overlap, those of the group before. A token is in
one of three places, by its position: among the step's own, among those of its request's open group,
or among the kept halves of the last finished group. No plan is needed but the bounds of requests.
In a decode step one program does all for a row of a request. In a prefill a second kernel stores
what later steps need, because other programs read what it overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.early_start import await_kernels_before, early_start

_TOKENS: Final = 8
"""Most tokens of a group that a program reads at once."""
_COLUMNS: Final = 256
"""Columns of tokens that a program stores."""
_WARPS: Final = 4


@triton.jit
def _add_tokens(  # type: ignore[no-untyped-def]  # noqa: ANN202
    values: tl.tensor,
    gates: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
):
    """Add tokens to a softmax of gates, channel by channel. Tokens with gates of -inf are none."""
    new_peak = tl.maximum(peak, tl.max(gates, axis=0))
    # For a channel that has seen nothing yet, -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp(peak - base)
    weights = tl.exp(gates - base[None, :])
    acc = acc * shrink + tl.sum(values * weights, axis=0)
    return new_peak, mass * shrink + tl.sum(weights, axis=0), acc


@triton.jit
def _either(
    is_new: tl.tensor,
    new_at: tl.tensor,
    old_at: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """The step's own tokens, and others where `is_new` is false. fp32."""
    new = tl.load(new_at, mask=inside & is_new[:, None], other=0.0).to(tl.float32)
    old = tl.load(old_at, mask=inside & ~is_new[:, None], other=0.0).to(tl.float32)
    return tl.where(is_new[:, None], new, old)


@triton.jit
def _row_of(
    group: tl.tensor,
    prefix: tl.tensor,
    own: tl.tensor,
    opened: tl.tensor,
    kept: tl.tensor,
    ape: tl.tensor,
    stride: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """The average of a group's tokens, weighted by their gates, fp32 `[BLOCK_D]`.

    Args:
        own: Pointer to where the request's first token would be among the step's own tokens.
        opened: Pointer to the request's open group; `kept` likewise.
    """
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    peak = tl.full([BLOCK_D], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    begin = group * RATIO
    for start in range(0, RATIO, TOKENS):
        place = start + tl.arange(0, TOKENS)
        is_new = begin + place >= prefix
        inside = (place < RATIO)[:, None] & is_dim[None, :]
        column = (WIDTH - DIM + dims)[None, :]
        new_at = own + (begin + place).to(tl.int64)[:, None] * stride + column
        old_at = opened + place[:, None] * (2 * WIDTH) + column
        values = _either(is_new, new_at, old_at, inside)
        gates = _either(is_new, new_at + WIDTH, old_at + WIDTH, inside)
        gates += tl.load(ape + place[:, None] * WIDTH + column, mask=inside, other=0.0)
        gates = tl.where((place < RATIO)[:, None], gates, float("-inf"))
        peak, mass, acc = _add_tokens(values, gates, peak, mass, acc)
    if WIDTH > DIM:
        for start in range(0, RATIO, TOKENS):
            place = start + tl.arange(0, TOKENS)
            position = begin - RATIO + place
            is_there = (place < RATIO) & (position >= 0)
            inside = is_there[:, None] & is_dim[None, :]
            column = dims[None, :]
            is_new = position >= prefix
            # The group before is the open one, or was finished by an earlier step.
            was_open = (begin - RATIO) >= prefix // RATIO * RATIO
            new_at = own + position.to(tl.int64)[:, None] * stride + column
            open_at = opened + place[:, None] * (2 * WIDTH) + column
            kept_at = kept + place[:, None] * (2 * DIM) + column
            old_at = tl.where(was_open, open_at, kept_at)
            values = _either(is_new, new_at, old_at, inside)
            old_at = tl.where(was_open, open_at + WIDTH, kept_at + DIM)
            gates = _either(is_new, new_at + WIDTH, old_at, inside)
            gates += tl.load(ape + place[:, None] * WIDTH + column, mask=inside, other=0.0)
            gates = tl.where(is_there[:, None], gates, float("-inf"))
            peak, mass, acc = _add_tokens(values, gates, peak, mass, acc)
    return acc / mass


@triton.jit
def _store_row(
    row: tl.tensor,
    target: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Normalise and rotate a row, and store it."""
    dims = tl.arange(0, BLOCK_D)
    dtype = cos.dtype.element_ty
    row = tl.where(dims < DIM, row, 0.0)
    factor = tl.rsqrt(tl.sum(row * row, axis=0) / DIM + eps)
    row = row * factor * tl.load(norm + dims, mask=dims < DIM, other=0.0)
    first, second = tl.split(tl.reshape(row.to(dtype).to(tl.float32), [BLOCK_D // 2, 2]))
    pair = tl.arange(0, BLOCK_D // 2)
    place = pair - (DIM - ROTARY) // 2
    is_turned = (place >= 0) & (place < ROTARY // 2)
    c = tl.load(cos + place, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + ROTARY // 2 + place, mask=is_turned, other=0.0).to(tl.float32)
    to = target.dtype.element_ty
    tl.store(target + 2 * pair, (first * c - second * s).to(dtype).to(to), mask=pair < DIM // 2)
    tl.store(target + 2 * pair + 1, (second * c + first * s).to(dtype).to(to), mask=pair < DIM // 2)


@triton.jit
def _finish_group(
    tokens: tl.tensor,
    opened: tl.tensor,
    kept: tl.tensor,
    rows: tl.tensor,
    ape: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    loc: tl.tensor,
    begin: tl.tensor,
    prefix: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DECODE: tl.constexpr,
) -> None:
    """Make the row of the request's group `program_id(0)` of those that the step finishes, if there
    is one. DECODE: store what later steps need, too."""
    group = prefix // RATIO + tl.program_id(0)
    own = tokens + (begin - prefix) * stride
    if group < length // RATIO:
        last = begin + (group + 1) * RATIO - 1 - prefix
        row = _row_of(
            group, prefix, own, opened, kept, ape, stride, RATIO, DIM, WIDTH, TOKENS, BLOCK_D
        )
        item = tl.load(loc + last).to(tl.int64) // RATIO
        angles = last * ROTARY
        _store_row(
            row, rows + item * DIM, norm, cos + angles, sin + angles, eps, DIM, ROTARY, BLOCK_D
        )
        if DECODE and WIDTH > DIM:
            # Every thread must have read the old halves before any of them is overwritten.
            tl.debug_barrier()
            for start in range(0, 2 * DIM, BLOCK_C):
                column = start + tl.arange(0, BLOCK_C)
                halves = _halves(
                    group, prefix, own, opened, column, stride, RATIO, DIM, WIDTH, PLACES
                )
                _store_halves(kept, halves, column, RATIO, DIM, PLACES)
    elif DECODE:
        at = opened + prefix % RATIO * (2 * WIDTH)
        for start in range(0, 2 * WIDTH, BLOCK_C):
            column = start + tl.arange(0, BLOCK_C)
            token = tl.load(tokens + begin * stride + column, mask=column < 2 * WIDTH, other=0.0)
            tl.store(at + column, token.to(opened.dtype.element_ty), mask=column < 2 * WIDTH)


@triton.jit(
    do_not_specialize_on_alignment=["bounds_ptr", "lens_ptr", "owners_ptr", "read_ptr", "loc_ptr"],
)
def _rows_kernel(
    tokens: tl.tuple,
    opened: tl.tuple,
    kept: tl.tuple,
    rows: tl.tuple,
    apes: tl.tuple,
    norms: tl.tuple,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    owners_ptr: tl.tensor,
    read_ptr: tl.tensor,
    loc_ptr: tl.tensor,
    strides: tl.tuple,
    eps: tl.tensor,
    RATIO: tl.constexpr,
    DIMS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROTARY: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS_D: tl.constexpr,
    BLOCKS_C: tl.constexpr,
    KINDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid `(groups, bs, KINDS)`: one program makes a row of one kind, by `_finish_group`. Tuples
    have an element of each kind. Without `bounds_ptr`, it is a decode step."""
    request = tl.program_id(1).to(tl.int64)
    # Written before the lookup of embeddings, which does not start early.
    length = tl.load(lens_ptr + request).to(tl.int32)
    begin = request
    prefix = length - 1
    if bounds_ptr is not None:
        begin = tl.load(bounds_ptr + request).to(tl.int64)
        prefix = length - (tl.load(bounds_ptr + request + 1).to(tl.int64) - begin).to(tl.int32)
    owner = tl.load(owners_ptr + request).to(tl.int64)
    read = tl.load(read_ptr + request).to(tl.int64)
    await_kernels_before(EARLY)
    for kind in tl.static_range(KINDS):
        if tl.program_id(2) == kind:
            of_group = opened[kind] + owner * ((RATIO - 1) * 2 * WIDTHS[kind])
            of_last = of_group
            if WIDTHS[kind] > DIMS[kind]:
                of_last = kept[kind] + read * (RATIO * 2 * DIMS[kind])
            _finish_group(
                tokens[kind], of_group, of_last, rows[kind], apes[kind], norms[kind], cos_ptr,
                sin_ptr, loc_ptr, begin, prefix, length, strides[kind], eps, RATIO, DIMS[kind],
                WIDTHS[kind], ROTARY, PLACES, TOKENS, BLOCKS_D[kind], BLOCKS_C[kind],
                bounds_ptr is None,
            )  # fmt: skip


@triton.jit
def _halves(
    group: tl.tensor,
    prefix: tl.tensor,
    own: tl.tensor,
    opened: tl.tensor,
    column: tl.tensor,
    stride: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
) -> tl.tensor:
    """The halves of the tokens of a group that the step finishes, `[PLACES, columns]`: values and
    gates for the row of the next group."""
    place = tl.arange(0, PLACES)
    position = group * RATIO + place
    is_new = position >= prefix
    inside = (place < RATIO)[:, None] & (column < 2 * DIM)[None, :]
    source = tl.where(column < DIM, column, WIDTH - DIM + column)[None, :]
    new_at = own + position.to(tl.int64)[:, None] * stride + source
    return _either(is_new, new_at, opened + place[:, None] * (2 * WIDTH) + source, inside)


@triton.jit
def _store_halves(
    kept: tl.tensor,
    halves: tl.tensor,
    column: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    place = tl.arange(0, PLACES)
    inside = (place < RATIO)[:, None] & (column < 2 * DIM)[None, :]
    at = kept + place[:, None] * (2 * DIM) + column[None, :]
    tl.store(at, halves.to(kept.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "bounds_ptr", "lens_ptr", "owners_ptr", "read_ptr", "slots_ptr", "track_ptr",
        "track_lens_ptr",
    ],
)  # fmt: skip
def _keep_kernel(
    tokens_ptr: tl.tensor,
    open_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    owners_ptr: tl.tensor,
    read_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    track_ptr: tl.tensor,
    track_lens_ptr: tl.tensor,
    stride: tl.tensor,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Grid `(bs, columns / BLOCK_C)`: one program stores some columns of a request's last finished
    group, of that before its snapshot, and of its open group."""
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(bounds_ptr + request).to(tl.int64)
    new = (tl.load(bounds_ptr + request + 1).to(tl.int64) - begin).to(tl.int32)
    if new == 0:
        return
    length = tl.load(lens_ptr + request).to(tl.int32)
    prefix = length - new
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    opened = open_ptr + tl.load(owners_ptr + request).to(tl.int64) * ((RATIO - 1) * 2 * WIDTH)
    own = tokens_ptr + (begin - prefix) * stride
    last = length // RATIO
    if WIDTH > DIM:
        # Halves have half of a token's columns, so these programs have them all.
        size = RATIO * 2 * DIM
        slot = tl.load(slots_ptr + request).to(tl.int64)
        # Columns of the open group, in the order of halves: a program reads no others before its
        # barrier.
        is_half = (column < DIM) | ((column >= WIDTH) & (column < WIDTH + DIM))
        half = tl.where(column < DIM, column, column - WIDTH + DIM)
        half = tl.where(is_half, half, 2 * DIM)
        if track_ptr is not None:
            track = tl.load(track_lens_ptr + request).to(tl.int32)
            if track > 0:
                group = (prefix + track) // RATIO - 1
                halves = _halves(
                    group, prefix, own, opened, half, stride, RATIO, DIM, WIDTH, PLACES
                )
                target = kept_ptr + tl.load(track_ptr + request).to(tl.int64) * size
                _store_halves(target, halves, half, RATIO, DIM, PLACES)
        if last > prefix // RATIO:
            halves = _halves(last - 1, prefix, own, opened, half, stride, RATIO, DIM, WIDTH, PLACES)
        else:
            place = tl.arange(0, PLACES)
            source = kept_ptr + tl.load(read_ptr + request).to(tl.int64) * size
            inside = (place < RATIO)[:, None] & (half < 2 * DIM)[None, :]
            old_at = source + place[:, None] * (2 * DIM) + half[None, :]
            halves = tl.load(old_at, mask=inside, other=0.0).to(tl.float32)
        _store_halves(kept_ptr + slot * size, halves, half, RATIO, DIM, PLACES)
        # Every thread must have read the open group before any token of it is overwritten.
        tl.debug_barrier()
    for start in range(0, RATIO, PLACES):
        place = start + tl.arange(0, PLACES)
        position = last * RATIO + place
        is_kept = (position >= prefix) & (position < length)
        inside = is_kept[:, None] & (column < 2 * WIDTH)[None, :]
        new_at = own + position.to(tl.int64)[:, None] * stride + column[None, :]
        token = tl.load(new_at, mask=inside, other=0.0).to(open_ptr.dtype.element_ty)
        tl.store(opened + place[:, None] * (2 * WIDTH) + column[None, :], token, mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWeights:
    """Weights that make a row from the tokens of a group."""

    position: torch.Tensor
    """fp32 `[ratio, width]`: added to gates."""
    norm: torch.Tensor
    """fp32 `[dim]`: weight of the norm of rows."""
    eps: float
    angles: tuple[torch.Tensor, torch.Tensor]
    """Cosines and signed sines, contiguous `[num_tokens, 1, rotary_dim]` each: those of the first
    position of each token's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffers:
    """One layer's buffers of one kind of row; contiguous."""

    rows: torch.Tensor
    """`[items, dim]`."""
    opened: torch.Tensor
    """`[requests, ratio - 1, 2 * width]`: values and gates of the tokens of open groups."""
    kept: torch.Tensor | None
    """`[slots, ratio, 2 * dim]`: those of the last finished group, for the row after it; a token's
    first half. None: a row reads its own group alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequests:
    """The requests of a step: integers on the device."""

    lens: torch.Tensor
    """`[bs]`: lengths of the contexts, the new tokens included."""
    owners: torch.Tensor
    """`[bs]`: each request's slot of open groups."""
    slots: torch.Tensor
    """`[bs]`: slots of kept halves that the step writes."""
    loc: torch.Tensor
    """`[num_tokens]`: slots of the tokens. A row is in the item of its group's last token."""
    read_slots: torch.Tensor
    """`[bs]`: slots of kept halves that requests continue from."""
    bounds: torch.Tensor | None = None
    """`[bs + 1]`: begin and end of each request's tokens; None: a decode step."""
    most_new: int = 1
    """Most new tokens of a request."""
    track_slots: torch.Tensor | None = None
    """`[bs]`: slots for snapshots; None: there are none."""
    track_lens: torch.Tensor | None = None
    """`[bs]`: new tokens before each request's snapshot, which is at a group's end; 0: none."""


class RowKind(NamedTuple):
    """A kind of row of one layer, and what a step gives it."""

    tokens: torch.Tensor
    """`[num_tokens, 2 * width]` with dense rows: values and gates. If rows read two groups, `width`
    is twice their `dim`, and the first half is for the next group's row."""
    weights: GroupWeights
    buffers: GroupBuffers


def store_groups(kinds: Sequence[RowKind], step: StepRequests) -> None:
    """Store the rows of the groups that a step finishes, and what later steps need of its tokens.

    Args:
        kinds: Of the same ratio, epsilon and angles.
    """
    first = kinds[0].weights
    ratio, rotary = len(first.position), first.angles[0].shape[-1]
    dims = tuple(kind.buffers.rows.shape[-1] for kind in kinds)
    widths = tuple(kind.weights.position.shape[1] for kind in kinds)
    for (tokens, weights, buffers), dim, width in zip(kinds, dims, widths, strict=True):
        kept = buffers.kept
        assert tokens.stride(1) == 1 and tokens.shape[1] == 2 * width
        assert buffers.rows.is_contiguous() and buffers.opened.is_contiguous()
        assert width == dim if kept is None else width == 2 * dim and kept.is_contiguous()
        assert dim % 2 == rotary % 2 == 0
        assert (len(weights.position), weights.eps) == (ratio, first.eps)
    places = int(triton.next_power_of_2(ratio))
    blocks = tuple(int(triton.next_power_of_2(dim)) for dim in dims)
    groups = 1 if step.bounds is None else step.most_new // ratio + 1
    _rows_kernel[(groups, len(step.lens), len(kinds))](
        tuple(kind.tokens for kind in kinds),
        tuple(kind.buffers.opened for kind in kinds),
        tuple(kind.buffers.kept for kind in kinds),
        tuple(kind.buffers.rows for kind in kinds),
        tuple(kind.weights.position for kind in kinds),
        tuple(kind.weights.norm for kind in kinds),
        *first.angles,
        step.bounds,
        step.lens,
        step.owners,
        step.read_slots,
        step.loc,
        tuple(kind.tokens.stride(0) for kind in kinds),
        first.eps,
        RATIO=ratio,
        DIMS=dims,
        WIDTHS=widths,
        ROTARY=rotary,
        PLACES=places,
        TOKENS=min(_TOKENS, places),
        BLOCKS_D=blocks,
        BLOCKS_C=tuple(min(4 * _COLUMNS, 2 * block) for block in blocks),
        KINDS=len(kinds),
        num_warps=_WARPS,
        **early_start(kinds[0].tokens),
    )
    if step.bounds is None:
        return
    for (tokens, _, buffers), dim, width in zip(kinds, dims, widths, strict=True):
        _keep_kernel[(len(step.lens), triton.cdiv(2 * width, _COLUMNS))](
            tokens, buffers.opened, buffers.kept, step.bounds, step.lens, step.owners,
            step.read_slots, step.slots, step.track_slots, step.track_lens, tokens.stride(0),
            RATIO=ratio, DIM=dim, WIDTH=width, BLOCK_C=_COLUMNS, num_warps=_WARPS,
            PLACES=places if buffers.kept is not None else min(_TOKENS, places),
        )  # fmt: skip
