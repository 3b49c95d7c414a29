"""5,000 ticks of random work on two ranks or three, with an L3: see `sglang.test.random_ranks`.

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


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_ticks_leave_ranks_with_equal_books(ranks: int) -> None:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    # A third of the setups has no L3. They run, but do not count.
    share = TICKS * 2 // 3 if ranks == 2 else TICKS // 3
    while counts["ticks of three tiers"] < share:
        outcome = run_ranks(secrets.randbits(31), ranks, TICKS_OF_A_SEED)
        counts.update(outcome.counts)
        if outcome.setup.tiers == 3:
            counts["ticks of three tiers"] += outcome.steps
    for what in ("tokens from host", "tokens from storage", "evicted from host", "write landed"):
        assert counts[what], f"no {what} in {share} ticks"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
