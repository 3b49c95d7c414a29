"""Is reading from L3 faster than computing again? Measured, not configured."""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.25
_ENOUGH_SAMPLES: Final = 4
_MARGIN: Final = 0.5
"""L3 is given up only where it is clearly slower: it also spares the device."""
_PROBE_EVERY: Final = 32
"""Of the reads not made, every so many is made after all: stores and networks recover."""


class RateEstimate:
    """Exponentially smoothed tokens per second of one kind of work."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.samples = 0

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement; nothing is learned from empty ones."""
        if tokens <= 0 or seconds <= 0:
            return
        rate = tokens / seconds
        weight = _SMOOTHING if self.samples else 1.0
        self.tokens_per_s += weight * (rate - self.tokens_per_s)
        self.samples += 1


class FetchWorth:
    """Compares the rate of L3 reads with that of prefill. Scheduler thread, but for `reads.add`,
    which the prefetch thread calls."""

    def __init__(self) -> None:
        self.reads = RateEstimate()
        self.prefills = RateEstimate()
        self._refused = 0

    def is_worth(self) -> bool:
        """What this rank has measured; the ranks agree on it by ballot."""
        if min(self.reads.samples, self.prefills.samples) < _ENOUGH_SAMPLES:
            return True
        return self.reads.tokens_per_s >= _MARGIN * self.prefills.tokens_per_s

    def admit(self, agreed: bool) -> bool:
        """Whether to make the next read, given the ranks' agreement."""
        if agreed:
            return True
        self._refused += 1
        return self._refused % _PROBE_EVERY == 0
