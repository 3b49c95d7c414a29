"""The expected words of a model: those of an engine that caches and drafts nothing."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rigs.layers.near_choices import Exchange, exchanged
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
from sglang.srt.messages.io_struct import TopLogprobs

TOLERANCES: Final = {"auto": 2e-3, "fp8_e4m3": 0.05}
"""Most difference of a log probability, by `kv_cache_dtype`. Sums in another order round a number
to another fp8 value now and then."""
_MOST_RUNS: Final = 64
"""Runs of a text that differ by near choices, at most."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a text."""

    expected: list[tuple[float, TopLogprobs]]
    """Log probability of each word, and the likeliest token instead of it."""
    exchanges: frozenset[Exchange]
    near: Collection[Exchange]
    """All near choices, these included."""


@dataclass(slots=True)
class ColdEngine:
    """Computes each text in one step, alone.

    Args:
        path: Directory of the checkpoint.
        kv_cache_dtype: Dtype of the engine under test: rounding state changes words.
    """

    path: Path
    kv_cache_dtype: str
    _rig: SchedulerRig = field(init=False)
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Run]] = field(
        init=False, default_factory=dict
    )
    """Runs by prompt and words. The first exchanges no choice."""

    def __post_init__(self) -> None:
        self._rig = SchedulerRig(
            self.path,
            pool_tokens=512,
            max_requests=1,
            page_size=4,
            kv_cache_dtype=self.kv_cache_dtype,
            disable_radix_cache=True,
            overlap=False,
        )

    def assert_words(self, prompt: list[int], words: list[int], logprobs: list[float]) -> float:
        """Assert that each of `words` is the likeliest after those before it, and that `logprobs`,
        if there are any, are theirs. Another word may be as likely up to rounding, and near choices
        may fall either way, for each word anew: a token may be computed twice.

        Returns:
            The largest difference.
        """
        tolerance = TOLERANCES[self.kv_cache_dtype]
        runs = self._known.setdefault((tuple(prompt), tuple(words)), [])
        least = [math.inf] * len(words)
        for number in range(_MOST_RUNS):
            if number == len(runs):
                exchanges = _next_exchanges(runs)
                if exchanges is None:
                    break
                runs.append(self._run(prompt, words, exchanges))
            least = list(map(min, least, _differences(runs[number], logprobs)))
            if max(least) <= tolerance:
                return max(least)
        at = next(place for place, off in enumerate(least) if off > tolerance)
        logprob, tops = runs[0].expected[at]
        likeliest, word = tops[0]
        raise AssertionError(
            f"word {at} of {len(words)} after {len(prompt)} tokens: {words[at]} with log "
            f"probability {logprobs[at] if logprobs else None}; cold {word} has {likeliest}, and "
            f"{words[at]} {logprob}; {len(runs)} runs differ by near choices, and none explains it"
        )

    def _run(self, prompt: list[int], words: list[int], exchanges: frozenset[Exchange]) -> _Run:
        with exchanged(exchanges) as near:
            self._rig.run(
                self._rig.request(
                    "cold",
                    [*prompt, *words],
                    greedy(1),
                    return_logprob=True,
                    logprob_start_len=len(prompt) - 1,
                    top_logprobs_num=1,
                )
            )
        got = self._rig.results.pop("cold")
        expected = list(zip(got.input_logprobs, got.input_top_logprobs, strict=True))
        assert len(expected) == len(words)
        return _Run(expected, exchanges, near)


def _next_exchanges(runs: list[_Run]) -> frozenset[Exchange] | None:
    """What the next run exchanges, by number; None: all have run."""
    if not runs:
        return frozenset()
    tried = {run.exchanges for run in runs}
    wanted = (run.exchanges | {one} for run in runs for one in run.near)
    return next((one for one in wanted if one not in tried), None)


def _differences(run: _Run, logprobs: list[float]) -> list[float]:
    """Of each word; infinite for one that is no number."""
    offs = []
    for at, (logprob, tops) in enumerate(run.expected):
        off = [tops[0][0] - logprob]
        if logprobs:
            off.append(abs(logprobs[at] - logprob))
        offs.append(math.inf if any(map(math.isnan, off)) else max(off))
    return offs
