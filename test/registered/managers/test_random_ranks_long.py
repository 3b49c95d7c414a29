"""1,200 ticks or more of random work on two ranks and three: see `random_ranks.py`.

The seeds are drawn, so that each run sees others. A failure's notes say how to repeat it.
`test_random_ranks_nightly.py` runs for longer.
"""

from __future__ import annotations

import pytest
import torch

from rigs.schedulers.random_ranks import run_until_all_happened
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-b-test-cpu")


@pytest.mark.parametrize(("ranks", "ticks"), [(2, 800), (3, 400)])
def test_random_ticks_leave_ranks_equal(ranks: int, ticks: int) -> None:
    torch.set_num_threads(1)
    run_until_all_happened(ranks, ticks)
