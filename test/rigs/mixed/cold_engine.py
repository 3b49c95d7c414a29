"""The expected words of a model: those of an engine that caches and drafts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
from sglang.srt.messages.io_struct import TopLogprobs

TOLERANCES: Final = {"auto": 2e-3, "fp8_e4m3": 0.05}
"""Most difference of a log probability, by `kv_cache_dtype`. Sums in another order round a number
to another fp8 value now and then."""


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
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[float, TopLogprobs]]] = field(
        init=False, default_factory=dict
    )
    """Log probability of each word, and the likeliest token instead of it, by prompt and words."""

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
        if there are any, are theirs. Another word may be as likely up to rounding.

        Returns:
            The largest difference.
        """
        most, tolerance = 0.0, TOLERANCES[self.kv_cache_dtype]
        for at, (logprob, tops) in enumerate(self._expected(prompt, words)):
            likeliest, word = tops[0]
            off = [likeliest - logprob]
            if logprobs:
                off.append(abs(logprobs[at] - logprob))
            most = max(most, *off)
            assert max(off) <= tolerance, (
                f"word {at} of {len(words)} after {len(prompt)} tokens: {words[at]} with log "
                f"probability {logprobs[at] if logprobs else None}; cold {word} has {likeliest}, "
                f"and {words[at]} {logprob}"
            )
        return most

    def _expected(self, prompt: list[int], words: list[int]) -> list[tuple[float, TopLogprobs]]:
        key = tuple(prompt), tuple(words)
        if key not in self._known:
            rid = f"cold {len(self._known)}"
            self._rig.run(
                self._rig.request(
                    rid,
                    [*prompt, *words],
                    greedy(1),
                    return_logprob=True,
                    logprob_start_len=len(prompt) - 1,
                    top_logprobs_num=1,
                )
            )
            got = self._rig.results.pop(rid)
            pairs = zip(got.input_logprobs, got.input_top_logprobs, strict=True)
            self._known[key] = list(pairs)
            assert len(self._known[key]) == len(words)
        return self._known[key]
