"""Is a prompt there sooner by reading it from L3 or by computing it? Measured, not configured.

Both are queues: one thread reads prompts one after the other, one device computes them. A prompt
joins the queue that ends sooner, so that a burst is divided between the two. What is decided here
is pure; ranks that are given the same numbers decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sglang.srt.mem_cache.tree.ballot import Rates

_MEMORY: Final = 4
"""Measurements of full size after which an earlier one has faded by two thirds."""
_SIZE_FADES: Final = 0.99
_ENOUGH_SAMPLES: Final = 4
_CUT_MARGIN: Final = 1.25
"""A read may end so much later than computing would: it leaves the device to others and to
decoding, and rates are known to some ten percent."""
_CUT_SLACK_S: Final = 0.01
"""And so much besides: nobody notices that, and what a call has half read would be lost."""
_START_MARGIN: Final = 2.0
"""A read that looks worse than this is not begun. More than `_CUT_MARGIN`, for what the store has
is not known then."""


class RateEstimate:
    """Tokens per second of one kind of work. Each measurement weighs as many tokens as it had, so
    that small ones, which are mostly overhead, say little about large ones."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.samples = 0
        self._largest = 0.0
        self._weight = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement; nothing is learned from empty ones."""
        if tokens <= 0 or seconds <= 0:
            return
        self._largest = max(tokens, _SIZE_FADES * self._largest)
        self._weight += tokens - self._weight * tokens / (_MEMORY * self._largest)
        self.tokens_per_s += tokens / self._weight * (tokens / seconds - self.tokens_per_s)
        self.samples += 1


class PendingRead(NamedTuple):
    """A prompt that waits for L3. Tokens."""

    unread: int
    """What the thread has yet to read of it."""
    missing: int
    """What reading it spares to compute."""
    uncached: int
    """All that has to be computed if it is not read: that, and what the store lacks."""
    is_spared: bool = False
    """It is read whatever that takes."""


def overtaken(
    reads: Sequence[PendingRead], rates: Rates, *, ahead: int, waiting: int
) -> list[bool]:
    """Which reads are to be cut, because computing would be done sooner.

    Args:
        reads: In the order in which they are read.
        rates: Where one is not known nothing is cut.
        ahead: Tokens that the thread reads before them, for nobody.
        waiting: Tokens that wait to be computed already.
    """
    cuts = []
    for read in reads:
        later = _is_later(ahead + read.unread, waiting + read.missing, rates)
        is_cut = later and not read.is_spared
        cuts.append(is_cut)
        # It goes to the end of the one queue or of the other.
        if is_cut:
            waiting += read.uncached
        else:
            ahead += read.unread
    return cuts


def is_hopeless(tokens: int, rates: Rates, *, ahead: int, waiting: int) -> bool:
    """Whether a read of `tokens` is not to be begun: computing them would be done long before.

    Args:
        tokens: What would be asked for.
        rates: Where one is not known nothing is hopeless.
        ahead: Tokens that are known to be read before it.
        waiting: Tokens that wait to be computed already.
    """
    return _is_later(ahead + tokens, waiting + tokens, rates, _START_MARGIN)


def _is_later(to_read: int, to_compute: int, rates: Rates, margin: float = _CUT_MARGIN) -> bool:
    if not rates.reads or not rates.prefills:
        return False
    return to_read / rates.reads > margin * to_compute / rates.prefills + _CUT_SLACK_S


class FetchWorth:
    """What this rank has measured. Scheduler thread, but for `reads.add`, which the prefetch
    thread calls."""

    def __init__(self) -> None:
        self.reads = RateEstimate()
        self.prefills = RateEstimate()

    def rates(self) -> Rates:
        """For the ballot: the slowest rank decides."""
        return Rates(_known(self.reads), _known(self.prefills))


def _known(estimate: RateEstimate) -> int:
    enough = estimate.samples >= _ENOUGH_SAMPLES
    return max(1, int(estimate.tokens_per_s)) if enough else 0
