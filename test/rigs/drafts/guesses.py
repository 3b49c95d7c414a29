"""Drafts as tests want them: recorded, or replaced by guesses that are often right.

The drafts of a random model are hardly ever accepted, so tests of acceptance draft the words that
the same model has said before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.speculative.eagle_worker import EAGLEWorker

Drafts = dict[tuple[int, int], list[int]]
"""The drafts of a verification by its newest token and that token's position."""


@contextmanager
def recorded() -> Iterator[Drafts]:
    """The drafts of all verifications inside, the same on all ranks of this process. Requests must
    differ in tokens or positions."""
    found: Drafts = {}
    real = EAGLEWorker.draft

    def draft(self: EAGLEWorker, batch: ForwardBatch) -> torch.Tensor:
        newest = batch.input_ids.tolist()
        drafts = real(self, batch)
        for row, token in enumerate(newest):
            if not batch.out_cache_loc[row * self.num_draft_tokens]:
                continue  # a request that pads a captured batch
            place = token, batch.seq_lens_cpu[row] - self.num_draft_tokens
            ids = drafts[row].tolist()
            assert found.setdefault(place, ids) == ids, f"other drafts after {place}"
        return drafts

    with mock.patch.object(EAGLEWorker, "draft", draft):
        yield found


@contextmanager
def guessed(texts: Sequence[Sequence[int]], right: float, seed: int = 0) -> Iterator[None]:
    """Draft the continuations in `texts`, each token right with the chance `right`.

    The draft layer's own drafts select the tokens that are right. Runs with equal own drafts
    therefore have equal acceptance.
    """
    with mock.patch.object(EAGLEWorker, "draft", _guessing(texts, right, seed)):
        yield


def guess_in_rank(texts: Sequence[Sequence[int]], right: float, rank: int) -> None:
    """`guessed` for all of a rank's process; `functools.partial` of it is an `InRank`. All ranks
    draft the same."""
    mock.patch.object(EAGLEWorker, "draft", _guessing(texts, right, seed=0)).start()


def _guessing(
    texts: Sequence[Sequence[int]], right: float, seed: int
) -> Callable[[EAGLEWorker, ForwardBatch], torch.Tensor]:
    """A function in place of `EAGLEWorker.draft`. Ranks of one process draft the same."""
    real = EAGLEWorker.draft

    def guess(newest: int, before: int, real_drafts: list[int]) -> list[int]:
        rng = random.Random(repr((seed, newest, before, real_drafts)))
        fitting = [t for t in texts if len(t) > before and t[before] == newest]
        text = list(rng.choice(fitting)) if fitting else []
        known = [*text[before + 1 : before + 1 + len(real_drafts)], *real_drafts]
        return [
            token if rng.random() < right else (token + 1) % 100
            for token in known[: len(real_drafts)]
        ]

    def draft(self: EAGLEWorker, batch: ForwardBatch) -> torch.Tensor:
        newest = batch.input_ids.tolist()
        drafts = real(self, batch).tolist()
        width = self.num_draft_tokens
        rows = [
            [token, *guess(token, batch.seq_lens_cpu[row] - width, drafts[row])]
            for row, token in enumerate(newest)
        ]
        tokens = torch.tensor(rows, device=batch.input_ids.device)
        batch.input_ids = tokens.flatten()
        return tokens[:, 1:]

    return draft
