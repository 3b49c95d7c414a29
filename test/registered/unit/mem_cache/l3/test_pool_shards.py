"""Objects of several ranks: which heads an object holds, and which rank writes it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rigs.caches.memory_ranks import MemoryExchange, PlaceInGroup
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.srt.mem_cache.l3.stored_pools import PoolShards
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PAGES = 20_000


def shares(num_heads: int, tp_size: int) -> list[RankShare]:
    """Shares of KV heads as the model's loader divides them."""
    return [
        TensorPlacement(
            dtype=torch.float32, device="cpu", tp_group=PlaceInGroup(rank, tp_size)
        ).kv_state_share(num_heads)
        for rank in range(tp_size)
    ]


def shards(
    by_tp_rank: list[RankShare], *, cp: int = 1, tp_lcm_size: int | None = None
) -> list[PoolShards]:
    """Shards of every rank, in the order of ranks."""
    tp = len(by_tp_rank)
    exchange = MemoryExchange(tp * cp, attn_cp_size=cp)
    return [
        PoolShards.of("kv", by_tp_rank[rank % tp], exchange.group(rank), tp_lcm_size)
        for rank in range(tp * cp)
    ]


def names(of_rank: PoolShards) -> list[str]:
    return [one.name for one in of_rank.objects]


SAME = RankShare()


def test_an_object_is_named_by_its_heads_and_by_no_rank() -> None:
    assert [names(one) for one in shards(shares(8, 2))] == [["kv/h0-3.8"], ["kv/h4-7.8"]]
    assert [names(one) for one in shards(shares(8, 1))] == [["kv"]]
    assert [names(one) for one in shards([SAME] * 4)] == [["kv"]] * 4
    assert [names(one) for one in shards(shares(2, 4))] == [["kv/h0-0.2"]] * 2 + [["kv/h1-1.2"]] * 2
    assert [names(one) for one in shards(shares(1, 2))] == [["kv"]] * 2, "one head, on all ranks"
    assert [names(one) for one in shards(shares(8, 2), cp=2)] == [["kv/h0-3.8"], ["kv/h4-7.8"]] * 2


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("heads", "tp"), [(8, 1), (8, 2), (8, 4), (2, 4), (1, 4), (0, 4)])
def test_each_object_has_one_writer_and_ranks_write_evenly(heads: int, tp: int, cp: int) -> None:
    ranks = shards(shares(heads, tp) if heads else [SAME] * tp, cp=cp)
    written: Counter[str] = Counter()
    by_rank: Counter[int] = Counter()
    for page in range(PAGES):
        for rank, one in enumerate(ranks):
            for stored in one.objects:
                key = f"ns/{page:064x}/{stored.name}"
                written[key] += 0
                if one.writes(key):
                    written[key] += 1
                    by_rank[rank] += 1
    assert set(written.values()) == {1}
    even = len(written) / (tp * cp)
    assert all(abs(by_rank[rank] - even) <= 0.1 * even for rank in range(tp * cp)), by_rank


def test_with_a_common_size_pages_are_cut_as_of_that_many_ranks() -> None:
    assert names(shards(shares(8, 1), tp_lcm_size=2)[0]) == ["kv/h0-3.8", "kv/h4-7.8"]
    assert [names(one) for one in shards(shares(8, 2), tp_lcm_size=4)] == [
        ["kv/h0-1.8", "kv/h2-3.8"],
        ["kv/h4-5.8", "kv/h6-7.8"],
    ]
    assert names(shards(shares(2, 1), tp_lcm_size=4)[0]) == ["kv/h0-0.2", "kv/h1-1.2"]
    assert names(shards(shares(8, 1), tp_lcm_size=1)[0]) == ["kv"]
    assert names(shards([SAME] * 2, tp_lcm_size=4)[0]) == ["kv"]
    first = shards(shares(8, 1), tp_lcm_size=2)[0]
    assert [one.pool for one in first.objects] == ["kv", "kv/h4-7.8"], "as the backend knows them"
    assert first.is_split and not shards(shares(8, 2), tp_lcm_size=2)[0].is_split


@pytest.mark.parametrize(
    ("by_rank", "size", "told"),
    [
        (shares(8, 2), 3, "3 is no multiple of the 2 ranks"),
        (shares(8, 4), 2, "2 is no multiple of the 4 ranks"),
        ([SAME] * 2, 3, "3 is no multiple of the 2 ranks"),
        (shares(6, 2), 4, "4 ranks cannot split the 6 heads of pool kv evenly; give a divisor or"),
    ],
)
def test_a_common_size_that_cannot_work_is_refused(
    by_rank: list[RankShare], size: int, told: str
) -> None:
    with pytest.raises(ValueError, match=f"tp_lcm_size: {told}"):
        shards(by_rank, tp_lcm_size=size)


@pytest.mark.parametrize("share", [(0, 3, 8), (4, 8, 8), (0, 2, 8)])
def test_heads_that_are_not_split_evenly_are_refused(share: tuple[int, int, int]) -> None:
    uneven = RankShare(RankSplit.HEADS, *share)
    with pytest.raises(ValueError, match=r"pool kv: rank 0 of 2 has heads .* no even split"):
        shards([uneven, uneven])
