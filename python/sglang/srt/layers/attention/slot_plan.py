"""Plans how to read each request's context from the pool: a view if its slots are consecutive.

Pure decisions on the CPU, once per batch and shared by all layers. Units: a slot is a row of the
pool; a context is a list of slots in token order, in whole pages except for the last.

Measured (2 cores, 2 KV heads of 32, bf16, one layer, 16 requests): at 300 tokens each, one
padded gather takes 0.20 ms and a view per request 0.38 ms; at 2,000 1.21 and 1.18; at 6,000
5.0 and 4.0. A view saves the copy but costs its own kernel call, so it pays from about `VIEW_BYTES`
of keys and values on. For fp32 the break-even is at the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

VIEW_BYTES = 384 << 10
"""Runs with at least this many bytes of keys and values in one layer are read as views."""
SPLIT_TOKENS = 2048
"""Padding, in tokens, above which one more gather is worth its calls."""

Slots = npt.NDArray[np.int32]
"""int32 `[tokens]`: slots of consecutive tokens."""


class Run(NamedTuple):
    """Consecutive tokens in consecutive slots: tokens `[begin, end)` in slots from `slot` on."""

    begin: int
    end: int
    slot: int


class View(NamedTuple):
    """`length` tokens of batch row `row`, from `slot` on."""

    row: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Tokens of several requests that are copied together, padded to the longest."""

    rows: list[int]
    row_index: torch.Tensor | None
    """int64 `[len(rows)]`: `rows` on the device; None: the whole batch in its order."""
    slots: torch.Tensor
    """int64 `[len(rows) * width]`. Padding repeats a slot of the same row, so all data is valid."""
    width: int
    """Tokens of the longest row."""
    mask: torch.Tensor | None
    """`[len(rows), 1, 1, width]`, 0 or -inf; None: nothing is padded."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Parts that together cover the context of every row once."""

    views: list[View]
    gathers: list[Gather]
    owners: torch.Tensor
    """int64 `[parts]`: batch row of each part, in the order views, then gathers' rows."""
    order: torch.Tensor | None
    """int64 `[bs]`: the part of each row; None: some rows have several parts to merge."""
    in_order: bool
    """True if the parts are the rows in order, so that no output has to move."""


def longest_run(slots: Slots, page_size: int) -> Run:
    """The longest piece of a context that lies in consecutive slots.

    Args:
        slots: int32 `[tokens]`, at least one; pages are consecutive inside.
    """
    firsts = slots[::page_size]
    breaks = np.flatnonzero(np.diff(firsts) != page_size) + 1
    if not len(breaks):
        return Run(0, len(slots), int(slots[0]))
    bounds = np.concatenate(([0], breaks, [len(firsts)]))
    best = int(np.diff(bounds).argmax())
    begin = int(bounds[best]) * page_size
    end = min(int(bounds[best + 1]) * page_size, len(slots))
    return Run(begin, end, int(slots[begin]))


def plan_decode(
    contexts: Sequence[Slots],
    *,
    page_size: int,
    view_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DecodePlan:
    """Decide how a decode step reads the contexts of its requests.

    Args:
        contexts: Slots of each request, the new token's included.
        view_tokens: Shortest run, in tokens, that is cheaper to view than to copy.
        dtype: Dtype of the masks.
        device: The pool's device, for the tensors of the plan.
    """
    views: list[View] = []
    pieces: list[tuple[int, Slots]] = []
    for row, slots in enumerate(contexts):
        if len(slots) < view_tokens and len(contexts) > 1:
            pieces.append((row, slots))
            continue
        run = longest_run(slots, page_size)
        whole = run.end - run.begin == len(slots)
        if not whole and run.end - run.begin < view_tokens:
            pieces.append((row, slots))
            continue
        views.append(View(row, run.slot, run.end - run.begin))
        if not whole:
            pieces.append((row, np.concatenate((slots[: run.begin], slots[run.end :]))))
    buckets = _bucket_by_length(pieces)
    gathers = [_make_gather(bucket, len(contexts), dtype, device) for bucket in buckets]
    parts = [view.row for view in views] + [row for gather in gathers for row in gather.rows]
    single = len(parts) == len(contexts)
    owners = torch.tensor(parts, device=device)
    return DecodePlan(
        views=views,
        gathers=gathers,
        owners=owners,
        order=owners.argsort() if single else None,
        in_order=parts == list(range(len(contexts))),
    )


def _bucket_by_length(pieces: list[tuple[int, Slots]]) -> list[list[tuple[int, Slots]]]:
    """Split pieces into buckets; no bucket pads more than another gather would cost."""
    buckets: list[list[tuple[int, Slots]]] = []
    left = sorted(pieces, key=lambda piece: -len(piece[1]))
    begin = 0
    for i, (_, slots) in enumerate(left):
        if (len(left[begin][1]) - len(slots)) * (len(left) - i) > SPLIT_TOKENS:
            buckets.append(left[begin:i])
            begin = i
    if left:
        buckets.append(left[begin:])
    return [sorted(bucket, key=lambda piece: piece[0]) for bucket in buckets]


def _make_gather(
    pieces: list[tuple[int, Slots]], batch_size: int, dtype: torch.dtype, device: torch.device | str
) -> Gather:
    lens = np.array([len(slots) for _, slots in pieces])
    width = int(lens.max())
    padded = np.empty((len(pieces), width), dtype=np.int64)
    for i, (_, slots) in enumerate(pieces):
        padded[i, : len(slots)] = slots
        padded[i, len(slots) :] = slots[0]
    mask = None
    if int(lens.min()) < width:
        hidden = torch.from_numpy(np.arange(width) >= lens[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.view(len(pieces), 1, 1, width).to(device)
    rows = [row for row, _ in pieces]
    row_index = torch.tensor(rows, device=device) if len(rows) < batch_size else None
    return Gather(rows, row_index, torch.from_numpy(padded).view(-1).to(device), width, mask)


@dataclass(frozen=True, slots=True)
class ExtendSegment:
    """One request of an extend step: rows `[begin, end)` of the batch's tokens."""

    begin: int
    end: int
    prefix_run: Run | None
    """Run of the whole prefix if its slots are consecutive, else None."""
    prefix_slots: torch.Tensor | None
    """int64 `[prefix]`: slots of a prefix that is no run. Without a prefix, both are None."""


def plan_extend(
    prefixes: Sequence[Slots],
    extend_lens: Sequence[int],
    *,
    page_size: int,
    device: torch.device | str,
) -> list[ExtendSegment]:
    """Decide how an extend step reads the prefixes of its requests.

    Args:
        prefixes: For each request, the slots of tokens that the pool already holds; may be empty.
        extend_lens: New tokens of each request.
        device: The pool's device, for the tensors of the plan.
    """
    segments = []
    begin = 0
    for slots, num_new in zip(prefixes, extend_lens, strict=True):
        run: Run | None = None
        scattered: torch.Tensor | None = None
        if len(slots):
            run = longest_run(slots, page_size)
            if run.end - run.begin < len(slots):
                run, scattered = None, torch.from_numpy(slots.astype(np.int64)).to(device)
        segments.append(ExtendSegment(begin, begin + num_new, run, scattered))
        begin += num_new
    return segments
