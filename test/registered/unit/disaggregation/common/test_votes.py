"""Votes of the ranks: the least counts, each agreement is told once, and idle ranks say nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang.srt.disaggregation.common.votes import FAILED, SLOTS, Outcome, Votes
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged, SingleRank
from sglang.test.caches.memory_ranks import MemoryExchange, run_on_ranks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def on_two_ranks(work: Callable[[int, Votes], list[Outcome]]) -> list[Outcome]:
    """Outcomes of `work` on both ranks, which must be the same."""

    def run(group: RankGroup) -> list[Outcome]:
        return work(group.rank, Votes(group))

    one, other = run_on_ranks(2, run, most_delay_s=0.001)
    assert one == other
    return one


def test_one_rank_agrees_with_itself_at_once() -> None:
    mine = Votes(SingleRank())
    mine.open(7, 1)
    mine.open(8, 1)
    assert not mine.count()
    mine.see(7, 2)
    mine.see(8, FAILED, "because")
    assert mine.count() == [Outcome(7, 2, ""), Outcome(8, FAILED, "because")]
    assert not mine.count(), "each is told once"
    mine.see(7, 3)
    mine.close(7)
    assert not mine.count()


def test_a_failure_is_final_and_unknown_keys_are_nobodys() -> None:
    mine = Votes(SingleRank())
    mine.see(1, 2)
    mine.open(1, 1)
    mine.see(1, FAILED, "first")
    mine.see(1, 2)
    mine.see(1, FAILED, "second")
    assert mine.count() == [Outcome(1, FAILED, "first")]
    mine.close(1)
    mine.close(1)


def test_the_least_vote_counts() -> None:
    def work(rank: int, mine: Votes) -> list[Outcome]:
        mine.open(5, 1)
        mine.see(5, 2 + rank)
        first = list(mine.count())
        mine.see(5, 3)
        return [*first, *mine.count(), *mine.count()]

    assert on_two_ranks(work) == [Outcome(5, 2, ""), Outcome(5, 3, "")]


@pytest.mark.parametrize("who", [0, 1])
def test_one_ranks_failure_is_all_ranks_with_its_reason(who: int) -> None:
    def work(rank: int, mine: Votes) -> list[Outcome]:
        for key in (1, 2, 3):
            mine.open(key, 1)
            mine.see(key, 2)
        if rank == who:
            mine.see(2, FAILED, "größer\x1f als gedacht: " + "ß" * 600)
            mine.see(3, FAILED)
        return list(mine.count())

    first, second, third = on_two_ranks(work)
    assert (first, third) == (Outcome(1, 2, ""), Outcome(3, FAILED, ""))
    assert second.why.startswith(f"rank {who}: größer  als gedacht: ßß")
    assert 400 < len(second.why.encode()) <= 520


def test_of_two_reasons_the_first_ranks_is_told() -> None:
    def work(rank: int, mine: Votes) -> list[Outcome]:
        mine.open(1, 1)
        mine.see(1, FAILED, f"as {rank} saw")
        return list(mine.count())

    assert on_two_ranks(work) == [Outcome(1, FAILED, "rank 0: as 0 saw")]


def test_of_more_requests_than_slots_each_has_its_turn() -> None:
    number = 3 * SLOTS + 5

    def work(rank: int, mine: Votes) -> list[Outcome]:
        for key in range(number):
            mine.open(key, 1)
            mine.see(key, 2 if key % 2 else FAILED, f"{rank} {key}")
        rounds = [list(mine.count()) for _ in range(5)]
        assert all(len(one) <= SLOTS for one in rounds)
        return sorted(outcome for one in rounds for outcome in one)

    outcomes = on_two_ranks(work)
    assert [one.key for one in outcomes] == list(range(number))
    assert outcomes[300] == Outcome(300, FAILED, "rank 0: 0 300")


def test_nothing_is_said_while_nothing_is_open_and_one_round_otherwise() -> None:
    exchange = MemoryExchange(2)
    calls: list[int] = []

    def work(group: RankGroup) -> None:
        mine = Votes(exchange.group(group.rank))
        mine.count()
        if group.rank == 0:
            calls.append(exchange.num_calls)
        mine.open(1, 1)
        for _ in range(10):
            mine.count()
        mine.close(1)
        mine.count()

    run_on_ranks(2, work)
    assert (calls, exchange.num_calls) == ([0], 10)


def test_ranks_that_vote_on_other_requests_are_found_out() -> None:
    def work(group: RankGroup) -> None:
        mine = Votes(group)
        mine.open(group.rank, 1)
        mine.count()

    with pytest.raises(RanksDiverged, match="do not vote on the same requests"):
        run_on_ranks(2, work)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
