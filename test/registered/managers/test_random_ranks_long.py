"""5,000 ticks or more of random work on two ranks and three: see `sglang.test.random_ranks`.

The seeds are drawn, so that each run sees others. A failure's notes say how to repeat it.
"""

from __future__ import annotations

import secrets
from collections import Counter

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.random_ranks import run_ranks

register_cpu_ci(est_time=45, suite="base-b-test-cpu")

TICKS = 5000
TICKS_OF_A_SEED = 500
WORK = ("tokens from host", "tokens from storage", "evicted from host", "write landed")
"""What must happen. One seed in four reads from storage: seeds are drawn until all of it has."""
MOST_RUNS = 60
"""Of three tiers. If a run in four does some work, the chance that none of 60 does is 3e-8."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_ticks_leave_ranks_with_equal_books(ranks: int) -> None:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    # A third of the setups has no L3. They run, but do not count.
    least_runs = (TICKS * 2 // 3 if ranks == 2 else TICKS // 3) // TICKS_OF_A_SEED + 1
    runs = 0
    while runs < least_runs or (runs < MOST_RUNS and not all(counts[what] for what in WORK)):
        outcome = run_ranks(secrets.randbits(31), ranks, TICKS_OF_A_SEED)
        counts.update(outcome.counts)
        runs += outcome.setup.tiers == 3
    for what in WORK:
        assert counts[what], f"no {what} in {runs} runs of three tiers"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
