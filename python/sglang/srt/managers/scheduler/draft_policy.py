"""Decides by measurement whether a decode step verifies drafts or gives each request one token.

A verification takes longer than a plain step, and gives more tokens. Which of both is faster
depends on the batch, the model, the device and on how often drafts are right, so both are timed in
service.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.speculative.verify_graphs import largest_verification

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep

logger = logging.getLogger(__name__)

_SAMPLES: Final = 16


class _SizeClass:
    """Measurements of batches of about the same size, from their last few steps."""

    def __init__(self, steps: int) -> None:
        """`steps`: steps before plain ones are tried."""
        self.is_chosen = True
        """True if steps verify, except in a trial."""
        self.is_trial = False
        self.steps_left = steps
        self.seconds: dict[bool, deque[float]] = {
            verifies: deque(maxlen=_SAMPLES) for verifies in (False, True)
        }
        self.tokens: deque[float] = deque(maxlen=_SAMPLES)
        """Tokens that the last verifications gave a request, on average."""

    @property
    def verifies(self) -> bool:
        """True if the next step verifies."""
        return self.is_chosen != self.is_trial

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of the last verifications; 0 if there were none."""
        return statistics.fmean(self.tokens) if self.tokens else 0.0

    def seconds_per_token(self, *, verifies: bool) -> float:
        """Median over the last steps; infinite if verifications gave no tokens."""
        seconds = statistics.median(self.seconds[verifies])
        if not verifies:
            return seconds
        return seconds / self.mean_tokens if self.tokens else math.inf


class DraftPolicy:
    """Chooses the tokens of the next decode step for each request. Scheduler thread only.

    Batches are divided into classes by size, from a power of two to the next. Steps of a class
    verify at first. After `first_steps` of them, and then every `period_steps`, `trial_steps` are
    of the other kind, and the faster kind is used until the next trial. A trial of a kind that is
    half as fast costs less than 1%. Clocks are those of ticks and tokens are the same on all
    ranks, so ranks agree.

    Args:
        num_draft_tokens: Tokens of a verification for each request.
        always: If true, steps verify wherever they can: nothing is measured.
    """

    def __init__(self, num_draft_tokens: int, *, always: bool) -> None:
        self.first_steps, self.trial_steps, self.period_steps = 64, _SAMPLES, 2048
        self._width = num_draft_tokens
        self._most = largest_verification(num_draft_tokens)
        self.always = always
        self._classes: dict[int, _SizeClass] = {}
        self._last: tuple[int, int] | None = None
        """Size class and width of the last tick's decode step; None: it had none."""
        self._last_time = 0.0

    def width(self, batch_size: int) -> int:
        """Tokens of each request in a step of `batch_size` requests: `num_draft_tokens`, or 1."""
        if batch_size > self._most:
            return 1
        if self.always or self._class(batch_size).verifies:
            return self._width
        return 1

    def on_tick(self, now: float, step: LaunchedStep | None) -> None:
        """Note the step that a tick has launched; `now`: seconds of the tick's clock.

        If two ticks in a row launch a step of one kind, the time between them is a step's.
        """
        if self.always:
            return
        kind = None
        if step is not None and not step.works and len(step.reqs) <= self._most:
            kind = len(step.reqs).bit_length(), step.width
        if kind is not None and kind == self._last:
            assert step is not None
            self._add(len(step.reqs), kind[1] > 1, now - self._last_time)
        self._last, self._last_time = kind, now

    def on_verified(self, step: LaunchedStep, num_tokens: int, num_requests: int) -> None:
        """Note what a verification gave.

        Args:
            num_tokens: Output tokens, in all. Accepted drafts behind the end of a request are none
                of them: plain steps would not have computed those.
            num_requests: Requests that had not ended before its results.
        """
        if not self.always and num_requests:
            self._class(len(step.reqs)).tokens.append(num_tokens / num_requests)

    def describe(self) -> dict[str, Any] | None:
        """The choice for each size of batches, for operators, as plain data; None: nothing drafts.

        `sizes` has each measured class of batches: its smallest and largest batch, whether its
        steps verify (apart from trials), milliseconds of a step of either kind, and tokens of a
        request that a verification gives. A figure that is None was not measured.
        """
        if self._width == 1:
            return None
        sizes = []
        for key, one in sorted(self._classes.items()):
            if not any(one.seconds.values()):
                continue  # Never the size of two steps in a row.
            first, last = self._bounds(key)
            plain, verified = (
                round(statistics.median(seconds) * 1e3, 3) if seconds else None
                for seconds in (one.seconds[False], one.seconds[True])
            )
            tokens = round(one.mean_tokens, 3) if one.tokens else None
            sizes.append(
                {
                    "first": first,
                    "last": last,
                    "verifies": one.is_chosen,
                    "plain_ms": plain,
                    "verification_ms": verified,
                    "tokens": tokens,
                }
            )
        return {
            "num_drafts": self._width - 1,
            "always": self.always,
            "largest_batch": self._most,
            "sizes": sizes,
        }

    def _bounds(self, key: int) -> tuple[int, int]:
        """Smallest and largest batch of the class of sizes with `key` bits."""
        return 1 << key - 1, min((1 << key) - 1, self._most)

    def _class(self, batch_size: int) -> _SizeClass:
        return self._classes.setdefault(batch_size.bit_length(), _SizeClass(self.first_steps))

    def _add(self, batch_size: int, verifies: bool, seconds: float) -> None:
        one = self._class(batch_size)
        if verifies is not one.verifies:
            return  # The batch was of another class when its step was chosen.
        one.seconds[verifies].append(seconds)
        one.steps_left -= 1
        if one.steps_left > 0:
            return
        one.is_trial = not one.is_trial
        if one.is_trial:
            one.steps_left = self.trial_steps
            return
        plain, verified = (one.seconds_per_token(verifies=kind) for kind in (False, True))
        was_chosen, one.is_chosen = one.is_chosen, verified <= plain
        one.steps_left = self.period_steps
        if one.is_chosen is not was_chosen:
            self._log(batch_size, one)

    def _log(self, batch_size: int, one: _SizeClass) -> None:
        first, last = self._bounds(batch_size.bit_length())
        plain, verified = (statistics.median(one.seconds[kind]) * 1e3 for kind in (False, True))
        logger.info(
            "Batches of %d to %d requests decode %s drafts: a verification takes %.2f ms and gives "
            "%.2f tokens of a request, a plain step takes %.2f ms",
            first,
            last,
            "with" if one.is_chosen else "without",
            verified,
            one.mean_tokens,
            plain,
        )
