"""Several ranks on a real Mooncake Store: one writer an object, and servers of unlike sizes."""

from __future__ import annotations

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

register_cpu_ci(est_time=75, suite="base-b-test-cpu")

PROMPT = [*range(160), 7]
PAGES = 40


def run_prompt(rigs: StorageRigs, kind: type[CacheRig], group: RankGroup) -> tuple[Reused, int]:
    """The part of the prompt that a rank reuses, and the number of objects that it writes, none of
    which existed before."""
    rig = rigs.make(kind=partial(kind, group=group))
    try:
        reused = rig.run(PROMPT)
        rig.settle()
        storage = attached_store_of(rig).guard.client
        assert isinstance(storage, MooncakeStore)
        stats = storage.get_stats()
        assert not stats.get("set_present_pages")
        return reused, stats["set_objects"]
    finally:
        rig.close()


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_pages_written_by_one_number_of_ranks_are_read_by_any(
    cluster: MooncakeCluster, writers: int
) -> None:
    with StorageRigs.on(cluster, tp_lcm_size=4) as rigs:
        run = partial(run_prompt, rigs, ShardedRig)
        written = run_on_ranks(writers, run)
        assert [reused for reused, _ in written] == [Reused()] * writers
        assert sum(objects for _, objects in written) == 4 * PAGES
        for ranks in (1, 2, 4):
            assert run_on_ranks(ranks, run) == [(Reused(storage=160), 0)] * ranks


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize(("kind", "objects"), [(ShardedRig, 2), (MLARig, 2)])
def test_no_object_is_written_twice(
    cluster: MooncakeCluster, kind: type[CacheRig], objects: int
) -> None:
    """Two halves of the heads, or latent rows and indexer keys."""
    with StorageRigs.on(cluster) as rigs:
        run = partial(run_prompt, rigs, kind)
        written = [number for _, number in run_on_ranks(4, run, attn_cp_size=2)]
        assert sum(written) == objects * PAGES and min(written) > 0
        assert run_on_ranks(4, run, attn_cp_size=2) == [(Reused(storage=160), 0)] * 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
