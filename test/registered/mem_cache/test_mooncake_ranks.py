"""Several ranks on a real Mooncake Store: one writer an object, and servers of unlike sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.mla_rig import MLARig
from rigs.caches.sharded_rig import ShardedRig
from rigs.caches.storage_rigs import StorageRigs, attached_store_of
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-b-test-cpu")

PAGES = 40
SIZES = (1, 2, 4)


def prompt_of(writers: int) -> list[int]:
    return [*range(1000 * writers, 1000 * writers + 4 * PAGES), 7]


def run_prompts(
    rigs: StorageRigs, kind: type[CacheRig], prompts: Sequence[list[int]], group: RankGroup
) -> tuple[list[Reused], int]:
    """The part of each prompt that a rank reuses, and the number of objects that it writes, none of
    which existed before."""
    rig = rigs.make(kind=partial(kind, group=group))
    try:
        reused = [rig.run(prompt) for prompt in prompts]
        rig.settle()
        storage = attached_store_of(rig).client
        assert isinstance(storage, MooncakeStore)
        stats = storage.get_stats()
        assert not stats.get("set_present_pages")
        return reused, stats["set_objects"]
    finally:
        rig.close()


@pytest.mark.usefixtures("moves")
def test_pages_written_by_one_number_of_ranks_are_read_by_any(cluster: MooncakeCluster) -> None:
    prompts = [prompt_of(writers) for writers in SIZES]
    with StorageRigs.on(cluster, tp_lcm_size=4) as rigs:
        for writers, prompt in zip(SIZES, prompts, strict=True):
            written = run_on_ranks(writers, partial(run_prompts, rigs, ShardedRig, [prompt]))
            assert [reused for reused, _ in written] == [[Reused()]] * writers
            assert sum(objects for _, objects in written) == 4 * PAGES
        # Few clients read all prompts: Mooncake takes most of a second to close one.
        for ranks in SIZES:
            read = run_on_ranks(ranks, partial(run_prompts, rigs, ShardedRig, prompts))
            assert read == [([Reused(storage=4 * PAGES)] * len(prompts), 0)] * ranks


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize(("kind", "objects"), [(ShardedRig, 2), (MLARig, 2)])
def test_no_object_is_written_twice(
    cluster: MooncakeCluster, kind: type[CacheRig], objects: int
) -> None:
    """Two halves of the heads, or latent rows and indexer keys."""
    with StorageRigs.on(cluster) as rigs:
        run = partial(run_prompts, rigs, kind, [prompt_of(4)])
        written = [number for _, number in run_on_ranks(4, run, attn_cp_size=2)]
        assert sum(written) == objects * PAGES and min(written) > 0
        assert run_on_ranks(4, run, attn_cp_size=2) == [([Reused(storage=4 * PAGES)], 0)] * 4
