"""Damage in L2: words stay right, the damage is counted and logged, and no page is lost."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.host_damage import (
    flip,
    host_pages,
    host_state,
    pool_of,
    read_page,
    swap,
    write_page,
)
from rigs.caches.storage_rigs import counts
from rigs.drafts.guesses import Drafts, recorded
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

PAGE = 16
IDS = prompt(1, 100)
"""Six whole pages."""


@contextlib.contextmanager
def rig_of(
    model: Path, *, share: float = 1.0, **args: Any
) -> Iterator[tuple[SchedulerRig, HiRadixCache]]:
    """A scheduler with two tiers, which compares that share of its loads."""
    settings = {"enable_hierarchical_cache": True, "page_size": PAGE, "hicache_ratio": 4.0, **args}
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(share):
        rig = SchedulerRig(model, **settings)
    assert isinstance(rig.tree, HiRadixCache)
    with contextlib.closing(rig):
        yield rig, rig.tree


def ask(rig: SchedulerRig, *prompts: list[int], tokens: int = 8) -> list[list[int]]:
    """Words of prompts that run together. At the end no page is locked, and each has one owner."""
    said = rig.generate(prompts, tokens)
    rig.settle()
    return said


def leave_to_l2(rig: SchedulerRig, first: int = 10) -> None:
    """Push all prompts out of L1, by prompts with these seeds."""
    for seed in range(first, first + 5):
        ask(rig, prompt(seed, 120))


def checked(cache: HiRadixCache, outcome: str) -> float:
    value = cache.metrics.checked_pages.labels("host", outcome)._value
    return float(value.get())


def cold(model: Path, *prompts: list[int], tokens: int = 8) -> list[list[int]]:
    return SchedulerRig(model, disable_radix_cache=True).generate(prompts, tokens)


def test_intact_pages_are_checked_and_used(model: Path) -> None:
    with rig_of(model) as (rig, cache):
        first = ask(rig, IDS)
        leave_to_l2(rig)
        assert ask(rig, IDS) == first == cold(model, IDS)
        assert [checked(cache, one) for one in ("intact", "damaged", "unchecked")] == [6, 0, 0]


@pytest.mark.parametrize("fault", ["flipped", "swapped", "late copy"])
def test_a_damaged_page_is_dropped_counted_and_computed_again(
    model: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_of(model) as (rig, cache):
        first = ask(rig, IDS)
        leave_to_l2(rig)
        pool, pages = pool_of(cache), host_pages(cache, IDS)
        if fault == "flipped":
            flip(pool, pages[3])
        elif fault == "swapped":
            swap(pool, pages[3], host_pages(cache, prompt(10, 120))[0])
        else:
            write_page(pool, pages[3], read_page(pool, host_pages(cache, prompt(11, 120))[2]))
        caplog.set_level(logging.WARNING)
        assert ask(rig, IDS) == first == cold(model, IDS)
        assert checked(cache, "damaged") == 1
        assert f"pool kv differ from their checksums, the first is host page {pages[3]}" in (
            caplog.text
        )
        assert "starts again" in caplog.text
        assert rig.scheduler.state.counters.redone == 1
        # The recomputed pages have reached L2, and L2's copies are right.
        leave_to_l2(rig)
        assert ask(rig, IDS) == first
        # Requests for the other swapped page have found its damage.
        assert checked(cache, "damaged") == (2 if fault == "swapped" else 1)


def test_a_session_keeps_what_comes_before_damage(model: Path) -> None:
    """The session keeps what comes before the damage; what it kept after it ends with it."""
    # Copies of threads may take more ticks than the default has seconds.
    with rig_of(model, keep_session_share=0.5, keep_session_seconds=86_400) as (rig, cache):
        rig.step(rig.request("a", IDS, greedy(8), session_id="agent"))
        rig.settle()
        first = rig.results["a"].output_ids
        leave_to_l2(rig)
        flip(pool_of(cache), host_pages(cache, IDS)[3])
        kept = cache.tree.sessions.tiers[1]
        assert kept.tokens >= 6 * PAGE
        assert ask(rig, IDS) == [first] == cold(model, IDS)
        assert kept.tokens == 3 * PAGE
        leave_to_l2(rig)
        cache.evict_host(cache.host_pool.size)
        rig.settle()
        assert kept.tokens == 0


def test_without_the_check_words_would_be_wrong(model: Path) -> None:
    """The faults that these tests inject do change words."""
    with rig_of(model) as (rig, cache):
        first = ask(rig, IDS)
        leave_to_l2(rig)
        pages = host_pages(cache, IDS)
        flip(pool_of(cache), pages[3])
        slots = torch.arange(pages[3] * PAGE, (pages[3] + 1) * PAGE)
        pool_of(cache).keep_checksums(slots, [None])
        assert ask(rig, IDS) != first
        assert checked(cache, "unchecked") == 1


def test_a_share_of_the_loads_is_checked_evenly(model: Path) -> None:
    with rig_of(model, share=0.5, hicache_ratio=8.0) as (rig, cache):
        first = ask(rig, IDS)
        for turn in range(1, 5):
            leave_to_l2(rig, 10 * turn)
            assert ask(rig, IDS) == first
            assert [checked(cache, one) for one in ("intact", "unchecked")] == [
                6 * (turn // 2),
                6 * (turn - turn // 2),
            ]


def test_all_who_share_a_damaged_prefix_get_right_words(model: Path) -> None:
    """Several prompts in one batch, longer than a chunk, and others that come while they run."""
    prompts = [[*IDS[:80], *prompt(seed, 40 + 8 * seed)] for seed in range(4)]
    others = [prompt(seed, 30) for seed in (20, 21)]
    with rig_of(model, pool_tokens=1024, chunked_prefill_size=48, hicache_ratio=2.0) as (
        rig,
        cache,
    ):
        expected = cold(model, *prompts, *others)
        ask(rig, prompts[0])
        for seed in range(10, 19):
            ask(rig, prompt(seed, 120))
        flip(pool_of(cache), host_pages(cache, IDS)[1])
        messages = [rig.request(f"r{n}", ids, greedy(8)) for n, ids in enumerate(others)]
        rig.step(*messages)
        late = [rig.request(f"s{n}", ids, greedy(8), stream=True) for n, ids in enumerate(prompts)]
        rig.step(*late[:2])
        rig.step(late[2])
        rig.step(late[3])
        rig.settle()
        got = [rig.results[rid].output_ids for rid in ("s0", "s1", "s2", "s3", "r0", "r1")]
        assert got == expected
        assert checked(cache, "damaged") == 1


def test_two_loads_of_a_step_with_damaged_pages_one_below_the_other(model: Path) -> None:
    """The first load's damage takes the second one's pages out of the tree too."""
    prompts = [IDS, [*IDS[:48], *prompt(2, 52)]]
    with rig_of(model, pool_tokens=512) as (rig, cache):
        expected = cold(model, *prompts)
        assert [ask(rig, ids)[0] for ids in prompts] == expected
        for seed in range(10, 16):
            ask(rig, prompt(seed, 120))
        above, below = (host_pages(cache, ids) for ids in prompts)
        assert above[:3] == below[:3] and not set(above[3:]) & set(below[3:])
        flip(pool_of(cache), above[1])
        flip(pool_of(cache), below[4])
        assert ask(rig, *prompts) == expected
        assert checked(cache, "damaged") == 2
        assert rig.scheduler.state.counters.redone == 2


def test_damage_at_the_first_page_leaves_nothing_of_the_prompt(model: Path) -> None:
    with rig_of(model, hicache_write_policy="write_back") as (rig, cache):
        first = ask(rig, IDS)
        leave_to_l2(rig)
        pages = host_pages(cache, IDS)
        assert len(pages) == 6
        for page in pages:
            flip(pool_of(cache), page)
        assert ask(rig, IDS) == first
        assert checked(cache, "damaged") == 6
        dropped = counts(cache.metrics.dropped)
        assert dropped["damaged"] >= 96


def test_a_page_that_l3_writes_meanwhile_is_damaged_for_its_readers(
    model: Path, tmp_path: Path
) -> None:
    """L3 gets the checksum of the page as it was made, not of the bytes that L2 has by then."""
    extra = json.dumps({"prefetch_threshold": PAGE})
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "l3")),
        rig_of(model) as (rig, cache),
    ):
        first = ask(rig, IDS)
        flip(pool_of(cache), host_pages(cache, IDS)[2])
        is_made, why = cache.attach_storage_backend("file", extra, None, "wait_complete")
        assert is_made, why
        ask(rig, IDS)
        rig.settle()
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        assert ask(rig, IDS) == first
        assert counts(cache.metrics.prefetch_outcomes)["damaged"] == 1
        # Pages that came from L3 keep their checksums.
        leave_to_l2(rig)
        assert ask(rig, IDS) == first
        assert checked(cache, "unchecked") == 0


@pytest.mark.parametrize("pool", ["kv", "indexer"])
def test_damage_in_either_sparse_pool_is_computed_again(tmp_path: Path, pool: str) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v32", eos_token_id=None, index_topk=12)
    with rig_of(tmp_path) as (rig, cache):
        first = ask(rig, IDS)
        leave_to_l2(rig)
        flip(pool_of(cache, pool), host_pages(cache, IDS)[2])
        assert ask(rig, IDS) == first == cold(tmp_path, IDS)
        assert checked(cache, "damaged") == 1


@contextlib.contextmanager
def hybrid_in_l2(path: Path) -> Iterator[tuple[SchedulerRig, HiRadixCache, list[int], Drafts]]:
    """A model with recurrent states that drafts, a prompt of it in L2 alone, and the drafts of the
    prompt's continuation, which `cold` gives too."""
    save_tiny_checkpoint(path, "qwen3_5", eos_token_id=None, mtp=True)
    sizes: dict[str, Any] = {"page_size": 64, "pool_tokens": 1024, "snapshot_alignment": 64}
    with rig_of(path, speculative_algorithm="NEXTN", **sizes) as (rig, cache):
        ids = prompt(1, 200)
        with recorded() as drafts:
            assert ask(rig, ids) == cold(path, ids)
        for seed in range(10, 18):
            ask(rig, prompt(seed, 200))
        yield rig, cache, ids, drafts


@pytest.mark.parametrize("part", ["kv", "mamba", "hidden"])
def test_damage_beside_a_recurrent_state_is_computed_again(tmp_path: Path, part: str) -> None:
    """And with a hidden state beside it: damage in any reaches neither words nor drafts."""
    with hybrid_in_l2(tmp_path) as (rig, cache, ids, drafts):
        slot = host_pages(cache, ids)[1] if part == "kv" else host_state(cache, ids)
        flip(pool_of(cache, part), slot)
        with recorded() as found:
            assert ask(rig, ids) == cold(tmp_path, ids)
        assert found == drafts
        assert checked(cache, "damaged") == 1
        assert rig.scheduler.state.counters.redone == 1


@pytest.mark.settled
def test_an_unchecked_hidden_state_costs_drafts_alone(tmp_path: Path) -> None:
    """Its check protects acceptance, not words."""
    with hybrid_in_l2(tmp_path) as (rig, cache, ids, drafts):
        pool, slot = pool_of(cache, "hidden"), host_state(cache, ids)
        flip(pool, slot)
        pool.keep_checksums(torch.tensor([slot]), [None])
        with recorded() as found:
            assert ask(rig, ids) == cold(tmp_path, ids)
        assert found != drafts
        assert checked(cache, "unchecked") == 1
