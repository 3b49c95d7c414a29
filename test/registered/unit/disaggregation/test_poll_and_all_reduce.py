"""Agreement of the ranks on senders and receivers: the least counts, and idle ranks say nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest

from rigs.caches.memory_ranks import MemoryExchange, run_on_ranks
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferError
from sglang.srt.disaggregation.utils import POLL_SLOTS, failure_reasons, poll_and_all_reduce
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged, SingleRank
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@dataclass
class Poller:
    """A sender or a receiver as this rank sees it."""

    bootstrap_room: int
    status: KVPoll
    why: str = ""

    def poll(self) -> KVPoll:
        return self.status

    def failure_exception(self) -> NoReturn:
        raise KVTransferError(self.why)


def on_two_ranks(
    pollers_of: Callable[[int], list[Poller]],
) -> tuple[list[KVPoll], list[str]]:
    """The agreed statuses and the reasons of all pollers; they must be the same on both ranks."""

    def run(group: RankGroup) -> tuple[list[KVPoll], list[str]]:
        pollers = pollers_of(group.rank)
        polls = poll_and_all_reduce(pollers, group)
        failed = [one for one, poll in zip(pollers, polls, strict=True) if poll == KVPoll.Failed]
        return polls, failure_reasons(failed, group)

    one, other = run_on_ranks(2, run, most_delay_s=0.001)
    assert one == other
    return one


def test_one_rank_agrees_with_itself() -> None:
    pollers = [Poller(7, KVPoll.WaitingForInput), Poller(8, KVPoll.Failed, "because")]
    polls = poll_and_all_reduce(pollers, SingleRank())
    assert polls == [KVPoll.WaitingForInput, KVPoll.Failed]
    assert failure_reasons(pollers[1:], SingleRank()) == ["because"]


def test_the_least_status_counts() -> None:
    mixed = [KVPoll.Transferring, KVPoll.Success]
    polls, _ = on_two_ranks(lambda rank: [Poller(5, mixed[rank]), Poller(6, KVPoll.Success)])
    assert polls == [KVPoll.Transferring, KVPoll.Success]


@pytest.mark.parametrize("who", [0, 1])
def test_one_ranks_failure_is_all_ranks_with_its_reason(who: int) -> None:
    why = "größer\x1f als gedacht: " + "ß" * 600

    def pollers(rank: int) -> list[Poller]:
        mine = [Poller(room, KVPoll.WaitingForInput) for room in (1, 2, 3)]
        if rank == who:
            mine[1] = Poller(2, KVPoll.Failed, why)
            mine[2] = Poller(3, KVPoll.Failed)
        return mine

    polls, (second, third) = on_two_ranks(pollers)
    assert polls == [KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Failed]
    assert (second, third) == (f"rank {who}: {why[:512]}", "")


def test_of_two_reasons_the_first_ranks_counts() -> None:
    _, reasons = on_two_ranks(lambda rank: [Poller(1, KVPoll.Failed, f"as {rank} saw")])
    assert reasons == ["rank 0: as 0 saw"]


def test_more_requests_than_a_vector_has_slots() -> None:
    number = 2 * POLL_SLOTS + 5

    def pollers(rank: int) -> list[Poller]:
        return [
            Poller(room, KVPoll.Failed if room % 2 else KVPoll.Success, f"{rank} {room}")
            for room in range(number)
        ]

    polls, reasons = on_two_ranks(pollers)
    assert polls == [KVPoll.Failed if room % 2 else KVPoll.Success for room in range(number)]
    assert reasons[150] == "rank 0: 0 301"


def test_nothing_is_said_while_there_is_nothing_to_poll_and_one_vector_otherwise() -> None:
    exchange = MemoryExchange(2)
    calls: list[int] = []

    def work(group: RankGroup) -> None:
        group = exchange.group(group.rank)
        poll_and_all_reduce([], group)
        if group.rank == 0:
            calls.append(exchange.num_calls)
        for _ in range(10):
            poll_and_all_reduce([Poller(1, KVPoll.Success)], group)

    run_on_ranks(2, work)
    assert (calls, exchange.num_calls) == ([0], 10)


def test_ranks_that_poll_other_requests_are_found_out() -> None:
    def work(group: RankGroup) -> None:
        poll_and_all_reduce([Poller(group.rank, KVPoll.Success)], group)

    with pytest.raises(RanksDiverged, match="do not poll the same requests"):
        run_on_ranks(2, work)
