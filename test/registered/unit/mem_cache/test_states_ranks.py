"""Recurrent states on two ranks: slow copies, stores that differ, equal states at each tick."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rigs.caches.cache_rig import HiCacheSettings
from rigs.caches.memory_ranks import MemoryExchange
from rigs.caches.state_rig import SPEC, StateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

RANKS = 2


def lose_a_state(root: Path, rank: int, which: int) -> int:
    """The store loses an object of one rank; how many it lost."""
    files = sorted(root.glob(f"*/??/*%2Fmamba%2Fh{rank}-{rank}%2E{RANKS}"))
    if files:
        files[which % len(files)].unlink()
    return bool(files)


def work(rig: StateRig, rank: int, root: Path, seed: int) -> list[int]:
    """Random work, the same on all ranks but for the states that the store loses, which are of one
    rank; the tokens reused."""
    rng = random.Random(seed)
    reused, lost = [], 0
    for step in range(60):
        pages = rng.randrange(1, 7)
        parts_at = rng.randrange(12)
        ids = [10 * at + (5 if at >= parts_at else 0) + n for at in range(pages) for n in range(4)]
        reused.append(rig.run([*ids, 900]).total)
        match rng.randrange(6):
            case 0:
                rig.tree.evict(EvictParams(num_tokens=4 * rng.randrange(1, 20)))
            case 1:
                rig.tree.evict(EvictParams(mamba_num=rng.randrange(1, 4)))
            case 2:
                rig.settle()
                rig.tree.evict(EvictParams(num_tokens=1000))
                rig.hi.evict_host(1000)
            case 3 | 4 if rank == step % RANKS:
                lost += lose_a_state(root, rank, rng.randrange(100))
            case _:
                rng.randrange(100)
    rig.settle()
    assert lost
    return reused


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_ranks_agree_on_pages_and_states(storage_dir: Path, policy: str) -> None:
    exchange = MemoryExchange(RANKS)

    def run(rank: int) -> list[int]:
        rig = StateRig(
            l1_pages=24,
            num_states=6,
            group=exchange.group(rank, seed=3, most_delay_s=0.001),
            spec=replace(SPEC, share=RankShare(RankSplit.HEADS, rank, rank + 1, RANKS)),
            settings=HiCacheSettings(
                hicache_ratio=2.0,
                hicache_write_policy=policy,
                hicache_storage_backend="file",
                hicache_storage_backend_extra_config='{"prefetch_threshold": 4}',
            ),
        )
        try:
            return work(rig, rank, storage_dir, seed=5)
        except BaseException as error:
            exchange.fail(error)
            raise
        finally:
            rig.close()

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(run, range(RANKS)))
    assert results[0] == results[1]
    assert sum(results[0]) > 0
