"""Models with states of whole prefixes: words as transformers' in any company and order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from rigs.models.model_oracle import GreedyOracle
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.mem_cache.device.memory_pool import HybridReqToTokenPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=13, suite="base-a-test-cpu")

NEW_TOKENS = 16


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_next", {"mlp_only_layers": [1]}),
        ("nemotron_h", {}),
        ("ministral", {}),
        ("kimi_linear", {}),
        ("gpt_oss", {}),
    ],
    ids=str,
)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GreedyOracle:
    family, overrides = request.param
    return GreedyOracle(tmp_path_factory.mktemp(family), family, **overrides)


@pytest.fixture(scope="module")
def words(oracle: GreedyOracle) -> list[list[int]]:
    return [oracle.words(tokens, NEW_TOKENS) for tokens in PROMPTS]


def rig_of(oracle: GreedyOracle, **args: Any) -> SchedulerRig:
    return SchedulerRig(oracle.path, disable_radix_cache=True, **args)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, -1), (1, 7), (16, 16)])
def test_batches_give_the_words_of_transformers(
    oracle: GreedyOracle, words: list[list[int]], page_size: int, chunk: int
) -> None:
    rig = rig_of(oracle, page_size=page_size, chunked_prefill_size=chunk)
    assert rig.generate(PROMPTS, NEW_TOKENS) == words
    assert rig.generate(PROMPTS[::-1], NEW_TOKENS) == words[::-1], "on slots that were used before"
    for result in rig.results.values():
        assert result.last is not None
        details = result.last.cached_tokens_details
        assert (details.device, details.host, details.storage) == (0, 0, 0)


def test_retraction_changes_no_word(oracle: GreedyOracle, words: list[list[int]]) -> None:
    rig = rig_of(oracle, pool_tokens=200, schedule_conservativeness=0.1)
    assert rig.generate(PROMPTS, NEW_TOKENS) == words
    assert rig.scheduler.state.counters.retractions > 0


def test_requests_wait_for_a_state(oracle: GreedyOracle, words: list[list[int]]) -> None:
    """Rows for all, states for two: as where snapshots hold the others."""
    rig = rig_of(oracle)
    rows = rig.worker.req_to_token_pool
    assert isinstance(rows, HybridReqToTokenPool)
    held = rows.mamba_pool.take(6)
    assert held is not None
    for number, tokens in enumerate(PROMPTS):
        rig.step(rig.request(str(number), tokens, greedy(NEW_TOKENS)))
        assert rig.scheduler.state.queues.num_holders <= 2
        assert len(rows.running_states()) == rig.scheduler.state.queues.num_holders
    while not rig.scheduler.is_idle():
        rig.step()
    assert [rig.results[str(i)].output_ids for i in range(len(PROMPTS))] == words
    rows.mamba_pool.free(held)
    rig.assert_clean()


def test_an_abort_gives_the_state_back(oracle: GreedyOracle, words: list[list[int]]) -> None:
    rig = rig_of(oracle, max_requests=2, chunked_prefill_size=16)
    rig.step(rig.request("stays", PROMPTS[1], greedy(NEW_TOKENS)))
    rig.step(rig.request("leaves", prompt(9, 100), greedy(NEW_TOKENS)))
    for _ in range(4):
        rig.step()
    rig.step(rig.abort("leaves"), rig.request("comes", PROMPTS[2], greedy(NEW_TOKENS)))
    rig.run()
    assert rig.results["stays"].output_ids == words[1]
    assert rig.results["comes"].output_ids == words[2]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_words_survive_aborts_and_retractions(oracle: GreedyOracle, seed: int) -> None:
    """Requests that finish have the right words, in any mix of batches, aborts and restarts."""
    random = Random(seed)
    rig = rig_of(
        oracle,
        page_size=random.choice([1, 4]),
        pool_tokens=160,
        max_requests=4,
        chunked_prefill_size=random.choice([8, 12]),
        schedule_conservativeness=0.1,
    )
    prompts = {str(i): prompt(100 * seed + i, random.randint(1, 50)) for i in range(14)}
    lengths = {rid: random.randint(1, NEW_TOKENS) for rid in prompts}
    aborted = set(random.sample(sorted(prompts), 4))
    for rid, tokens in prompts.items():
        rig.step(rig.request(rid, tokens, greedy(lengths[rid])))
        for _ in range(random.randint(0, 4)):
            rig.step(*(rig.abort(rid) for _ in range(rid in aborted and random.random() < 0.5)))
            rig.check()
    rig.run()
    for rid, tokens in prompts.items():
        result = rig.results[rid]
        is_aborted = result.finish_reason is not None and result.finish_reason.type == "abort"
        count = len(result.output_ids) if is_aborted else lengths[rid]
        oracle.assert_words(tokens, result.output_ids, count)


def test_samples_of_one_prompt_have_states_of_their_own(
    oracle: GreedyOracle, words: list[list[int]]
) -> None:
    rig = rig_of(oracle)
    requests = [
        rig.request(str(n), PROMPTS[3], greedy(NEW_TOKENS), sample_of="0" if n else None)
        for n in range(3)
    ]
    rig.run(*requests)
    assert [rig.results[str(n)].output_ids for n in range(3)] == [words[3]] * 3


@torch.inference_mode()
def test_logprobs_equal_transformers(oracle: GreedyOracle, words: list[list[int]]) -> None:
    rig = rig_of(oracle, chunked_prefill_size=16, page_size=16)
    tokens = PROMPTS[2]
    fields = {"return_logprob": True, "logprob_start_len": 0}
    rig.run(rig.request("a", tokens, greedy(4), **fields), rig.request("b", PROMPTS[0], greedy(4)))
    whole = tokens + words[2][:4]
    logits: torch.Tensor = oracle.hf(torch.tensor([whole])).logits[0].float()
    want = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
    got = rig.results["a"]
    assert got.output_ids == words[2][:4]
    torch.testing.assert_close(
        torch.tensor(got.input_logprobs + got.logprobs), want, rtol=1e-4, atol=1e-4
    )
