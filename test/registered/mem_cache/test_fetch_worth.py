"""When L3 is too slow to be read from, and how that is found out again."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.fetch_worth import FetchWorth
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def measured(reads_per_s: int, prefills_per_s: int, samples: int = 4) -> FetchWorth:
    worth = FetchWorth()
    for _ in range(samples):
        worth.reads.add(reads_per_s, 1.0)
        worth.prefills.add(prefills_per_s, 1.0)
    return worth


@pytest.mark.parametrize(
    ("reads", "prefills", "samples", "is_worth"),
    [
        pytest.param(100, 1000, 3, True, id="too-little-known"),
        pytest.param(1000, 1000, 4, True, id="as-fast"),
        pytest.param(500, 1000, 4, True, id="within-the-margin"),
        pytest.param(499, 1000, 4, False, id="clearly-slower"),
    ],
)
def test_reads_are_compared_with_prefills(
    reads: int, prefills: int, samples: int, is_worth: bool
) -> None:
    assert measured(reads, prefills, samples).is_worth() is is_worth


def test_every_32nd_read_is_made_after_all_and_recovery_is_noticed() -> None:
    worth = measured(100, 1000)
    assert [worth.admit(False) for _ in range(64)].count(True) == 2
    for _ in range(20):
        worth.reads.add(10_000, 1.0)
    assert worth.is_worth()


def test_nothing_is_learned_from_nothing() -> None:
    worth = FetchWorth()
    worth.reads.add(0, 1.0)
    worth.reads.add(10, 0.0)
    assert worth.reads.samples == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
