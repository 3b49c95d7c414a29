"""A prompt of whole pages that the cache has all of: its last token alone is computed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.schedulers import checkable_model
from rigs.schedulers.checkable_model import words
from rigs.schedulers.checkable_worker import CheckableRig, CheckableWorker
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constants import BUILTIN_MODEL_DIR, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.io_struct import CachedTokensDetails, FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

PROMPT = prompt(1, 192, checkable_model.VOCAB_SIZE)
OTHER = prompt(2, 200, checkable_model.VOCAB_SIZE)
SEED = 7


@pytest.fixture(name="batches")
def watch_batches(monkeypatch: pytest.MonkeyPatch) -> list[ModelWorkerBatch]:
    """Every batch that a model is given."""
    batches: list[ModelWorkerBatch] = []
    run = CheckableWorker.forward_batch_generation

    def watched(worker: CheckableWorker, batch: ModelWorkerBatch) -> Any:
        batches.append(batch)
        return run(worker, batch)

    monkeypatch.setattr(CheckableWorker, "forward_batch_generation", watched)
    return batches


def make_rig(page_size: int = 16, pool_tokens: int = 1024, **args: Any) -> CheckableRig:
    return CheckableRig(BUILTIN_MODEL_DIR, pool_tokens=pool_tokens, page_size=page_size, **args)


def settle(rig: SchedulerRig) -> None:
    deadline = time.monotonic() + 60
    while not rig.scheduler.is_idle():
        assert time.monotonic() < deadline, rig.tree.is_busy()
        rig.step()
        rig.check()
    rig.assert_clean()


def ask(rig: SchedulerRig, rid: str, ids: list[int], count: int = 5) -> CachedTokensDetails:
    """Tiers that the prompt came from. Fails if the words are not the model's."""
    rig.step(rig.request(rid, ids, greedy(count)))
    settle(rig)
    got = rig.results[rid]
    assert got.last is not None
    if isinstance(rig, CheckableRig):
        assert got.output_ids == words(ids, SEED, count)
    return got.last.cached_tokens_details


def tiers_of(details: CachedTokensDetails) -> tuple[int, int, int]:
    return details.device, details.host, details.storage


def pages_of(rig: SchedulerRig, ids: Sequence[int]) -> list[torch.Tensor]:
    """The bytes that L1 has of a prompt: keys and values, layer by layer."""
    slots = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids))).device_indices
    pool: Any = rig.worker.token_to_kv_pool
    return [buffer[slots].view(torch.uint8) for buffer in (*pool.k_buffer, *pool.v_buffer)]


def assert_equal_pages(rig: SchedulerRig, ids: Sequence[int], before: list[torch.Tensor]) -> None:
    after = pages_of(rig, ids)
    assert len(after[0]) == len(ids)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_tier_gives_the_same_words(page_size: int, batches: list[ModelWorkerBatch]) -> None:
    rig = make_rig(
        page_size,
        enable_hierarchical_cache=True,
        hicache_ratio=3.0,
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1}),
    )
    try:
        assert isinstance(rig.tree, HiRadixCache)
        sources = [tiers_of(ask(rig, "cold", PROMPT))]
        before = pages_of(rig, PROMPT)
        batches.clear()
        sources.append(tiers_of(ask(rig, "device", PROMPT)))
        first = batches[0].forward
        assert first.forward_mode.is_decode() and first.seq_lens_cpu == [192]
        assert first.out_cache_loc.tolist() == [0], "the padding page"
        assert_equal_pages(rig, PROMPT, before)
        rig.tree.evict(EvictParams(num_tokens=1024))
        batches.clear()
        sources.append(tiers_of(ask(rig, "host", PROMPT)))
        assert batches[0].forward.extend_seq_lens_cpu == [1]
        assert_equal_pages(rig, PROMPT, before)
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        sources.append(tiers_of(ask(rig, "storage", PROMPT)))
        assert sources == [(0, 0, 0), (191, 0, 0), (0, 191, 0), (0, 0, 191)]
        assert_equal_pages(rig, PROMPT, before)
    finally:
        rig.close()


def test_the_token_that_is_computed_is_taken_from_the_lowest_tier_that_had_any() -> None:
    rig = make_rig(enable_hierarchical_cache=True, hicache_ratio=3.0)
    try:
        ask(rig, "cold", PROMPT, 1)
        rig.tree.evict(EvictParams(num_tokens=1024))
        ask(rig, "half", PROMPT[:96], 1)
        assert tiers_of(ask(rig, "whole", PROMPT, 1)) == (96, 95, 0)
        counters = rig.scheduler.state.counters
        assert counters.prefill_tokens == 192 + 1 + 1
    finally:
        rig.close()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_nothing_is_allocated_for_the_prompt(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(page_size)
    ask(rig, "cold", PROMPT, 1)
    allocator = rig.worker.token_to_kv_pool_allocator
    taken: list[int] = []
    take = allocator._take_pages

    def noting(count: int) -> torch.Tensor | None:
        taken.append(count)
        return take(count)

    monkeypatch.setattr(allocator, "_take_pages", noting)
    assert ask(rig, "warm", PROMPT, 1).total == 191
    assert sum(taken) == 0
    # The second word is the first token after the prompt: it opens a page.
    assert ask(rig, "longer", PROMPT, 2).total == 191
    assert sum(taken) == 1


def test_ten_requests_of_one_prompt_are_one_decode_step(batches: list[ModelWorkerBatch]) -> None:
    rig = make_rig(max_requests=10)
    ask(rig, "cold", PROMPT)
    before, batches[:] = pages_of(rig, PROMPT), []
    rig.run(*(rig.request(f"r{i}", PROMPT, greedy(5)) for i in range(10)))
    for i in range(10):
        got = rig.results[f"r{i}"]
        assert got.output_ids == words(PROMPT, SEED, 5)
        assert got.last is not None and got.last.cached_tokens_details.device == 191
    assert [batch.forward.batch_size for batch in batches] == [10] * 5
    assert all(batch.forward.forward_mode.is_decode() for batch in batches)
    assert_equal_pages(rig, PROMPT, before)


def test_samples_all_find_the_whole_prompt() -> None:
    rig = make_rig()
    samples = [rig.request(f"s{i}", PROMPT, greedy(5), sample_of="s0") for i in (1, 2, 3)]
    rig.run(rig.request("s0", PROMPT, greedy(5)), *samples)
    for i in range(4):
        got = rig.results[f"s{i}"]
        assert got.output_ids == words(PROMPT, SEED, 5)
        assert got.last is not None
        assert got.last.cached_tokens_details.total == (191 if i else 0)


def test_a_whole_prompt_runs_beside_a_part(batches: list[ModelWorkerBatch]) -> None:
    rig = make_rig()
    for rid, ids in (("cold", PROMPT), ("other", OTHER)):
        ask(rig, rid, ids)
    before, batches[:] = pages_of(rig, PROMPT), []
    rig.run(rig.request("whole", PROMPT, greedy(5)), rig.request("part", OTHER, greedy(5)))
    assert batches[0].forward.extend_seq_lens_cpu == [1, 8]
    assert batches[0].forward.out_cache_loc.tolist()[0] == 0
    assert rig.results["whole"].output_ids == words(PROMPT, SEED, 5)
    assert rig.results["part"].output_ids == words(OTHER, SEED, 5)
    assert_equal_pages(rig, PROMPT, before)


def test_whole_prompts_run_before_and_behind_a_cut_one(batches: list[ModelWorkerBatch]) -> None:
    rig = make_rig(chunked_prefill_size=64)
    ask(rig, "cold", PROMPT)
    batches.clear()
    messages = [
        rig.request(rid, ids, greedy(5))
        for rid, ids in (("first", PROMPT), ("cut", OTHER), ("last", PROMPT))
    ]
    rig.run(*messages, check_each_step=True)
    prefills = [b.forward.extend_seq_lens_cpu for b in batches if b.forward.extend_seq_lens_cpu]
    assert prefills == [[1, 48], [64], [64], [24, 1]]
    for rid, ids in (("first", PROMPT), ("cut", OTHER), ("last", PROMPT)):
        assert rig.results[rid].output_ids == words(ids, SEED, 5)


def test_prompt_logprobs_are_computed_again() -> None:
    rig = make_rig()
    ask(rig, "cold", PROMPT)
    for start, cached in ((0, 0), (100, 96), (190, 176), (191, 191)):
        rid = f"from-{start}"
        message = rig.request(rid, PROMPT, greedy(2), return_logprob=True, logprob_start_len=start)
        rig.run(message)
        got = rig.results[rid]
        assert got.last is not None and got.last.cached_tokens_details.total == cached
        assert got.input_logprobs == checkable_model.input_logprobs(PROMPT, SEED, start)
        assert got.output_ids == words(PROMPT, SEED, 2)


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rid", ["gone", f"{HEALTH_CHECK_RID_PREFIX}gone"])
def test_an_abort_leaves_cache_and_neighbours_as_they_were(rid: str, ticks: int) -> None:
    rig = make_rig()
    ask(rig, "cold", PROMPT)
    before = pages_of(rig, PROMPT)
    rig.step(rig.request(rid, PROMPT, greedy(50)), rig.request("stays", PROMPT, greedy(5)))
    for _ in range(ticks):
        rig.check()
        rig.step()
    rig.step(rig.abort(rid))
    settle(rig)
    assert rig.results["stays"].output_ids == words(PROMPT, SEED, 5)
    reason = rig.results[rid].finish_reason
    assert reason is not None and reason.type == "abort"
    assert_equal_pages(rig, PROMPT, before)


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_requests_keep_their_words(page_size: int) -> None:
    rig = make_rig(page_size, pool_tokens=192 + 96, schedule_conservativeness=0.1)
    ask(rig, "cold", PROMPT, 1)
    rids = [f"r{i}" for i in range(4)]
    rig.run(*(rig.request(rid, PROMPT, greedy(64)) for rid in rids), check_each_step=True)
    assert rig.scheduler.state.counters.retractions > 0
    for rid in rids:
        assert rig.results[rid].output_ids == words(PROMPT, SEED, 64)


@pytest.mark.parametrize("page_size", [1, 16])
def test_one_that_fills_the_pool_runs_again(page_size: int) -> None:
    """The second run takes no more slots than the first."""
    rig = make_rig(page_size, pool_tokens=192 + page_size)
    for rid, cached in (("cold", 0), ("warm", 191)):
        assert ask(rig, rid, PROMPT, page_size).total == cached


def test_a_prompt_of_one_token_is_never_cached_whole() -> None:
    rig = make_rig(page_size=1)
    for rid in ("cold", "warm"):
        assert ask(rig, rid, [5]).total == 0


def test_a_model_gives_the_same_words(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, page_size=16)
    ids = prompt(3, 64)
    assert ask(rig, "cold", ids).total == 0
    before = pages_of(rig, ids)
    assert ask(rig, "warm", ids).total == 63
    rig.run(rig.request("beside", ids, greedy(5)), rig.request("other", prompt(4, 20), greedy(5)))
    for rid in ("warm", "beside"):
        assert rig.results[rid].output_ids == rig.results["cold"].output_ids
    assert_equal_pages(rig, ids, before)
