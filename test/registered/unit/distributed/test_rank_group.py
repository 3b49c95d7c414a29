"""Groups of ranks: what collectives give, and that what does not fit fails on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rigs.caches.memory_ranks import MemoryExchange, MemoryRankGroup, RankIsMissing
from sglang.srt.distributed.rank_group import (
    RankGroup,
    RanksDiverged,
    SingleRank,
    gather_bytes,
    gather_texts,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def on_ranks(
    size: int,
    work: Callable[[MemoryRankGroup], object],
    deadline_s: float = 20.0,
    attn_cp_size: int = 1,
) -> list[str]:
    """Result or error of `work` on each rank."""
    exchange = MemoryExchange(size, deadline_s, attn_cp_size=attn_cp_size)

    def on(rank: int) -> str:
        try:
            return str(work(exchange.group(rank, most_delay_s=0.002)))
        except (RanksDiverged, RankIsMissing) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on, range(size)))


def test_one_rank_is_its_own_group() -> None:
    group = SingleRank()
    values = torch.tensor([3, -4])
    assert (group.rank, group.size) == (0, 1)
    assert group.broadcast(b"tick") == b"tick"
    least = group.reduce_min(values)
    assert least.tolist() == [3, -4] and least is not values
    assert gather_texts(group, "alone", 8) == ["alone"]
    assert gather_bytes(group, b"alone\0") == [b"alone\0"]


def test_ranks_get_what_rank_0_says_and_the_least_of_what_all_have() -> None:
    def work(group: RankGroup) -> tuple[bytes, list[int], bytes]:
        first = group.broadcast(b"one" if group.rank == 0 else None)
        least = group.reduce_min(torch.tensor([group.rank, -group.rank, 5]))
        return first, least.tolist(), group.broadcast(b"" if group.rank == 0 else None)

    assert on_ranks(3, work) == [str((b"one", [0, -2, 5], b""))] * 3


@pytest.mark.parametrize(
    ("size", "attn_cp_size", "rounds"), [(4, 1, 1), (4, 2, 2), (4, 4, 1), (6, 3, 2), (1, 1, 0)]
)
def test_the_least_of_all_ranks_takes_a_round_over_cp_and_one_over_tp(
    size: int, attn_cp_size: int, rounds: int
) -> None:
    def work(group: MemoryRankGroup) -> tuple[list[int], int]:
        values = torch.full((size,), 9)
        values[group.rank] = -group.rank
        return group.reduce_min(values).tolist(), len(group.rounds)

    found = on_ranks(size, work, attn_cp_size=attn_cp_size)
    assert found == [str(([-rank for rank in range(size)], rounds))] * size


def test_a_round_alone_is_over_the_ranks_with_the_same_heads_or_over_those_of_a_set() -> None:
    def work(group: MemoryRankGroup) -> list[int]:
        least = []
        for round_ in list(group.rounds):
            group.rounds = [round_]
            least += group.reduce_min(torch.tensor([10 + group.rank])).tolist()
        return least

    assert on_ranks(4, work, attn_cp_size=2) == [
        str(two) for two in ([10, 10], [11, 10], [10, 12], [11, 12])
    ]


def test_unlike_calls_of_other_ranks_than_those_waited_for_are_an_error() -> None:
    """Ranks 0 and 2 meet, and so do 1 and 3, which are about to do something else."""

    def work(group: MemoryRankGroup) -> object:
        return group.reduce_min(torch.zeros(4 + group.rank % 2).long())

    found = on_ranks(4, work, attn_cp_size=2)
    assert all(text.startswith("RanksDiverged: ") for text in found)
    both = (
        "a reduction of 4 values over CP on rank [02], a reduction of 5 values over CP on rank [13]"
    )
    assert any(re.search(f"collective 0 is {both}", text) for text in found)


def test_texts_of_all_ranks_reach_all_ranks_cut_to_their_length() -> None:
    texts = ["", "größer", "a" * 40]
    got = on_ranks(3, lambda group: gather_texts(group, texts[group.rank], 16))
    assert got == [str(["", "größer", "a" * 16])] * 3


@pytest.mark.parametrize("attn_cp_size", [1, 3])
def test_bytes_of_any_length_reach_all_ranks(attn_cp_size: int) -> None:
    most = torch.iinfo(torch.int64).max.to_bytes(8, "little")
    raws = [b"", bytes(range(256)) * 33 + b"\0\0\0", most + b"\xff" * 9]

    def work(group: RankGroup) -> bool:
        return gather_bytes(group, raws[group.rank]) == raws

    assert on_ranks(3, work, attn_cp_size=attn_cp_size) == ["True"] * 3


def test_unequal_lengths_are_an_error_that_names_both() -> None:
    got = on_ranks(2, lambda group: group.reduce_min(torch.zeros(4 + group.rank).long()))
    both = "a reduction of 4 values on rank 0, a reduction of 5 values on rank 1"
    assert got == [f"RanksDiverged: collective 0 is {both}"] * 2


def test_unlike_calls_are_an_error_that_names_both() -> None:
    def work(group: RankGroup) -> object:
        return group.broadcast(b"") if group.rank == 0 else group.reduce_min(torch.zeros(1).long())

    both = "a broadcast on rank 0, a reduction of 1 values on rank 1"
    assert on_ranks(2, work) == [f"RanksDiverged: collective 0 is {both}"] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def work(group: RankGroup) -> object:
        return None if group.rank == 1 else group.reduce_min(torch.zeros(2).long())

    (first, _) = on_ranks(2, work, deadline_s=0.02)
    assert first == (
        "RankIsMissing: ranks [1] did not come to collective 0: a reduction of 2 values"
    )


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    exchange = MemoryExchange(2)
    exchange.fail(OSError("no memory"))
    with pytest.raises(RanksDiverged, match="another rank has failed: no memory"):
        exchange.group(0).broadcast(b"tick")
