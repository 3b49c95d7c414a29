"""Twenty thousand ticks of random work on two ranks and three, as `test_random_ranks_long.py`."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.random_ranks import run_until_all_happened

register_cpu_ci(est_time=250, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_ticks_leave_ranks_with_equal_books(ranks: int) -> None:
    torch.set_num_threads(1)
    run_until_all_happened(ranks, 10_000)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
