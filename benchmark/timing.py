"""Clocks and statistics that several measurements share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that pass during one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def gb_per_second(num_bytes: int, work: Callable[[], object]) -> float:
    """GB (10^9 bytes) per second of `work`, which moves `num_bytes`."""
    return num_bytes / seconds_of(work) / 1e9


def median_us(work: Callable[[], object], rounds: int, clock: Callable[[], int]) -> float:
    """Median microseconds of one call, after one that does not count.

    Args:
        clock: Nanoseconds that have passed, for example of this thread's CPU.
    """
    work()
    taken = []
    for _ in range(rounds):
        begun = clock()
        work()
        taken.append((clock() - begun) / 1e3)
    return statistics.median(taken)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios, so that a slowdown of a whole round cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie."""
    return float(np.percentile(values, percent))
