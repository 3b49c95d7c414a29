"""A slice of the random work on several ranks, and proof that it can fail.

The long run is `test_random_ranks_long.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang.srt.distributed.rank_group import RankGroup
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.random_ranks import RandomRanks
from sglang.test.random_setup import impatient

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TICKS = 300


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    torch.set_num_threads(1)
    with impatient():
        yield


class OwnProgress(RankGroup):
    """A rank that acts on what it has seen itself, and agrees with the others on nothing but to
    compare the books."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def broadcast(self, payload: bytes | None) -> bytes:
        return self._group.broadcast(payload)

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        digests = self._group.reduce_min(values)[:2]
        return torch.cat([digests, values[2:]])


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (2, 2), (12, 3)])
def test_ranks_that_do_random_work_have_equal_books_at_every_tick(seed: int, ranks: int) -> None:
    outcome = RandomRanks(seed, ranks).run(TICKS)
    assert outcome.setup.tiers == 3
    assert outcome.counts["positions checked"] > 100
