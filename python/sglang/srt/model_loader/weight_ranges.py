"""Ranges of a split tensor that ranks hold, and their place under another split. Pure functions.

A tensor is split along one dimension. The dimension consists of runs, and each run is split over
the ranks (queries, keys and values in one matrix are three runs). A rank holds a range of each run,
in order. Indices are those of the whole dimension.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

Range: TypeAlias = tuple[int, int]
"""First index, and the index after the last."""

GRID_SIZES: Final = (1, 2, 4, 8)
"""Numbers of ranks whose bounds divide the checksums, independent of the seed's own split."""


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The part of a dimension that one rank holds.

    Attributes:
        ranges: The held range of each run, ascending, without empty ranges.
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
        """Index among the held elements of the first one of `part`; None: `part` is not held
        completely."""
        offset = 0
        for begin, end in self.ranges:
            if begin <= part[0] and part[1] <= end:
                return offset + part[0] - begin
            offset += end - begin
        return None


def grid_of(runs: Sequence[int]) -> list[int]:
    """Bounds, in all runs, of the shares of each number of ranks in `GRID_SIZES`."""
    grid: set[int] = set()
    for begin, length in zip(accumulate(runs, initial=0), runs, strict=False):
        for count in GRID_SIZES:
            share = -(-length // count)
            grid.update(begin + min(share * place, length) for place in range(count + 1))
    return sorted(grid)


def cut_at(ranges: Iterable[Range], cuts: Sequence[int]) -> list[Range]:
    """Cut ranges at the ascending `cuts`."""
    parts = []
    for begin, end in ranges:
        within = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        parts += list(zip((begin, *within), (*within, end), strict=True))
    return parts


def common_parts(wanted: HeldRanges, holders: Sequence[HeldRanges]) -> list[Range]:
    """Cut `wanted` into parts that each holder has completely or not at all."""
    bounds = {bound for holder in holders for part in holder.ranges for bound in part}
    return cut_at(wanted.ranges, sorted(bounds))


class EvenSpread:
    """Chooses the replica with the fewest assigned bytes.

    Args:
        num_holders: Number of replicas.
        first: The preferred replica among equals, followed by those after it.
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
