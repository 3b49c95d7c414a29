"""Logprobs of prompt tokens against transformers: cached, cut, batched and retracted prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import FinishReason
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")


@dataclass(frozen=True)
class Oracle:
    """A model's files, and transformers' own word on it."""

    path: Path
    model: Any

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """`[len(ids), vocab_size]`: of what follows each token."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(dim=-1)


@pytest.fixture(scope="module", name="oracle")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("model")
    return Oracle(path, save_tiny_checkpoint(path, "qwen3", eos_token_id=None))


def check(
    oracle: Oracle, rig: SchedulerRig, rid: str, ids: list[int], start: int, top: int
) -> None:
    """The request's prompt logprobs are those of transformers."""
    got = rig.results[rid]
    want = oracle.logprobs(ids)
    assert len(got.input_logprobs) == len(ids) - 1 - start
    for offset, value in enumerate(got.input_logprobs):
        position = start + offset
        assert value == pytest.approx(float(want[position, ids[position + 1]]), abs=2e-4)
        if top:
            best, tokens = want[position].topk(top)
            row = got.input_top_logprobs[offset]
            assert [value for value, _ in row] == pytest.approx(best.tolist(), abs=2e-4)
            assert row[0][1] == int(tokens[0])
    assert len(got.input_top_logprobs) == (len(got.input_logprobs) if top else 0)


def wanting(rig: SchedulerRig, rid: str, ids: list[int], start: int, top: int = 0) -> Any:
    return rig.request(
        rid, ids, greedy(4), return_logprob=True, logprob_start_len=start, top_logprobs_num=top
    )


@pytest.mark.parametrize(("page_size", "chunk"), [(1, -1), (1, 16), (4, 8), (16, 16)])
def test_prompt_logprobs_are_those_of_transformers(
    oracle: Oracle, page_size: int, chunk: int
) -> None:
    rig = SchedulerRig(oracle.path, page_size=page_size, chunked_prefill_size=chunk)
    ids = {f"r{i}": prompt(i, 9 + 12 * i) for i in range(4)}
    starts = {"r0": 0, "r1": 5, "r2": 31, "r3": 44}
    messages = [wanting(rig, rid, ids[rid], starts[rid], top=i) for i, rid in enumerate(ids)]
    rig.run(*messages, rig.request("free", prompt(8, 20)), check_each_step=True)
    for top, rid in enumerate(ids):
        check(oracle, rig, rid, ids[rid], starts[rid], top)
    assert rig.results["r3"].input_logprobs == [], "nothing follows the last token"


@pytest.mark.parametrize("page_size", [1, 8])
def test_the_cache_is_used_before_the_first_of_them_alone(oracle: Oracle, page_size: int) -> None:
    rig = SchedulerRig(oracle.path, page_size=page_size, chunked_prefill_size=16)
    ids = prompt(5, 64)
    rig.run(rig.request("cold", ids))
    for start, cached in (
        (0, 0),
        (21, 21 // page_size * page_size),
        (63, 63),  # Nothing follows the last token: it alone is computed.
    ):
        rid = f"warm-{start}"
        rig.run(wanting(rig, rid, ids, start, top=2))
        check(oracle, rig, rid, ids, start, 2)
        last = rig.results[rid].last
        assert last is not None
        assert last.cached_tokens_details.total == cached
        assert rig.results[rid].output_ids == rig.results["cold"].output_ids[:4]


def test_a_prompt_is_computed_without_any_output(oracle: Oracle) -> None:
    """A client asks for no output to score a prompt or to fill the cache. Others run meanwhile."""
    rig = SchedulerRig(oracle.path, page_size=4, chunked_prefill_size=16)
    ids = prompt(6, 41)
    score = rig.request(
        "score", ids, greedy(0), return_logprob=True, logprob_start_len=0, top_logprobs_num=1
    )
    others = [rig.request(f"r{i}", prompt(i, 20), greedy(6)) for i in range(2)]
    rig.run(score, *others, check_each_step=True)
    check(oracle, rig, "score", ids, 0, 1)
    done = rig.results["score"]
    assert done.output_ids == done.logprobs == []
    assert done.finish_reason == FinishReason(type="length", length=0)
    assert [len(rig.results[f"r{i}"].output_ids) for i in range(2)] == [6, 6]
    rig.run(rig.request("warm", ids, greedy(0)), rig.request("next", ids, greedy(3)))
    for rid, count in (("warm", 0), ("next", 3)):
        last = rig.results[rid].last
        assert last is not None and last.cached_tokens_details.total == 40
        assert len(rig.results[rid].output_ids) == count


def test_a_retracted_request_tells_them_once(oracle: Oracle) -> None:
    rig = SchedulerRig(
        oracle.path, pool_tokens=160, chunked_prefill_size=16, schedule_conservativeness=0.1
    )
    ids = {f"r{i}": prompt(i, 40) for i in range(3)}
    messages = [
        rig.request(
            rid, one, greedy(60), return_logprob=True, logprob_start_len=3, top_logprobs_num=1,
            stream=i == 0,
        )
        for i, (rid, one) in enumerate(ids.items())
    ]  # fmt: skip
    rig.run(*messages, check_each_step=True)
    assert rig.scheduler.state.counters.retractions > 0
    for rid, one in ids.items():
        check(oracle, rig, rid, one, 3, 1)
        assert len(rig.results[rid].logprobs) == 60


def test_long_prompts_are_computed_in_parts(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.layers.logits_processor._MAX_LOGITS", 160 * 7)
    rig = SchedulerRig(oracle.path, chunked_prefill_size=-1)
    ids = {f"r{i}": prompt(i, 30 + i) for i in range(2)}
    rig.run(*(wanting(rig, rid, one, 1, top=3) for rid, one in ids.items()))
    for rid, one in ids.items():
        check(oracle, rig, rid, one, 1, 3)
