"""The search for a run that gives the logits that a driver gave, by near choices made otherwise."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from rigs.layers.near_choices import Exchange, exchanged
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.forward_batch_info import ForwardBatch

MOST_RUNS: Final = 60
"""Runs of a text, at most."""
CHUNKS: Final = 127, 1, 1, 128, 243, 500
"""Tokens of the steps of `logits_of_steps`."""


class _Run(NamedTuple):
    logits: torch.Tensor
    """fp32 `[num_tokens, vocab_size]`, on the CPU."""
    near: Mapping[Exchange, float]
    """See `exchanged`."""


class TextLogits:
    """The logits of a text that plain torch on the CPU computes in one step, alone: near choices of
    other requests do not count."""

    def __init__(self, path: Path, tokens: Sequence[int]) -> None:
        """Args:
        path: A tiny checkpoint.
        tokens: At most 2,048.
        """
        self.tokens = tokens
        self._driver = StepDriver(
            path,
            device="cpu",
            attention_backend="torch_native",
            page_size=16,
            pool_tokens=2048,
            max_requests=1,
            num_states=2,
        )
        self._runs: dict[frozenset[Exchange], _Run] = {}

    def assert_explained(self, got: Mapping[int, torch.Tensor]) -> frozenset[Exchange]:
        """Assert that a run gives all of `got`: that without exchanges, or one that makes near
        choices otherwise. It goes on from the runs that agree with `got` the longest; among as
        good ones, from fewer exchanges, and from nearer choices.

        Args:
            got: fp32 `[vocab_size]` after tokens of the text, by position, in ascending order. One
                computation of the text gave them.

        Returns:
            The exchanges of that run.
        """
        places, wanted = list(got), torch.stack([logits.cpu() for logits in got.values()])
        waiting, count = [(0, 0, 0.0, 0, frozenset[Exchange]())], itertools.count(1)
        tried = set[frozenset[Exchange]]()
        best, least_off = -1, math.inf
        while waiting and len(tried) < MOST_RUNS:
            *_, exchanges = heapq.heappop(waiting)
            if exchanges in tried:
                continue
            tried.add(exchanges)
            run = self._run(exchanges)
            off = (run.logits[places] - wanted).abs()
            # A NaN is no agreement.
            agrees = (off <= 1e-3 + 1e-3 * run.logits[places].abs()).all(dim=1).tolist()
            if all(agrees):
                return exchanges
            first = agrees.index(False)
            if first > best:
                best, least_off = first, float(off[first].max())
            for one, gap in run.near.items():
                more = exchanges | {one}
                heapq.heappush(waiting, (-first, len(more), gap, next(count), more))
        raise AssertionError(
            f"the logits after token {places[best]} are {least_off:.2g} off; {len(tried)} runs "
            "differ by near choices, and none explains them"
        )

    def _run(self, exchanges: frozenset[Exchange]) -> _Run:
        if exchanges not in self._runs:
            self._runs[exchanges] = self._compute(exchanges)
        return self._runs[exchanges]

    def _compute(self, exchanges: frozenset[Exchange]) -> _Run:
        def captures(batch: ForwardBatch) -> None:
            batch.capture_hidden = True

        driver = self._driver
        driver.lens[0] = 0
        driver.runner.token_to_kv_pool_allocator.clear()
        with exchanged(exchanges) as near, torch.inference_mode():
            hidden = driver.extend([(0, self.tokens)], before=captures).hidden_states
            assert hidden is not None, "the step captured them"
            return _Run(driver.runner.model.draft_logits(hidden).whole().float(), near)


def logits_of_steps(
    driver: StepDriver, texts: Sequence[Sequence[int]]
) -> dict[int, dict[int, torch.Tensor]]:
    """Compute texts of 1,012 tokens: 1,000 in chunks of many lengths, the others by decode steps of
    batches of many sizes.

    Args:
        driver: It has run nothing.

    Returns:
        Logits of `assert_explained`, by row.
    """
    got: dict[int, dict[int, torch.Tensor]] = {row: {} for row in range(len(texts))}

    def keep(rows: Sequence[int], logits: torch.Tensor) -> None:
        # Copied at once: the next captured step overwrites these logits.
        for row, of_row in zip(rows, logits.cpu().clone(), strict=True):
            got[row][driver.lens[row] - 1] = of_row

    rows, begin = list(got), 0
    for new in CHUNKS:
        work = [(row, texts[row][begin : begin + new]) for row in rows]
        keep(rows, driver.extend(work).next_token_logits)
        begin += new
    for some in (rows, rows[1:2], rows[::2], *[rows] * 10):
        work = [(row, texts[row][driver.lens[row] :][:1]) for row in some]
        keep(some, driver.decode([(row, token) for row, (token,) in work]).next_token_logits)
    return got
