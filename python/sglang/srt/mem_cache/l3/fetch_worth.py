"""Compares reading a prompt from L3 with computing it, by measured rates.

Both are queues: one thread reads prompts one after the other, one device computes them. A prompt
joins the queue that ends sooner, so that a burst is divided between the two. Decisions are pure:
ranks with the same inputs decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sglang.srt.mem_cache.tree.ballot import Rates

_MEMORY: Final = 4
"""Measurements of full size after which an earlier one has lost two thirds of its weight."""
_SIZE_FADES: Final = 0.99
_ENOUGH_SAMPLES: Final = 4
_CUT_MARGIN: Final = 1.25
"""A read may take longer than computing by this factor: it leaves the device to other requests and
to decoding, and rates are known to about ten percent."""
_CUT_SLACK_S: Final = 0.01
"""A read may take longer by this time as well: no client notices it, and a cut loses what a call
has half read."""
_START_MARGIN: Final = 2.0
"""A read that looks slower than computing by this factor is not begun. It is larger than
`_CUT_MARGIN` because the hit is not known yet."""


class RateEstimate:
    """Tokens per second of one kind of work. The weight of a measurement is its tokens, so that
    small ones, which are mostly overhead, say little about large ones."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.samples = 0
        self._largest = 0.0
        self._weight = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement; an empty one is ignored."""
        if tokens <= 0 or seconds <= 0:
            return
        self._largest = max(tokens, _SIZE_FADES * self._largest)
        self._weight += tokens - self._weight * tokens / (_MEMORY * self._largest)
        self.tokens_per_s += tokens / self._weight * (tokens / seconds - self.tokens_per_s)
        self.samples += 1


class PendingRead(NamedTuple):
    """A prompt that waits for L3. Tokens."""

    unread: int
    """Tokens that the thread has still to read."""
    missing: int
    """Tokens that need not be computed if they are read."""
    uncached: int
    """Tokens to be computed if nothing more is read: `missing`, and those that the store lacks."""
    is_spared: bool = False
    """Whether it is read even if computing would end sooner."""


def overtaken(
    reads: Sequence[PendingRead], rates: Rates, *, ahead: int, waiting: int
) -> list[bool]:
    """For each read, whether to cut it because computing would end sooner.

    Args:
        reads: In the order in which they are read.
        rates: If one is unknown, nothing is cut.
        ahead: Tokens that the thread reads before them and that no request waits for.
        waiting: Tokens that wait to be computed already.
    """
    cuts = []
    for read in reads:
        later = _is_later(ahead + read.unread, waiting + read.missing, rates)
        is_cut = later and not read.is_spared
        cuts.append(is_cut)
        # A cut prompt goes to the end of the queue of computing, another stays in that of reads.
        if is_cut:
            waiting += read.uncached
        else:
            ahead += read.unread
    return cuts


def is_hopeless(tokens: int, rates: Rates, *, ahead: int, waiting: int) -> bool:
    """Whether a read of `tokens` is not worth beginning: computing them would end much sooner.

    Args:
        tokens: Tokens to be read.
        rates: If one is unknown, nothing is hopeless.
        ahead: Tokens that are known to be read before it.
        waiting: Tokens that wait to be computed already.
    """
    return _is_later(ahead + tokens, waiting + tokens, rates, _START_MARGIN)


def _is_later(to_read: int, to_compute: int, rates: Rates, margin: float = _CUT_MARGIN) -> bool:
    if not rates.reads or not rates.prefills:
        return False
    return to_read / rates.reads > margin * to_compute / rates.prefills + _CUT_SLACK_S


class FetchWorth:
    """The rates that this rank has measured. The scheduler thread calls everything but
    `reads.add`, which the prefetch thread calls."""

    def __init__(self) -> None:
        self.reads = RateEstimate()
        self.prefills = RateEstimate()

    def rates(self) -> Rates:
        """This rank's rates, for the ballot: the lowest of all ranks count."""
        return Rates(_known(self.reads), _known(self.prefills))


def _known(estimate: RateEstimate) -> int:
    enough = estimate.samples >= _ENOUGH_SAMPLES
    return max(1, int(estimate.tokens_per_s)) if enough else 0
