"""What fails on one rank while a server starts fails on all, with the name of the rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang.srt.distributed import joint_start
from sglang.srt.distributed.joint_start import (
    OtherRankFailed,
    on_every_rank,
    ranks_on_this_machine,
)
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.memory_ranks import EchoGroup, MemoryExchange

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def on_ranks(size: int, work: Callable[[RankGroup], object]) -> list[object]:
    """What `work` gave or raised on each rank."""
    exchange = MemoryExchange(size, deadline_s=20.0)

    def on(rank: int) -> object:
        try:
            return work(exchange.group(rank, most_delay_s=0.002))
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on, range(size)))


def test_what_all_ranks_have_made_is_kept() -> None:
    discarded: list[int] = []

    def work(group: RankGroup) -> int:
        return on_every_rank(group, lambda: 7 + group.rank, discarded.append)

    assert on_ranks(3, work) == [7, 8, 9]
    assert work(SingleRank()) == 7
    assert not discarded


def test_what_others_have_made_is_discarded_where_one_rank_failed() -> None:
    discarded: list[int] = []

    def make(rank: int) -> int:
        if rank == 1:
            raise MemoryError("no room for\n8 bytes")
        return rank

    got = on_ranks(
        3,
        lambda group: on_every_rank(group, lambda: make(group.rank), discarded.append),
    )
    assert isinstance(got[1], MemoryError), "the rank itself keeps the type"
    for other in (got[0], got[2]):
        assert isinstance(other, OtherRankFailed)
        assert str(other) == "rank 1: no room for 8 bytes"
    assert sorted(discarded) == [0, 2]


def test_every_rank_that_failed_is_named_also_without_a_message() -> None:
    errors = {1: KeyError(), 2: OSError(5, "input/output error")}

    def make(rank: int) -> None:
        if rank in errors:
            raise errors[rank]

    got = on_ranks(3, lambda group: on_every_rank(group, lambda: make(group.rank)))
    assert str(got[0]) == "rank 1: KeyError; rank 2: [Errno 5] input/output error"
    assert got[1:] == [errors[1], errors[2]]


def test_a_failure_of_this_rank_alone_is_raised_as_it_is() -> None:
    error = ValueError("page_size")

    def fail() -> None:
        raise error

    for group in (SingleRank(), EchoGroup()):
        with pytest.raises(ValueError, match="page_size") as raised:
            on_every_rank(group, fail)
        assert raised.value is error


def test_ranks_of_one_machine_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ranks_on_this_machine(SingleRank()) == ranks_on_this_machine(EchoGroup()) == 1
    assert on_ranks(3, ranks_on_this_machine) == [3, 3, 3]

    class BootId:
        """Ranks 0 and 2 share a machine."""

        def read_bytes(self) -> bytes:
            return names.pop()

    names = [b"a", b"b", b"a"]
    monkeypatch.setattr(joint_start, "_BOOT_ID", BootId())
    assert sorted(on_ranks(3, ranks_on_this_machine), key=str) == [1, 2, 2]
    monkeypatch.setattr(joint_start, "_BOOT_ID", tmp_path / "absent")
    assert on_ranks(2, ranks_on_this_machine) == [2, 2]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
