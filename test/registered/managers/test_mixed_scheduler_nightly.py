"""Random runs that mix the engine's features for twenty minutes: see `mixed_scheduler.py`.

Each configuration of the plan has its turn, with seeds that follow a drawn one; each is printed
before its run, and what fails with the command that repeats it.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Final

import pytest
import torch

from rigs.mixed.mixed_scheduler import FEATURES, NEVER_TOGETHER, run_seed
from rigs.mixed.plan import covering_mixes
from rigs.schedulers.random_seeds import Outcome, run_for
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1300, suite="nightly-test-cpu", nightly=True)

SECONDS: Final = 1200.0


@pytest.mark.timeout(SECONDS * 3)
def test_each_pair_of_features_meets_and_all_words_are_right() -> None:
    torch.set_num_threads(1)
    met: set[frozenset[str]] = set()

    def noted(seed: int) -> Outcome:
        outcome = run_seed(seed)
        met.update(outcome.pairs())
        return outcome

    turn, began, first = len(covering_mixes()), time.monotonic(), secrets.randbits(31)
    for seed in itertools.count(first, turn):
        for one in range(seed, seed + turn):
            _, failed = run_for(0.0, one, noted)
            assert not failed
        if time.monotonic() - began > SECONDS:
            break
    wanted = {frozenset(two) for two in itertools.combinations(FEATURES, 2)}
    assert sorted(map(sorted, wanted - met - NEVER_TOGETHER)) == []
