"""The scheduler over DeepSeek-V3.2: two kinds of state in the same slots, and sparse attention.

Contexts are longer than what a token attends to, so that a wrong indexer key gives other words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import CachedTokensDetails, FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

PAGE = 16
TOPK = 12


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("deepseek_v32", eos_token_id=None, index_topk=TOPK)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, -1), (1, 16), (4, 8), (16, 16)])
def test_a_batch_gives_what_each_gives_alone(
    model: Path, alone: list[list[int]], page_size: int, chunk: int
) -> None:
    rig = SchedulerRig(model, page_size=page_size, chunked_prefill_size=chunk)
    assert rig.generate(PROMPTS) == alone
    assert rig.generate(PROMPTS) == alone, "once more, with the prompts cached"


def test_retracted_requests_say_the_same(model: Path) -> None:
    prompts = [prompt(seed, 20) for seed in range(4)]
    want = [SchedulerRig(model, disable_radix_cache=True).generate([ids], 40)[0] for ids in prompts]
    rig = SchedulerRig(model, page_size=4, pool_tokens=160)
    assert rig.generate(prompts, 40) == want
    assert rig.scheduler.state.counters.retractions > 0


def test_prompt_logprobs_do_not_depend_on_what_is_cached(model: Path) -> None:
    ids = prompt(3, 60)
    rig = SchedulerRig(model, page_size=4, chunked_prefill_size=16)
    for rid in ("cold", "warm"):
        message = rig.request(rid, ids, greedy(4), return_logprob=True, logprob_start_len=30)
        rig.run(message)
    cold, warm = (rig.results[rid] for rid in ("cold", "warm"))
    assert len(cold.input_logprobs) == len(ids) - 31, "the first of them has no predecessor"
    assert warm.output_ids == cold.output_ids
    assert warm.input_logprobs == pytest.approx(cold.input_logprobs, abs=1e-4)
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)


def ask(rig: SchedulerRig, rid: str, ids: list[int]) -> CachedTokensDetails:
    rig.step(rig.request(rid, ids))
    rig.settle()
    last = rig.results[rid].last
    assert last is not None
    return last.cached_tokens_details


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_every_tier_gives_the_words_of_no_cache(model: Path, layout: str) -> None:
    ids = prompt(1, 100)
    cold = SchedulerRig(model, disable_radix_cache=True).generate([ids])[0]
    rig = SchedulerRig(
        model,
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_mem_layout=layout,
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}),
    )
    try:
        sources = [ask(rig, rid, ids) for rid in ("cold", "device")]
        # Push the prompt out of L1, not out of L2.
        for seed in range(10, 15):
            ask(rig, f"filler-{seed}", prompt(seed, 120))
        sources.append(ask(rig, "host", ids))
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        sources.append(ask(rig, "storage", ids))
        assert [(s.device, s.host, s.storage) for s in sources] == [
            (0, 0, 0),
            (96, 0, 0),
            (0, 96, 0),
            (0, 0, 96),
        ]
        for rid in ("cold", "device", "host", "storage"):
            assert rig.results[rid].output_ids == cold, rid
    finally:
        rig.close()
