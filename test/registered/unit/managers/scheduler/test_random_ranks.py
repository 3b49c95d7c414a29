"""A slice of the random work on several ranks, and proof that it can fail.

The long run is `test_random_ranks_long.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.mem_cache.tiers.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.ballot import Progress, to_vector
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.random_ranks import RandomRanks, RankRig
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
        agreed = self._group.reduce_min(values)
        is_ballot = len(values) == len(to_vector(Progress()))
        return torch.cat([agreed[:2], values[2:]]) if is_ballot else agreed


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (2, 2), (12, 3)])
def test_ranks_that_do_random_work_have_equal_books_at_every_tick(seed: int, ranks: int) -> None:
    outcome = RandomRanks(seed, ranks).run(TICKS)
    assert outcome.setup.tiers == 3
    assert outcome.counts["positions checked"] > 100


@pytest.mark.parametrize("seed", [0, 13])
@pytest.mark.parametrize("has_referee", [True, False], ids=["every tick", "ballots"])
def test_ranks_that_act_on_their_own_progress_diverge(seed: int, has_referee: bool) -> None:
    run = RandomRanks(seed, wrap_group=OwnProgress, has_referee=has_referee)
    with pytest.raises(RanksDiverged):
        run.run(TICKS)


def test_a_rank_that_lost_a_page_ends_all_and_is_named_by_the_next_ballot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tick = RankRig._tick
    lost: list[int] = []

    def tick_and_lose(rig: RankRig, payload: bytes) -> None:
        tick(rig, payload)
        if rig.group.rank == 1 and not lost and isinstance(rig.tree, HiRadixCache):
            lost.extend([rig.num_ticks] * bool(rig.tree.evict_host(1)))

    monkeypatch.setattr(RankRig, "_tick", tick_and_lose)
    run = RandomRanks(2, has_referee=False)
    with pytest.raises(RanksDiverged, match=r"rank 1 has free tokens of L2: \d+, rank 0 \d+\n"):
        run.run(TICKS)
    assert lost


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
