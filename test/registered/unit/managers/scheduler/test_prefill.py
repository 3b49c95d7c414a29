"""Choice of the prompts that are computed next, and of the parts that the cache has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.scheduler.policy import LPM_MAX_OVERTAKEN
from sglang.srt.managers.scheduler.prefill import _reused_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.tree.tenants import TenantUse
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")
register_cuda_ci(est_time=15, suite="base-b-test-1-gpu-large")


@pytest.mark.settled
def test_lpm_serves_a_cold_request_while_hot_ones_keep_coming(model: Path) -> None:
    rig = SchedulerRig(model, schedule_policy="lpm", max_requests=2)
    hot, cold = prompt(1, 40), prompt(2, 40)
    rig.run(rig.request("warm", hot, greedy(1)))
    rig.step(
        *(rig.request(f"first{n}", hot, greedy(1)) for n in range(4)),
        rig.request("cold", cold, greedy(1)),
    )
    overtook = 0
    while "cold" not in rig.results and overtook < 500:
        rig.step(*(rig.request(f"hot{overtook + n}", hot, greedy(1)) for n in range(2)))
        overtook += 2
    still_waiting = len(rig.scheduler.state.queues.waiting)
    # Four were ahead of it; two run at once, and the last batch may have begun.
    assert LPM_MAX_OVERTAKEN - 4 <= overtook - still_waiting <= LPM_MAX_OVERTAKEN + 4 + 2
    rig.run()


def test_the_second_time_all_but_the_last_token_is_cached(model: Path) -> None:
    rig = SchedulerRig(model, page_size=16)
    ids = prompt(1, 64)
    rig.run(rig.request("cold", ids))
    rig.run(rig.request("warm", ids), rig.request("other", ids, extra_key="x"))
    lasts = {rid: got.last for rid, got in rig.results.items() if got.last}
    cached = {rid: last.cached_tokens_details.total for rid, last in lasts.items()}
    assert cached == {"cold": 0, "warm": 63, "other": 0}
    warm = rig.results["warm"].last
    assert warm is not None
    assert warm.cached_tokens_details.device == 63
    assert warm.cached_tokens_details.storage_backend is None
    assert rig.results["warm"].output_ids == rig.results["cold"].output_ids


def test_prompts_that_are_cached_but_for_a_token_are_a_decode_step(
    model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(model)
    assert rig.generate(PROMPTS) == alone
    batches: list[ModelWorkerBatch] = []
    run = TpModelWorker.forward_batch_generation

    def watched(
        worker: TpModelWorker, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        batches.append(batch)
        return run(worker, batch)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", watched)
    rig.run(*(rig.request(f"r{i}", ids) for i, ids in enumerate(PROMPTS)))
    assert [rig.results[f"r{i}"].output_ids for i in range(len(PROMPTS))] == alone
    assert [batch.forward.batch_size for batch in batches] == [len(PROMPTS)] * 8
    assert all(batch.forward.forward_mode.is_decode() for batch in batches)
    # Two tokens to compute, or prompt logprobs: a prefill as ever.
    new = alone[0][0] + 1
    for fields in (
        {"input_ids": [*PROMPTS[0], new, new]},
        {"input_ids": PROMPTS[0], "return_logprob": True, "logprob_start_len": 0},
    ):
        batches.clear()
        rig.run(rig.request("last", params=greedy(1), **fields))
        assert [batch.forward.forward_mode.is_extend() for batch in batches] == [True], fields
        del rig.results["last"]


def test_a_request_that_needs_the_whole_pool_runs_alone(model: Path) -> None:
    rig = SchedulerRig(model, pool_tokens=64, page_size=4, chunked_prefill_size=16)
    rig.run(
        rig.request("whole", prompt(1, 50), greedy(500)),
        rig.request("after", prompt(2, 30), greedy(5)),
        check_each_step=True,
    )
    reason = rig.results["whole"].finish_reason
    assert reason is not None
    assert (reason.type, reason.length) == ("length", 14), "cut at what the pool holds"
    assert len(rig.results["after"].output_ids) == 5


def test_samples_find_their_prompt_in_the_cache(model: Path) -> None:
    ids = prompt(3, 64)
    rig = SchedulerRig(model)
    others = [rig.request(f"s-{i}", ids, seed=i, sample_of="s") for i in range(1, 4)]
    rig.run(rig.request("s", ids), *others)
    assert rig.scheduler.state.counters.prefill_tokens == 64 + 3
    outputs = [rig.results[rid].output_ids for rid in ("s", "s-1", "s-2", "s-3")]
    assert outputs == [outputs[0]] * 4, "greedy"
    assert {rig.results[f"s-{i}"].last.cached_tokens_details.total for i in range(1, 4)} == {63}  # type: ignore[union-attr]


def test_samples_go_on_when_the_first_is_aborted_or_nothing_is_cached(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("s", prompt(4, 64)), rig.request("s-1", prompt(4, 64), sample_of="s"))
    rig.run(rig.abort("s"))
    assert rig.results["s-1"].finish_reason is not None
    rig = SchedulerRig(model, disable_radix_cache=True)
    rig.run(rig.request("s", prompt(4, 64)), rig.request("s-1", prompt(4, 64), sample_of="s"))
    assert rig.scheduler.state.counters.prefill_batches == 1


@pytest.mark.parametrize(
    ("host", "storage", "expected"),
    [(0, 0, (95, 0, 0)), (64, 0, (32, 63, 0)), (64, 16, (32, 48, 15)), (32, 16, (32, 16, 16))],
)
def test_the_last_token_of_a_cached_prompt_counts_less_at_the_lowest_tier(
    host: int, storage: int, expected: tuple[int, int, int]
) -> None:
    device = 32 if host else 96
    prefix: Any = SimpleNamespace(from_device=device, from_host=host)
    assert _reused_tokens(prefix, storage, 96) == expected


def test_one_eviction_makes_room_for_a_load_and_for_the_tokens_after_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1 has room for the whole pages of three prompts, and four come in turn."""
    reasons: list[str] = []
    evict = TenantUse.evict

    def noted(self: TenantUse, tier: Any, what: Any, why: str, *args: Any) -> int:
        reasons.append(why)
        return evict(self, tier, what, why, *args)

    monkeypatch.setattr(TenantUse, "evict", noted)
    rig = SchedulerRig(
        model, pool_tokens=3 * 208, page_size=16, enable_hierarchical_cache=True, hicache_ratio=4.0
    )
    prompts = [prompt(seed, 212) for seed in range(4)]
    for turn in range(3):
        for seed, ids in enumerate(prompts):
            reasons.clear()
            rid = f"{turn}-{seed}"
            rig.run(rig.request(rid, ids, greedy(1)))
            rig.settle(60.0)
            rig.assert_clean()
            if turn:
                last = rig.results[rid].last
                assert last is not None and last.cached_tokens_details.host == 208
                assert reasons == ["room to load from L2"]
    rig.close()


def test_free_pages_are_sorted_behind_the_launch(model: Path) -> None:
    """Pages come back in the order in which they are evicted."""
    rig = SchedulerRig(model, page_size=4, pool_tokens=64)
    for rid, seed in (("old", 0), ("other", 1), ("again", 0)):
        rig.run(rig.request(rid, prompt(seed, 28), greedy(1)))
    rig.tree.evict(EvictParams(num_tokens=52))
    allocator = rig.scheduler.state.pools.allocator
    back = [int(page) for pages in allocator.free_page_ids() for page in pages]
    assert len(back) >= 13 and back != sorted(back)
    rig.step(rig.request("next", prompt(2, 21), greedy(1)))
    left = allocator.free_page_ids()
    assert len(left) == 1, "nothing has come back since"
    assert left[0].tolist() == sorted(left[0].tolist()) != []
    assert set(left[0].tolist()) < set(back)
    rig.run()
