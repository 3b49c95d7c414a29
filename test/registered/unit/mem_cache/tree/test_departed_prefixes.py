"""Prefixes that left the tree are remembered, and strange ones are not, within the stated error."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.mem_cache.tree import departed_prefixes
from sglang.srt.mem_cache.tree.departed_prefixes import CAPACITY, DepartedPrefixes
from sglang.srt.mem_cache.tree.digest import empty_prefix, prefix_with
from sglang.srt.mem_cache.tree.radix_key import RadixKey, token_array
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 64


def prompt(seed: int, pages: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE)


def reach(rig: CacheRig, tokens: list[int], begin: int = 0, extra_key: str | None = None) -> int:
    return rig.tree.tree.departed.reach(RadixKey(tokens, extra_key), begin)


def test_an_evicted_prompt_is_known_up_to_where_it_was_cached() -> None:
    rig = CacheRig(l1_pages=8, page_size=PAGE)
    first = prompt(1, 5)
    rig.run(first)
    assert reach(rig, first) == 0, "it is in the tree"
    rig.run(prompt(2, 8))  # evicts it
    longer = [*first, *prompt(3, 4)]
    assert reach(rig, longer) == 5 * PAGE
    assert reach(rig, longer[: 3 * PAGE + 1]) == 3 * PAGE
    assert reach(rig, first, begin=5 * PAGE) == 5 * PAGE
    assert reach(rig, prompt(4, 5), begin=PAGE) == PAGE, "a strange prompt"
    assert reach(rig, first, extra_key="tenant") == 0, "the same tokens of another tenant"


def test_pages_that_are_still_on_the_host_have_not_left() -> None:
    rig = CacheRig(l1_pages=8, page_size=PAGE, settings=HiCacheSettings(hicache_ratio=4.0))
    first = prompt(1, 5)
    rig.run(first)
    rig.run(prompt(2, 8))
    assert reach(rig, first) == 0
    rig.flush()
    assert reach(rig, first) == 5 * PAGE, "a flush takes it off all tiers"


@pytest.mark.parametrize(("page_size", "step"), [(1, 64), (16, 64), (48, 96), (64, 64), (128, 128)])
def test_small_pages_are_noted_every_64_tokens(page_size: int, step: int) -> None:
    assert DepartedPrefixes(page_size).step == step


def test_two_full_generations_err_as_rarely_as_the_docs_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The filter is made smaller: the error depends on the bits of each prefix alone."""
    assert CAPACITY * PAGE > 16_000_000
    monkeypatch.setattr(departed_prefixes, "CAPACITY", 1 << 12)
    monkeypatch.setattr(departed_prefixes, "_BITS", 16 << 12)
    departed = DepartedPrefixes(PAGE)
    noise = np.random.default_rng(7)
    hashes = noise.integers(0, 1 << 64, size=3 << 12, dtype=np.uint64)
    for begin in range(0, len(hashes), 64):
        departed._set(hashes[begin : begin + 64])
    strange = [
        departed._knows(prefix_with(empty_prefix(None), token_array([number])))
        for number in range(20_000)
    ]
    assert 0 < sum(strange) < 0.004 * len(strange)


def test_what_left_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed_prefixes, "CAPACITY", 8)
    rig = CacheRig(l1_pages=8, page_size=PAGE)
    first = prompt(1, 8)
    rig.run(first)
    rig.run(prompt(2, 8))
    assert reach(rig, first) == 8 * PAGE
    for seed in range(3, 7):
        rig.run(prompt(seed, 8))
    assert reach(rig, first) == 0
