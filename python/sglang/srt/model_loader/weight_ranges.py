"""Ranges that ranks hold of a split tensor, and their places under another split. Pure functions.

A tensor is split along one dimension, which consists of runs that are split one by one (queries,
keys and values in one matrix are three runs). A rank holds a range of each run, one after the
other. Indices are those of the whole tensor's dimension.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

Range: TypeAlias = tuple[int, int]
"""Begin and end."""

GRID_SIZES: Final = (1, 2, 4, 8)
"""Numbers of ranks at whose bounds checksums are split, independent of the seed's own split."""


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The part of a dimension that one rank holds.

    Attributes:
        ranges: The held range of each run, ascending; empty ones are left out.
        grid: Bounds between the parts with checksums, ascending.
    """

    ranges: tuple[Range, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range], runs: Sequence[int]) -> HeldRanges:
        """Args:
        ranges: One range for each run.
        runs: Lengths of the runs; empty: the dimension is never split.
        """
        held = tuple((begin, end) for begin, end in ranges if begin < end)
        return cls(held, tuple(grid_of(runs)))

    @property
    def size(self) -> int:
        """Number of elements of the dimension that the rank holds."""
        return sum(end - begin for begin, end in self.ranges)

    def cells(self) -> list[Range]:
        """The parts with checksums, ascending."""
        return cut_at(self.ranges, self.grid)

    def offset_of(self, part: Range) -> int | None:
        """Index of the first element of `part` among the held ones; None: not all of `part` is
        held."""
        offset = 0
        for begin, end in self.ranges:
            if begin <= part[0] and part[1] <= end:
                return offset + part[0] - begin
            offset += end - begin
        return None


def grid_of(runs: Sequence[int]) -> list[int]:
    """Bounds of the shares of each number of ranks of `GRID_SIZES`, in all runs."""
    grid: set[int] = set()
    for begin, length in zip(accumulate(runs, initial=0), runs, strict=False):
        for count in GRID_SIZES:
            share = -(-length // count)
            grid.update(begin + min(share * place, length) for place in range(count + 1))
    return sorted(grid)


def cut_at(ranges: Iterable[Range], cuts: Sequence[int]) -> list[Range]:
    """Cut ranges at `cuts`, which are ascending."""
    parts = []
    for begin, end in ranges:
        within = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        parts += list(zip((begin, *within), (*within, end), strict=True))
    return parts


def common_parts(wanted: HeldRanges, holders: Sequence[HeldRanges]) -> list[Range]:
    """Cut `wanted` into parts that each holder has wholly or not at all."""
    bounds = {bound for holder in holders for part in holder.ranges for bound in part}
    return cut_at(wanted.ranges, sorted(bounds))


class EvenSpread:
    """Chooses among replicas: the one with the fewest assigned bytes.

    Args:
        num_holders: Number of replicas.
        first: The replica that is preferred among equals; then those after it.
    """

    def __init__(self, num_holders: int, first: int) -> None:
        self.num_bytes = [0] * num_holders
        self._first = first

    def choose(self, candidates: Sequence[int], num_bytes: int) -> int:
        """Choose one of `candidates`, and assign `num_bytes` to it."""
        count = len(self.num_bytes)
        chosen = min(
            candidates,
            key=lambda holder: (self.num_bytes[holder], (holder - self._first) % count),
        )
        self.num_bytes[chosen] += num_bytes
        return chosen
