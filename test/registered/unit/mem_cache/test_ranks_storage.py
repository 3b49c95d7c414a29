"""L3 of several ranks: shared objects, each written once; complete over all ranks or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.mla_rig import MLARig
from rigs.caches.sharded_rig import ShardedRig, ShardedStateRig
from rigs.caches.state_rig import SPEC, StateRig
from rigs.caches.storage_rigs import attached_store_of, counts
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.mem_cache.host import host_layout
from sglang.srt.mem_cache.host.host_layout import resolve_layout_and_io
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

PAGE = 4
PROMPT = [*range(160), 7]
PAGES = 40
L3 = HiCacheSettings(
    hicache_storage_backend="file",
    hicache_storage_backend_extra_config='{"prefetch_threshold": 4}',
)
COMMON = HiCacheSettings(
    hicache_storage_backend="file",
    hicache_storage_backend_extra_config='{"prefetch_threshold": 4, "tp_lcm_size": 4}',
)


def sharded(group: RankGroup, **args: Any) -> ShardedRig:
    return ShardedRig(l1_pages=128, settings=L3, group=group, **args)


def latent(group: RankGroup) -> MLARig:
    return MLARig(l1_pages=128, settings=L3, group=group)


def written(rig: CacheRig, *, present: int = 0) -> int:
    """Objects that this rank has written, having found `present` of those it was to write."""
    storage = attached_store_of(rig).client
    assert storage is not None
    stats = storage.get_stats()
    assert stats.get("set_present_pages", 0) == present
    number = stats["set_objects"]
    assert isinstance(number, int)
    return number


def objects(root: Path) -> list[str]:
    """Names of all objects."""
    return sorted(path.name for path in root.glob("*/??/*"))


def write_all(make: Callable[[RankGroup], CacheRig], *prompts: list[int]) -> Any:
    """Work of a rank: run prompts, and say how many objects it has written."""

    def work(group: RankGroup) -> int:
        rig = make(group)
        try:
            for prompt in prompts:
                rig.run(prompt)
            rig.settle()
            return written(rig)
        finally:
            rig.close()

    return work


def read_all(make: Callable[[RankGroup], CacheRig], prompt: list[int]) -> Any:
    """Work of a rank: what it reuses of a prompt."""

    def work(group: RankGroup) -> Reused:
        rig = make(group)
        try:
            reused = rig.run(prompt)
            rig.settle()
            return reused
        finally:
            rig.close()

    return work


# -- who writes, under which names ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "ranks", "cp", "per_page"),
    [
        pytest.param(sharded, 2, 1, 2, id="tp2"),
        pytest.param(sharded, 2, 2, 1, id="cp2"),
        pytest.param(sharded, 4, 2, 2, id="tp2-cp2"),
        pytest.param(lambda group: sharded(group, total_heads=2), 4, 1, 2, id="replicated"),
        pytest.param(latent, 4, 1, 2, id="mla-tp4"),
        pytest.param(latent, 4, 2, 2, id="mla-tp2-cp2"),
    ],
)
def test_each_object_is_written_once_and_read_on_all_ranks(
    storage_dir: Path,
    make: Callable[[RankGroup], CacheRig],
    ranks: int,
    cp: int,
    per_page: int,
) -> None:
    shares = run_on_ranks(ranks, write_all(make, PROMPT), attn_cp_size=cp)
    assert sum(shares) == len(objects(storage_dir)) == per_page * PAGES
    assert min(shares) > 0, "every rank writes"
    results = run_on_ranks(ranks, read_all(make, PROMPT), attn_cp_size=cp)
    assert results == [Reused(storage=160)] * ranks


def test_the_writing_is_shared_evenly() -> None:
    prompts = [[*range(1000 * first, 1000 * first + 400), 7] for first in range(20)]

    def make(group: RankGroup) -> CacheRig:
        return ShardedRig(l1_pages=2600, settings=L3, group=group)

    shares = run_on_ranks(4, write_all(make, *prompts), attn_cp_size=2)
    even = 2 * len(prompts) * 100 / 4
    assert sum(shares) == 4 * even
    assert all(abs(share - even) <= 0.1 * even for share in shares), shares


def test_names_have_heads_and_no_ranks(storage_dir: Path) -> None:
    run_on_ranks(4, write_all(sharded, PROMPT), attn_cp_size=2)
    assert {name.partition("kv")[2] for name in objects(storage_dir)} == {
        "%2Fh0-1%2E4",
        "%2Fh2-3%2E4",
    }
    run_on_ranks(2, write_all(latent, PROMPT), attn_cp_size=1)
    ends = {name.rpartition("%2F")[2] for name in objects(storage_dir)}
    assert ends == {"h0-1%2E4", "h2-3%2E4", "kv", "indexer"}


def test_the_tree_asks_for_the_least_of_all_ranks_by_groups_of_its_own() -> None:
    def work(group: RankGroup) -> list[list[int]]:
        rig = ShardedRig(l1_pages=8, settings=COMMON, group=group)
        mine = torch.tensor([group.rank, -group.rank])
        found = rig.hi._all_reduce_prefetch_groups(mine).tolist()
        assert rig.hi._all_reduce_attn_groups(mine).tolist() == found
        with patch.object(rig.hi._prefetch_sync, "close") as close:
            rig.close()
        assert close.called, "destroyed with the tree"
        return [found, mine.tolist()]

    for rank, told in enumerate(run_on_ranks(4, work, attn_cp_size=2)):
        assert told == [[0, -3], [rank, -rank]]


def test_backends_are_told_the_rank_in_attention_and_who_has_the_same_heads() -> None:
    def work(group: RankGroup) -> tuple[int, ...]:
        rig = ShardedRig(l1_pages=8, settings=COMMON, group=group)
        storage = attached_store_of(rig).client
        assert storage is not None and storage.storage_config is not None
        told = storage.storage_config
        rig.close()
        assert (told.tp_lcm_size, told.should_split_heads, told.is_mla_model) == (4, True, False)
        assert rig.hi.store.get_attn_cp_rank_and_size() == (group.rank // 2, 2)
        return told.tp_rank, told.tp_size, told.attn_cp_rank, told.attn_cp_size

    ranks = run_on_ranks(4, work, attn_cp_size=2)
    assert ranks == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]


def test_ranks_without_the_common_size_do_not_find_those_of_others(storage_dir: Path) -> None:
    run_on_ranks(2, write_all(sharded, PROMPT))
    assert run_on_ranks(4, read_all(sharded, PROMPT)) == [Reused()] * 4
    assert run_on_ranks(1, read_all(sharded, PROMPT)) == [Reused()]
    context_parallel = run_on_ranks(4, read_all(sharded, PROMPT), attn_cp_size=2)
    assert context_parallel == [Reused(storage=160)] * 4


# -- servers of several sizes ----------------------------------------------------------------------


@pytest.mark.half
@pytest.mark.parametrize("heads", [4, 2, 8])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_pages_written_by_one_number_of_ranks_are_read_by_any(
    storage_dir: Path, heads: int, writers: int
) -> None:
    """Two heads are fewer than four ranks, so several ranks have the same head."""

    def make(group: RankGroup, layout: str = "auto") -> CacheRig:
        settings = replace(COMMON, hicache_mem_layout=layout)
        return ShardedRig(l1_pages=128, settings=settings, group=group, total_heads=heads)

    shares = run_on_ranks(writers, write_all(make, PROMPT))
    assert sum(shares) == len(objects(storage_dir)) == min(heads, 4) * PAGES
    # Layouts of the same order of bytes.
    for ranks, layout in ((1, "layer_first"), (2, "page_first_kv_split"), (4, "page_first_direct")):
        read = read_all(partial(make, layout=layout), PROMPT)
        assert run_on_ranks(ranks, read) == [Reused(storage=160)] * ranks
    assert run_on_ranks(4, read_all(make, PROMPT), attn_cp_size=2) == [Reused(storage=160)] * 4
    assert len(objects(storage_dir)) == min(heads, 4) * PAGES, "nothing was written again"


@pytest.mark.parametrize("writers", [1, 4])
def test_sizes_whose_pages_are_long_and_short_share_a_store_on_cuda(
    storage_dir: Path, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has 768 bytes of K in all heads; `auto` is told of a GPU, and copies are a CPU's."""
    layouts: set[str] = set()

    def as_on_cuda(device: str, io: str, layout: str, *args: Any, **others: Any) -> tuple[str, str]:
        _, found = resolve_layout_and_io("cuda", io, layout, *args, **others)
        layouts.add(found)
        return "direct", found

    monkeypatch.setattr(host_layout, "LONG_PAGE_BYTES", 256)
    monkeypatch.setattr(hybrid_pool_assembler, "resolve_layout_and_io", as_on_cuda)

    def make(group: RankGroup) -> CacheRig:
        return ShardedRig(l1_pages=128, settings=COMMON, group=group)

    run_on_ranks(writers, write_all(make, PROMPT))
    for ranks in (1, 2, 4):
        assert run_on_ranks(ranks, read_all(make, PROMPT)) == [Reused(storage=160)] * ranks
    assert layouts == {"page_first_direct", "layer_first"}


def test_states_are_cut_by_heads_as_pages_are(storage_dir: Path) -> None:
    def make(group: RankGroup) -> CacheRig:
        return ShardedStateRig(l1_pages=128, settings=COMMON, group=group)

    run_on_ranks(2, write_all(make, PROMPT))
    ends = {name.partition("%2F")[2] for name in objects(storage_dir)}
    assert ends == {f"kv%2Fh{head}-{head}%2E4" for head in range(4)} | {
        f"mamba%2Fh{head}-{head + 1}%2E8" for head in (0, 2, 4, 6)
    }
    for ranks in (1, 2, 4):
        assert run_on_ranks(ranks, read_all(make, PROMPT)) == [Reused(storage=160)] * ranks


def test_states_that_cannot_be_cut_are_refused_by_name() -> None:
    spec = replace(SPEC, share=RankShare(RankSplit.HEADS, 0, 4, 4))

    def work(group: RankGroup) -> None:
        StateRig(l1_pages=8, settings=COMMON, group=group, spec=spec)

    with pytest.raises(ValueError, match=r"pool mamba: its buffer temporal .* leave tp_lcm_size"):
        run_on_ranks(1, work)


def test_a_missing_group_of_heads_makes_the_page_missing_on_every_rank(storage_dir: Path) -> None:
    def make(group: RankGroup) -> CacheRig:
        return ShardedRig(l1_pages=128, settings=COMMON, group=group)

    run_on_ranks(2, write_all(make, PROMPT))
    page = RadixKey(PROMPT[:160]).page_hashes(PAGE)[30]
    (lost,) = storage_dir.glob(f"*/??/{page}*h2-2*")
    lost.unlink()
    assert run_on_ranks(1, read_all(make, PROMPT)) == [Reused(storage=120)], "and wrote it again"
    assert lost.exists()
    assert run_on_ranks(4, read_all(make, PROMPT)) == [Reused(storage=160)] * 4


@pytest.mark.parametrize(
    ("ranks", "size", "told"),
    [
        (2, 3, "tp_lcm_size: 3 is no multiple of the 2 ranks"),
        (1, 3, "tp_lcm_size: 3 ranks cannot split the 4 heads of pool kv evenly"),
        (1, 0, "tp_lcm_size: a number of ranks, not 0"),
        (1, True, "tp_lcm_size: a number of ranks, not True"),
    ],
)
def test_a_common_size_that_cannot_work_ends_the_start(ranks: int, size: object, told: str) -> None:
    extra = json.dumps({"tp_lcm_size": size})
    settings = replace(COMMON, hicache_storage_backend_extra_config=extra)

    def work(group: RankGroup) -> None:
        ShardedRig(l1_pages=8, settings=settings, group=group)

    with pytest.raises(ValueError, match=told):
        run_on_ranks(ranks, work)


def test_a_common_size_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: RankGroup) -> None:
        MLARig(l1_pages=8, settings=COMMON, group=group).close()

    run_on_ranks(2, work)
    assert "tp_lcm_size=4 has no effect: objects of this model hold all heads" in caplog.text


# -- a rank that fails ----------------------------------------------------------------------------


def break_writes(rig: CacheRig) -> None:
    """This rank's store refuses what it is given from now on."""
    storage = attached_store_of(rig).client
    assert storage is not None

    def refuse(*_: object) -> None:
        raise StorageUnavailable("this rank's store is dead")

    vars(storage)["batch_set_v2"] = refuse


def outcomes(rig: CacheRig) -> dict[str, float]:
    return counts(rig.hi.metrics.backup_outcomes)


def test_a_write_that_fails_on_its_writer_counts_for_no_rank(storage_dir: Path) -> None:
    """The others' pages are there, so that the next write brings only what is missing."""
    both_wrote = threading.Barrier(2)

    def work(group: RankGroup) -> tuple[bool, dict[str, float], int, int]:
        rig = sharded(group)
        try:
            storage = attached_store_of(rig).client
            assert storage is not None
            if group.rank == 1:
                break_writes(rig)
            rig.run(PROMPT)
            rig.settle()
            node = next(iter(rig.tree.root_node.children.values()))
            stored = rig.hi.storage_backup.has_stored(node)
            first, ended = written(rig), outcomes(rig)
            both_wrote.wait(30)
            if group.rank == 1:
                del vars(storage)["batch_set_v2"]
                attached_store_of(rig).breaker.reset()
            rig.run([*PROMPT, 8])
            rig.settle()
            assert rig.hi.storage_backup.has_stored(node)
            return stored, ended, first, written(rig, present=first)
        finally:
            rig.close()

    (stored, ended, first, final), of_broken = run_on_ranks(2, work, attn_cp_size=2)
    assert not stored and not of_broken[0], "on no rank"
    assert ended == {"landed": 1} and of_broken[1] == {"failed": 1}
    assert 0 < first < PAGES and of_broken[2] == 0
    assert final == first and final + of_broken[3] == PAGES == len(objects(storage_dir))


def test_a_page_that_another_rank_writes_needs_no_store_here() -> None:
    """One of two ranks writes an MLA page. The other rank's dead store is not asked."""

    def work(group: RankGroup) -> dict[str, float]:
        rig = ShardedRig(l1_pages=128, settings=L3, group=group)
        try:
            io = attached_store_of(rig)
            (key,) = io.pools.keys(RadixKey(PROMPT[:PAGE]).page_hashes(PAGE))
            if not io.pools.shards["kv"].writes(f"{key}/kv"):
                break_writes(rig)
                io.breaker.trip()
            rig.run(PROMPT[: PAGE + 1])
            rig.settle()
            (node,) = rig.tree.root_node.children.values()
            assert rig.hi.storage_backup.has_stored(node)
            return outcomes(rig)
        finally:
            rig.close()

    assert run_on_ranks(2, work, attn_cp_size=2) == [{"landed": 1}] * 2
