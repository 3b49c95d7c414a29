"""Groups of real ranks over gloo: who is in which, and what their collectives give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rigs.schedulers.rank_processes import RankFailed, run_ranks
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    create_custom_parallel_group,
    get_attention_cp_group,
    get_attention_tp_group,
    get_world_group,
    initialize_model_parallel,
)
from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")


def rank_group() -> RankGroup:
    return TorchRankGroup(get_world_group(), get_attention_tp_group(), get_attention_cp_group())


def facts() -> dict[str, Any]:
    group = rank_group()
    parts = get_world_group(), get_attention_tp_group(), get_attention_cp_group()
    return {
        "ranks": [part.ranks for part in parts],
        "places": [(part.rank, part.size) for part in parts],
        "attn": (group.attn_tp_rank, group.attn_tp_size, group.attn_cp_rank, group.attn_cp_size),
        "twins": [part.cpu_group is not None for part in parts],
    }


@pytest.mark.parametrize(
    ("size", "cp", "tp_of_rank_3", "cp_of_rank_3"),
    [
        (4, 1, (0, 1, 2, 3), (3,)),
        (4, 2, (2, 3), (1, 3)),
        (4, 4, (3,), (0, 1, 2, 3)),
        (6, 2, (3, 4, 5), (0, 3)),
    ],
)
def test_ranks_know_their_groups(
    size: int, cp: int, tp_of_rank_3: tuple[int, ...], cp_of_rank_3: tuple[int, ...]
) -> None:
    found = run_ranks(size, facts, attn_cp_size=cp)
    assert found[3]["ranks"] == [tuple(range(size)), tp_of_rank_3, cp_of_rank_3]
    attn_tp = size // cp
    for rank, one in enumerate(found):
        assert one["attn"] == (rank % attn_tp, attn_tp, rank // attn_tp, cp)
        assert [place for place, _ in one["places"]] == [rank, rank % attn_tp, rank // attn_tp]
        assert [count for _, count in one["places"]] == [size, attn_tp, cp]
        assert one["twins"] == [True, attn_tp > 1, cp > 1]


def collectives() -> dict[str, Any]:
    world, tp, cp = get_world_group(), get_attention_tp_group(), get_attention_cp_group()

    def sums(group: GroupCoordinator) -> list[float]:
        return group.all_reduce(torch.tensor([2.0**world.rank, 1.0])).tolist()

    def parts(group: GroupCoordinator) -> list[list[list[int]]]:
        return group.all_gather(torch.tensor([[world.rank, 7]])).tolist()

    group = rank_group()
    texts = [b"", b"x" * 4088, b"y" * 4089, bytes(range(256)) * 4000]
    said = [group.broadcast(text if group.rank == 0 else None) == text for text in texts]
    least = group.reduce_min(torch.tensor([world.rank, -world.rank, 5]))
    return {
        "sums": [sums(world), sums(tp), sums(cp)],
        "parts": [parts(tp), parts(cp)],
        "said": said,
        "least": least.tolist(),
        "texts": gather_texts(group, f"rank {world.rank}", 16),
    }


def test_what_collectives_give() -> None:
    found = run_ranks(4, collectives, attn_cp_size=2)
    for rank, one in enumerate(found):
        tp, cp = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert one["sums"] == [
            [15.0, 4.0],
            [float(sum(2**r for r in tp)), 2.0],
            [float(sum(2**r for r in cp)), 2.0],
        ]
        assert one["parts"] == [[[[r, 7]] for r in tp], [[[r, 7]] for r in cp]]
        assert one["said"] == [True] * 4
        assert one["least"] == [0, -3, 5]
        assert one["texts"] == [f"rank {r}" for r in range(4)]


def least() -> list[list[int]]:
    rank, group = get_world_group().rank, rank_group()
    mine = torch.tensor([rank, -rank, 5, 2**62 - rank, -(2**62) - rank])
    tables = [group.reduce_min(values) for values in (mine, mine[3:], mine)]
    assert mine[0] == rank, "it is given back as a new tensor"
    return [table.tolist() for table in tables]


@pytest.mark.parametrize(("size", "cp"), [(2, 1), (3, 1), (4, 1), (4, 4), (4, 2), (6, 2), (6, 3)])
def test_every_rank_gets_the_least_over_any_groups(size: int, cp: int) -> None:
    last = size - 1
    wanted = [0, -last, 5, 2**62 - last, -(2**62) - last]
    assert run_ranks(size, least, attn_cp_size=cp) == [[wanted, wanted[3:], wanted]] * size


def min_of_its_own() -> dict[str, Any]:
    rank, group = get_world_group().rank, rank_group()
    own = group.open_min()
    assert isinstance(own, TorchRankGroup)
    ranks = [part.ranks for part in own.rounds]
    theirs = {id(part.cpu_group) for part in own.rounds}
    shared = (get_world_group(), get_attention_tp_group(), get_attention_cp_group())
    assert theirs.isdisjoint(id(part.cpu_group) for part in shared)
    mine = torch.tensor([rank, -rank, 5])
    found = [one.reduce_min(mine).tolist() for one in (own, group, own)]
    own.close()
    own.close()
    # The groups that others use are still there.
    return {"ranks": ranks, "least": [*found, group.reduce_min(mine).tolist()]}


@pytest.mark.parametrize(
    ("size", "cp", "of_rank_1"),
    [(2, 1, [(0, 1)]), (2, 2, [(0, 1)]), (4, 2, [(1, 3), (0, 1)]), (3, 3, [(0, 1, 2)])],
)
def test_a_min_has_groups_of_its_own_one_for_each_set_of_ranks(
    size: int, cp: int, of_rank_1: list[tuple[int, ...]]
) -> None:
    found = run_ranks(size, min_of_its_own, attn_cp_size=cp)
    assert found[1]["ranks"] == of_rank_1
    assert all(one["least"] == [[0, 1 - size, 5]] * 4 for one in found)


def of_dp_groups() -> dict[str, Any]:
    world, group = get_world_group().rank, TorchRankGroup.of_dp_group()
    own = group.open_min()
    mine = torch.tensor([world, -world])
    said = group.broadcast(f"from {world}".encode() if group.rank == 0 else None)
    found = {
        "place": (group.first_rank, group.rank, group.size),
        "attn": (group.attn_tp_rank, group.attn_tp_size, group.attn_cp_rank, group.attn_cp_size),
        "parts": [get_attention_tp_group().ranks, get_attention_cp_group().ranks],
        "said": said.decode(),
        "least": [group.reduce_min(mine).tolist(), own.reduce_min(mine).tolist()],
        "world": TorchRankGroup.of_world().reduce_min(mine).tolist(),
    }
    own.close()
    return found


@pytest.mark.parametrize(
    ("size", "dp", "cp", "parts_of_last"),
    [
        (2, 2, 1, [(1,), (1,)]),
        (4, 2, 1, [(2, 3), (3,)]),
        (4, 2, 2, [(3,), (2, 3)]),
        (6, 3, 1, [(4, 5), (5,)]),
        (8, 2, 2, [(6, 7), (5, 7)]),
    ],
)
def test_dp_groups_say_and_agree_by_themselves(
    size: int, dp: int, cp: int, parts_of_last: list[tuple[int, ...]]
) -> None:
    found = run_ranks(size, of_dp_groups, attn_cp_size=cp, attn_dp_size=dp)
    each = size // dp
    attn_tp = each // cp
    for rank, one in enumerate(found):
        first, place = rank // each * each, rank % each
        assert one["place"] == (first, place, each)
        assert one["attn"] == (place % attn_tp, attn_tp, place // attn_tp, cp)
        assert one["said"] == f"from {first}"
        assert one["least"] == [[first, 1 - first - each]] * 2
        assert one["world"] == [0, 1 - size]
    assert found[-1]["parts"] == parts_of_last


def sums() -> list[bool]:
    """True if sums of short and long tensors have the same bits on all ranks."""
    world, right = get_world_group(), []
    for count, dtype in ((1000, torch.float32), (1000, torch.bfloat16), (70_000, torch.float32)):
        parts = [
            torch.randn(2, count, generator=torch.Generator().manual_seed(rank))
            for rank in range(world.size)
        ]
        mine = parts[world.rank].to(dtype, copy=True)
        assert world.all_reduce(mine) is mine
        # Each part is rounded, and each sum, by half an epsilon at most.
        error = (mine.double() - sum(part.double() for part in parts)).abs()
        whole = sum(part.double().abs() for part in parts)
        right.append(bool((error <= world.size * torch.finfo(dtype).eps * whole).all()))
        same = world.all_gather(mine)
        right.append(bool((same == mine).all()))
    return right


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_short_and_long_tensors(size: int) -> None:
    assert run_ranks(size, sums) == [[True] * 6] * size


def custom_groups(groups: list[list[int]]) -> list[int]:
    rank = get_world_group().rank
    made = create_custom_parallel_group(groups[rank])
    if made is None:
        return [rank]
    return sorted(dist.get_process_group_ranks(made))


def test_ranks_may_name_groups_themselves() -> None:
    groups = [[0, 3], [1], [2], [3, 0]]
    assert run_ranks(4, custom_groups, groups) == [[0, 3], [1], [2], [0, 3]]


def test_groups_that_contradict_each_other_are_refused_on_every_rank() -> None:
    with pytest.raises(RankFailed, match=r"no partition: rank 0 names \[0, 1\]"):
        run_ranks(2, custom_groups, [[0, 1], [1]])


def made_again(size: int, cp: int, dp: int) -> str:
    try:
        initialize_model_parallel(size, cp, dp)
    except ValueError as error:
        return str(error)
    return str(get_attention_cp_group().ranks)


@pytest.mark.parametrize(
    ("size", "cp", "dp", "outcome"),
    [
        (2, 2, 1, "(0, 1)"),
        (4, 1, 1, "tp_size=4, but the world has 2 ranks"),
        (2, 3, 1, "attn_cp_size=3 does not divide tp_size=2"),
        (2, 2, 2, "attn_cp_size=2 times attn_dp_size=2 does not divide tp_size=2"),
    ],
)
def test_sizes_that_do_not_fit_the_world_are_refused(
    size: int, cp: int, dp: int, outcome: str
) -> None:
    assert run_ranks(2, made_again, size, cp, dp) == [outcome] * 2


def lost() -> str:
    import os

    group = rank_group()
    if group.rank == 1:
        os._exit(0)
    group.reduce_min(torch.zeros(3, dtype=torch.int64))
    return "went on"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_gone_is_an_error_in_the_others_collective(size: int) -> None:
    lost_rank = r"RankLost: another rank is gone: [A-Z][a-z ]+ \[127\.0\.0\.1\]:\d+[^\n.]*\n"
    with pytest.raises(RankFailed, match=lost_rank):
        run_ranks(size, lost)


def wrong() -> str:
    try:
        get_world_group().all_reduce(torch.zeros(2, dtype=torch.uint16))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_mistake_of_a_ranks_own_is_not_a_lost_rank() -> None:
    assert run_ranks(2, wrong) == ["RuntimeError: Invalid scalar type"] * 2


def test_groups_are_asked_for_before_they_are_made() -> None:
    with pytest.raises(RuntimeError, match="call initialize_model_parallel first"):
        get_world_group()
