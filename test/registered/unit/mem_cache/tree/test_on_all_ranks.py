"""Steps of a start that succeed on every rank or on none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rigs.caches.memory_ranks import run_on_ranks
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.mem_cache.tree.on_all_ranks import on_all_ranks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def failing(errors: dict[int, Exception], discarded: list[int]) -> Callable[[RankGroup], object]:
    """Result of a step on a rank, or the exception that it raises."""

    def work(group: RankGroup) -> object:
        def step() -> int:
            if group.rank in errors:
                raise errors[group.rank]
            return 7 + group.rank

        try:
            return on_all_ranks(group, step, discarded.append)
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    return work


def test_what_succeeds_everywhere_is_kept() -> None:
    discarded: list[int] = []
    assert run_on_ranks(3, failing({}, discarded)) == [7, 8, 9]
    assert not discarded


def test_what_fails_somewhere_fails_everywhere_with_the_names_of_the_ranks() -> None:
    discarded: list[int] = []
    errors = {1: MemoryError("no\nroom"), 2: StorageUnavailable("nobody there")}
    told = run_on_ranks(4, failing(errors, discarded))
    for rank, one in enumerate(told):
        assert isinstance(one, ValueError)
        assert str(one) == "rank 1 of 4: MemoryError: no room; rank 2 of 4: nobody there"
        assert one.__cause__ is errors.get(rank)
    assert sorted(discarded) == [7, 10]


def test_an_error_without_a_text_is_a_failure_too() -> None:
    told = run_on_ranks(2, failing({0: ValueError()}, []))
    assert [str(one) for one in told] == ["rank 0 of 2: ValueError: "] * 2


def test_a_single_rank_raises_what_the_step_raises() -> None:
    error = StorageUnavailable("nobody there")

    def fail() -> None:
        raise error

    with pytest.raises(StorageUnavailable) as raised:
        on_all_ranks(SingleRank(), fail)
    assert raised.value is error
