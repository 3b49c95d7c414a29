"""A slice of the random work on several ranks, and proof that it can fail.

`test_random_ranks_nightly.py` draws seeds.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rigs.caches.memory_ranks import MemoryRankGroup, PassedOnGroup, RankIsMissing
from rigs.nightly_cases import nightly
from rigs.schedulers.random_ranks import RandomRanks, RankRig
from rigs.schedulers.random_setup import Setup, impatient
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.tick_sync import Progress, to_vector
from sglang.srt.messages.io_struct import SchedulerOutput, Tick
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=21, suite="base-a-test-cpu")

TICKS = 300


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with impatient():
        yield


class OwnProgress(PassedOnGroup):
    """A rank that acts on what it has seen itself, and agrees with the others on nothing but to
    compare their states."""

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        agreed = super().reduce_min(values)
        is_tick_sync = len(values) == len(to_vector(Progress()))
        return torch.cat([agreed[:2], values[2:]]) if is_tick_sync else agreed


@pytest.mark.parametrize(
    ("seed", "ranks", "attn_cp_size"), [(0, 2, 1), (2, 2, 2), nightly(12, 3, 1), (19, 4, 2)]
)
def test_ranks_that_do_random_work_have_equal_states_at_every_tick(
    seed: int, ranks: int, attn_cp_size: int
) -> None:
    outcome = RandomRanks(seed, ranks, attn_cp_size=attn_cp_size).run(TICKS)
    assert outcome.setup.tiers == 3
    assert outcome.counts["positions checked"] > 100


@pytest.mark.parametrize("seed", [0, 13])
@pytest.mark.parametrize("has_referee", [True, False], ids=["every tick", "tick syncs"])
def test_ranks_that_act_on_their_own_progress_diverge(seed: int, has_referee: bool) -> None:
    run = RandomRanks(seed, wrap_group=OwnProgress, has_referee=has_referee)
    # One that alone has nothing to vote on leaves the other waiting.
    with pytest.raises((RanksDiverged, RankIsMissing)):
        run.run(TICKS)


def over_tp_alone(group: RankGroup) -> RankGroup:
    """A rank that, once it has started, agrees with those that split heads with it alone."""
    assert isinstance(group, MemoryRankGroup)
    broadcast = group.broadcast

    def of_a_tick(payload: bytes | None) -> bytes:
        group.rounds = [one for one in group.rounds if one[0] == "TP"]
        return broadcast(payload)

    group.broadcast = of_a_tick  # type: ignore[method-assign]
    return group


@pytest.mark.parametrize("seed", [0, 13])
def test_sets_of_ranks_diverge_without_the_round_over_cp(seed: int) -> None:
    """The sets see their copies at different ticks; the referee finds and names the first."""
    run = RandomRanks(seed, 4, attn_cp_size=2, wrap_group=over_tp_alone)
    with pytest.raises(RanksDiverged) as caught:
        run.run(TICKS)
    assert re.match(
        r"the ranks' states differ after tick \d+: rank 2 has (.+), rank 0 (.+); "
        r"rank 3 has \1, rank 0 \2$",
        str(caught.value),
    )


def without_states(seed: int) -> Setup:
    """The setup of a seed, for a model of whose pages each may leave L2 alone."""
    return dataclasses.replace(Setup.draw(random.Random(seed)), num_states=0, is_buffer=False)


def losing_a_page(monkeypatch: pytest.MonkeyPatch, rank: int) -> list[int]:
    """Let a rank evict a page that the others keep. The tick in which it did, once it has."""
    step = Scheduler.step
    ranks_of: dict[Scheduler, RankRig] = {}
    lost: list[int] = []
    make = RankRig.__init__

    def made(rig: RankRig, *args: Any, **fields: Any) -> None:
        make(rig, *args, **fields)
        ranks_of[rig.scheduler] = rig

    def step_and_lose(scheduler: Scheduler, tick: Tick) -> list[SchedulerOutput]:
        outputs, rig = step(scheduler, tick), ranks_of[scheduler]
        if rig.group.rank == rank and not lost and isinstance(rig.tree, HiRadixCache):
            lost.extend([rig.num_ticks + 1] * bool(rig.tree.evict_host(1)))
        return outputs

    monkeypatch.setattr(RankRig, "__init__", made)
    monkeypatch.setattr(Scheduler, "step", step_and_lose)
    return lost


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_that_lost_a_page_is_named_in_the_same_tick(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    lost = losing_a_page(monkeypatch, rank)
    with pytest.raises(RanksDiverged) as caught:
        RandomRanks(2, 4, attn_cp_size=2, setup=without_states(2)).run(TICKS)
    entry = rf"rank {rank} has free tokens of L2: \d+, rank 0 \d+"
    assert re.match(rf"the ranks' states differ after tick {lost[0]}: {entry}$", str(caught.value))


def test_a_rank_that_lost_a_page_ends_all_and_is_named_by_the_next_tick_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = losing_a_page(monkeypatch, 1)
    run = RandomRanks(2, has_referee=False, setup=without_states(2))
    with pytest.raises(
        RanksDiverged, match=r"rank 1 has free slots of pages on the host: \d+, rank 0 \d+\n"
    ):
        run.run(TICKS)
    assert lost
