"""Pages whose transfer has timed out are left alone for a while."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.l3.recent_timeouts import PERIOD_S, RecentTimeouts
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_pages_are_left_alone_for_a_period() -> None:
    now = 0.0
    timeouts = RecentTimeouts(clock=lambda: now)
    first, second, third = (PageHash(name) for name in "abc")
    timeouts.add([second])
    assert timeouts.leading_allowed([first, second, third]) == 1
    assert timeouts.leading_allowed([third]) == 1
    now = PERIOD_S / 2
    timeouts.add([third])
    now = PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 2
    now = 2 * PERIOD_S
    assert timeouts.leading_allowed([first, second, third]) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
