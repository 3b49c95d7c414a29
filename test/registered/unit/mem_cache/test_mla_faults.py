"""Latent rows and indexer keys under faults: a page without both parts is no page, and heals."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.mla_rig import MLARig
from rigs.caches.random_runs import end_at_any_point
from rigs.caches.storage_rigs import PAGE, StorageRigs, counts, object_file
from rigs.stores.losing_store import LosingStore
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PROMPT = [*range(40), 7]
"""Ten pages and a token."""
WHOLE = Reused(storage=40)


def make(rigs: StorageRigs, backend: Any = "file", **arguments: Any) -> CacheRig:
    return rigs.make(backend, kind=MLARig, **arguments)


def write(rigs: StorageRigs) -> None:
    writer = make(rigs)
    assert writer.run(PROMPT) == Reused()
    writer.settle()


# -- what is missing, exchanged or late ----------------------------------------------------------


def test_keys_lost_between_the_question_and_the_read_shorten_the_prefix(
    rigs: StorageRigs, storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(rigs)
    monkeypatch.setattr(LosingStore, "doomed", object_file(storage_dir, PROMPT, "indexer", page=5))
    reader = make(rigs, LosingStore)
    assert reader.run(PROMPT) == Reused(storage=5 * PAGE)
    reader.settle()
    assert make(rigs).run(PROMPT) == WHOLE, "the reader wrote the keys again"


def flip(root: Path, pool: str) -> None:
    file = object_file(root, PROMPT, pool, page=3)
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    file.write_bytes(raw)


def exchange(root: Path, pool: str) -> None:
    """Whole objects under the keys of other pages: only what they say of themselves is wrong."""
    one, other = object_file(root, PROMPT, pool, page=3), object_file(root, PROMPT, pool, page=4)
    ours, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(ours)


def give_other_part(root: Path, pool: str) -> None:
    other = {"kv": "indexer", "indexer": "kv"}[pool]
    shutil.copyfile(
        object_file(root, PROMPT, other, page=3), object_file(root, PROMPT, pool, page=3)
    )


@pytest.mark.parametrize("pool", ["kv", "indexer"])
@pytest.mark.parametrize("damage", [flip, exchange, give_other_part])
def test_damage_to_either_part_is_detected_counted_and_healed(
    rigs: StorageRigs, storage_dir: Path, damage: Callable[[Path, str], None], pool: str
) -> None:
    write(rigs)
    before = {file: file.read_bytes() for file in storage_dir.glob("*/??/*")}
    damage(storage_dir, pool)
    reader = make(rigs)
    assert reader.run(PROMPT) == Reused(storage=3 * PAGE)
    reader.settle()
    assert counts(reader.hi.metrics.pages)["get/damaged"] >= 1
    # Pages after the damage were not read. An exchanged object among them may still be damaged.
    again = make(rigs)
    again.run(PROMPT)
    again.settle()
    assert make(rigs).run(PROMPT) == WHOLE
    assert {file: file.read_bytes() for file in storage_dir.glob("*/??/*")} == before


# -- aborts, small tiers, and what is replayed ---------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_point_lose_no_page(rigs: StorageRigs, seed: int) -> None:
    """`settle` checks page ownership."""
    rig = make(rigs, l1_pages=24, hicache_ratio=1.5)
    end_at_any_point(rig, seed, steps=60)
    rig.settle()
    rig.flush()
    assert rig.allocator.available_size() == 24 * PAGE
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    assert rig.rows.available_size() == rig.rows.size


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_tiers_far_smaller_than_the_prompts_store_whole_pages_and_whole_prefixes(
    rigs: StorageRigs, storage_dir: Path, policy: str
) -> None:
    rng = random.Random(policy)
    rig = make(rigs, l1_pages=14, hicache_ratio=10 / 14, hicache_write_policy=policy)
    prompts = []
    for step in range(80):
        first = 1000 * rng.randrange(12)
        prompts.append([*range(first, first + rng.randrange(6, 44)), step % 3])
        rig.run(prompts[-1])
        if step % 3 == 0:
            rig.settle()
    rig.settle()
    keys, indexer = (
        {file.name.split("%2F")[0] for file in storage_dir.glob(f"*/??/*%2F{pool}")}
        for pool in ("kv", "indexer")
    )
    assert keys == indexer, "every page has both parts"
    for prompt in prompts:
        there = [page in keys for page in RadixKey(prompt).page_hashes(PAGE)]
        assert there == sorted(there, reverse=True), "no page without the pages before it"
    reader = make(rigs)
    reused = 0
    for prompt in rng.sample(prompts, 20):
        reused += reader.run(prompt).storage
        reader.flush()
    assert reused > 20 * PAGE


def test_a_flushed_prompt_comes_from_storage(rigs: StorageRigs) -> None:
    rig = make(rigs)
    rig.run(PROMPT)
    rig.flush()
    assert rig.run(PROMPT) == WHOLE
    rig.flush()
    assert rig.run(PROMPT) == WHOLE


def test_whole_pages_replayed_hit_all_but_the_last(rigs: StorageRigs) -> None:
    rig = make(rigs)
    prompt = PROMPT[:40]
    rig.run(prompt)
    assert rig.run(prompt) == Reused(device=36)
    rig.flush()
    assert rig.run(prompt) == Reused(storage=36)
