"""The scheduler over a tiny random model, real pools and the real tree; no sockets."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang.srt.layers import penalties
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FinishReason,
    FlushCacheReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.managers.scheduler.batch import DecodeBatch, ModelWorkerBatch
from sglang.srt.managers.scheduler.policy import LPM_MAX_OVERTAKEN
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.requests.spec import RequestSpec
from sglang.srt.managers.scheduler.scheduler import SchedulerOutput
from sglang.srt.managers.scheduler.tp_worker import TpModelWorker
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.device import on_device
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scheduler_rig import SchedulerRig, greedy, prompt

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, suite="base-b-test-1-gpu-large")

PROMPTS = [prompt(seed, length) for seed, length in enumerate((5, 17, 40, 64, 33, 1))]


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module", name="alone")
def make_alone(model: Path) -> list[list[int]]:
    """What each prompt gives by itself, in one piece, with nothing cached."""
    rig = SchedulerRig(model, disable_radix_cache=True, chunked_prefill_size=-1)
    return [rig.generate([ids])[0] for ids in PROMPTS]


@pytest.mark.parametrize(
    ("page_size", "chunk", "policy"),
    [(1, -1, "fcfs"), (1, 16, "lpm"), (4, 16, "fcfs"), (16, 16, "lpm")],
)
def test_a_batch_gives_what_each_gives_alone(
    model: Path, alone: list[list[int]], page_size: int, chunk: int, policy: str
) -> None:
    rig = SchedulerRig(
        model, page_size=page_size, chunked_prefill_size=chunk, schedule_policy=policy
    )
    assert rig.generate(PROMPTS) == alone
    assert rig.generate(PROMPTS) == alone, "once more, with the prompts cached"
    counters = rig.scheduler.state.counters
    assert counters.retractions == 0
    if chunk == 16:
        assert counters.prefill_batches >= 160 // 16


@pytest.mark.parametrize(("target", "kinds"), [(None, "PdPdPd"), (3.0, "PPPdd"), (1.25, "PPPdd")])
def test_prompts_alternate_with_decode_steps_or_go_in_a_row_where_there_is_a_target(
    model: Path, target: float | None, kinds: str
) -> None:
    rig = SchedulerRig(
        model, chunked_prefill_size=16, page_size=16, target_inter_token_latency=target
    )
    rig.step(rig.request("decodes", prompt(1, 8), greedy(30)))
    counters = rig.scheduler.state.counters
    rig.step(rig.request("comes", prompt(2, 64)))
    seen = ""
    for _ in range(12):
        before = counters.prefill_batches
        rig.step()
        seen += "P" if counters.prefill_batches > before else "d"
    assert kinds in seen


@pytest.mark.parametrize(("target", "ticks"), [(None, 0), (3.0, 0), (1.5, 1), (1.25, 3)])
def test_a_prompt_waits_until_the_mean_time_between_tokens_is_the_target(
    model: Path, target: float | None, ticks: int
) -> None:
    """Ticks are a second apart: after a prefill and k decode steps the mean is (k + 1) / k."""
    rig = SchedulerRig(model, target_inter_token_latency=target)
    for rid, length in (("decodes", 8), ("is computed", 9)):
        rig.step(rig.request(rid, prompt(length, length), greedy(30)))
        while rig.scheduler.state.queues.waiting:
            rig.step()
        rig.step()
    rig.step(rig.request("comes", prompt(3, 8)))
    waited = 0
    while rig.scheduler.state.queues.waiting:
        rig.step()
        waited += 1
    assert waited == ticks


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


def test_decode_goes_on_beside_a_chunked_prefill(model: Path) -> None:
    rig = SchedulerRig(model, chunked_prefill_size=8)
    rig.step(rig.request("short", PROMPTS[0], greedy(20), stream=True))
    before = len(rig.results["short"].output_ids)
    rig.step(rig.request("long", prompt(9, 64)))
    for _ in range(8):
        rig.step()
    grown = len(rig.results["short"].output_ids) - before
    assert 4 <= grown <= 5, "every other tick"
    assert "long" not in rig.results
    rig.run()


def test_retraction_changes_no_word(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model, pool_tokens=96, page_size=4, schedule_conservativeness=0.01)
    messages = [rig.request(f"r{i}", ids) for i, ids in enumerate(PROMPTS)]
    rig.run(*messages, check_each_step=True)
    small = SchedulerRig(model, pool_tokens=96, page_size=1, schedule_conservativeness=0.01)
    ids = [prompt(20 + i, 20) for i in range(4)]
    want = SchedulerRig(model, disable_radix_cache=True).generate(ids, 40)
    assert small.generate(ids, 40) == want
    assert small.scheduler.state.counters.retractions > 0
    assert [rig.results[f"r{i}"].output_ids for i in range(len(PROMPTS))] == alone


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


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(model: Path) -> None:
    rig = SchedulerRig(model, pool_tokens=64)
    rig.run(rig.request("big", prompt(1, 64)), rig.request("fits", prompt(1, 63)))
    reason = rig.results["big"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert "64 tokens, at most 63" in (reason.message or "")
    assert len(rig.results["fits"].output_ids) == 1


def test_an_empty_prompt_is_refused(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.run(rig.request("empty", []))
    reason = rig.results["empty"].finish_reason
    assert reason is not None
    assert reason.status_code == 400


def test_a_second_request_of_the_same_rid_does_not_harm_the_first(
    model: Path, alone: list[list[int]]
) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("a", PROMPTS[0]))
    rig.run(rig.request("a", PROMPTS[1]))
    assert rig.results["a"].output_ids == alone[0]


def test_decode_tensors_move_on_without_being_rebuilt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[list[str]] = []
    rebuild = DecodeBatch._rebuild

    def watched(batch: DecodeBatch) -> None:
        built.append([req.rid for req in batch.reqs])
        rebuild(batch)

    monkeypatch.setattr(DecodeBatch, "_rebuild", watched)
    rig = SchedulerRig(model, page_size=4)
    rig.run(rig.request("a", PROMPTS[0], greedy(30)), rig.request("b", PROMPTS[1], greedy(12)))
    assert built == [["a", "b"], ["a"]], "when both joined, and when one left"


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 9])
def test_abort_in_every_state(model: Path, ticks: int) -> None:
    rig = SchedulerRig(model, pool_tokens=128, page_size=4, chunked_prefill_size=16)
    messages = [rig.request(f"r{i}", prompt(i, 50), greedy(12)) for i in range(4)]
    rig.step(*messages)
    for _ in range(ticks):
        rig.step()
    rig.step(AbortReq(rid="r0"), AbortReq(rid="r3"), AbortReq(rid="nobody"))
    rig.check()
    rig.run(AbortReq(abort_all=True))
    for i in range(4):
        reason = rig.results[f"r{i}"].finish_reason
        assert reason is not None
        assert reason.type in ("abort", "length")
    assert rig.results["r3"].finish_reason is not None
    assert rig.results["r3"].finish_reason.type == "abort"


def test_stop_tokens_eos_and_min_new_tokens(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model)
    ids, words = PROMPTS[2], alone[2]
    stop = words[3]
    at = words.index(stop)
    rig.run(rig.request("stop", ids, greedy(stop_token_ids=[stop], ignore_eos=False)))
    got = rig.results["stop"]
    assert got.finish_reason is not None
    assert (got.finish_reason.type, got.finish_reason.matched) == ("stop", stop)
    assert got.output_ids == words[: at + 1]
    later = greedy(stop_token_ids=[stop], ignore_eos=False, min_new_tokens=at + 2)
    rig.run(rig.request("later", ids, later))
    assert stop not in rig.results["later"].output_ids[: at + 1]
    assert len(rig.results["later"].output_ids) >= at + 2


class Letters:
    """Token n is the letter n % 26. Counts what it decodes."""

    all_special_ids: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        self.num_decoded += len(token_ids)
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.decode([ids])


def test_stop_strings_across_tokens(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model, tokenizer=Letters())
    text = Letters().decode(alone[1])
    stop = text[2:5]
    end = text.index(stop) + 3
    rig.run(
        rig.request("stop", PROMPTS[1], greedy(stop=["zzzz", stop])),
        rig.request("min", PROMPTS[1], greedy(stop=stop, min_new_tokens=end + 1)),
        rig.request("pattern", PROMPTS[1], greedy(stop_regex=f"0|{stop[:2]}[{stop[2]}]")),
    )
    for rid, matched in (("stop", stop), ("pattern", f"0|{stop[:2]}[{stop[2]}]")):
        got = rig.results[rid]
        assert got.last is not None
        assert got.last.finish_reason == FinishReason(type="stop", matched=matched)
        assert got.last.shown_chars == end - 3
        assert got.output_ids == alone[1][:end]
    assert len(rig.results["min"].output_ids) > end


def test_what_stops_cost_does_not_grow_with_the_output(model: Path) -> None:
    letters = Letters()
    rig = SchedulerRig(model, tokenizer=letters, page_size=16)
    params = greedy(100, stop=["-" * 1000], stop_regex="--+")
    rig.step(rig.request("long", PROMPTS[0], params))
    decoded = []
    while not rig.scheduler.is_idle():
        before = letters.num_decoded
        rig.step()
        decoded.append(letters.num_decoded - before)
    assert len(rig.results["long"].output_ids) == 100
    assert max(decoded) <= 8, "tokens decoded in a step"


def test_a_pattern_that_takes_too_long_ends_its_own_request(model: Path) -> None:
    rig = SchedulerRig(model, tokenizer=Letters())
    catastrophic = "([a-z]|[a-z][a-z])+[0-9]"
    rig.run(
        rig.request("slow", PROMPTS[0], greedy(60, stop_regex=catastrophic)),
        rig.request("other", PROMPTS[0], greedy(60, stop_regex="-")),
    )
    reason = rig.results["slow"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert str(reason.message).startswith("stop_regex: ")
    assert len(rig.results["other"].output_ids) == 60


def test_stream_intervals(model: Path) -> None:
    rig = SchedulerRig(model, stream_interval=3)
    rig.run(
        rig.request("stream", PROMPTS[0], greedy(9), stream=True),
        rig.request("whole", PROMPTS[1], greedy(9)),
    )
    assert rig.results["stream"].pieces == [1, 3, 3, 2]
    assert rig.results["whole"].pieces == [9]


def test_sampled_tokens_do_not_depend_on_the_company(model: Path) -> None:
    def sampled(seed: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=10, temperature=1.5, top_p=0.9, ignore_eos=True)

    alone = SchedulerRig(model)
    alone.run(alone.request("a", PROMPTS[0], sampled(3), seed=2**62 + 5))
    rig = SchedulerRig(model, page_size=4, chunked_prefill_size=8)
    rig.run(
        rig.request("b", PROMPTS[2], sampled(1), seed=1),
        rig.request("a", PROMPTS[0], sampled(3), seed=2**62 + 5),
        rig.request("c", PROMPTS[3], greedy(3, repetition_penalty=1.3)),
    )
    assert rig.results["a"].output_ids == alone.results["a"].output_ids
    assert rig.results["b"].output_ids != rig.results["a"].output_ids


def test_penalties_survive_company_and_retraction(model: Path) -> None:
    params = greedy(30, repetition_penalty=1.5, frequency_penalty=0.7)
    alone = SchedulerRig(model)
    alone.run(alone.request("p", prompt(3, 20), params))
    rig = SchedulerRig(model, pool_tokens=80, schedule_conservativeness=0.01)
    others = [rig.request(f"o{i}", prompt(i, 15), greedy(20)) for i in range(2)]
    rig.run(*others, rig.request("p", prompt(3, 20), params))
    assert rig.scheduler.state.counters.retractions > 0
    assert rig.results["p"].output_ids == alone.results["p"].output_ids


def test_who_joins_or_leaves_uploads_no_prompt_again_for_penalties(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: list[int] = []

    def counted(values: Any, *args: Any) -> torch.Tensor:
        uploaded.append(len(values))
        return on_device(values, *args)

    monkeypatch.setattr(penalties, "on_device", counted)
    rig = SchedulerRig(model)
    for n, new_tokens in enumerate((24, 6, 24)):
        rig.step(rig.request(f"r{n}", prompt(n, 100), greedy(new_tokens, frequency_penalty=0.5)))
    rig.run()
    assert 300 <= sum(uploaded) < 400, "each prompt once, and a few numbers a batch"


def test_logprobs_only_for_those_who_ask(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model)
    rig.run(
        rig.request("with", PROMPTS[1], return_logprob=True, top_logprobs_num=2),
        rig.request("without", PROMPTS[2]),
    )
    got = rig.results["with"]
    assert got.last is not None
    assert got.output_ids == alone[1]
    assert len(got.logprobs) == 8
    assert max(got.logprobs) <= 0
    tops = got.last.output_top_logprobs
    assert tops is not None
    assert [top[0][1] for top in tops] == alone[1], "greedy takes the most likely"
    assert [top[0][0] for top in tops] == pytest.approx(got.logprobs)
    assert {len(top) for top in tops} == {2}
    assert rig.results["without"].last is not None
    assert rig.results["without"].last.output_logprobs is None


def test_flush_waits_for_idleness_up_to_its_timeout(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(30)))
    rig.step(FlushCacheReqInput(req_id="now"), FlushCacheReqInput(req_id="soon", timeout=2.0))
    rig.step(FlushCacheReqInput(req_id="patient", timeout=1000.0))
    rig.step()
    refused = {answer.req_id: answer for answer in rig.answers}
    assert set(refused) == {"now", "soon"}
    assert not refused["now"].success
    assert "running 1" in refused["now"].message
    rig.run()
    assert rig.answers[-1].req_id == "patient"
    assert rig.answers[-1].success
    assert rig.tree.total_size() == 0
    assert rig.scheduler.state.pools.allocator.available_size() == 512


def test_state_metrics_and_what_a_single_tier_cannot_do(model: Path) -> None:
    rig = SchedulerRig(model, admin_api_key="secret")
    ids = prompt(1, 40)
    rig.run(rig.request("a", ids))
    rig.run(rig.request("b", ids), rig.request("HEALTH_CHECK_1", prompt(2, 4), greedy(1)))
    rig.step(
        GetInternalStateReq(req_id="state"),
        GetMetricsReq(req_id="metrics"),
        DetachHiCacheStorageReqInput(req_id="detach"),
    )
    state, metrics, detach = rig.answers
    assert state.data["max_total_num_tokens"] == 512
    assert state.data["free_tokens"] + state.data["evictable_tokens"] == 512
    assert state.data["server_args"]["admin_api_key"] == "***"
    assert state.data["counters"]["finished"] == 3
    text = metrics.data["text"]
    assert "sglang:prompt_tokens_total 80.0" in text, "the probe is not counted"
    assert 'sglang:cached_tokens_total{source="device"} 39.0' in text
    assert "sglang:generation_tokens_total 16.0" in text
    assert "sglang:num_running_reqs 0.0" in text
    assert not detach.success
    assert "--enable-hierarchical-cache" in detach.message


def test_shutdown_lets_what_runs_finish(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(5)))
    rig.step(ShutdownReq(timeout=100.0), rig.request("late", PROMPTS[1]))
    for _ in range(20):
        rig.step()
    assert rig.scheduler.is_stopped
    assert len(rig.results["r"].output_ids) == 5
    late = rig.results["late"].finish_reason
    assert late is not None
    assert late.status_code == 503
    rig.assert_clean()


def test_shutdown_ends_what_takes_too_long(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(400)), ShutdownReq(timeout=3.0))
    for _ in range(5):
        rig.step()
    assert rig.scheduler.is_stopped
    reason = rig.results["r"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 503)
    rig.assert_clean()


class _Lines:
    """A channel that brings one message a tick, and keeps what is sent."""

    def __init__(self, *messages: ToScheduler) -> None:
        self._messages = list(messages)
        self.reasons: dict[str, str] = {}
        self.answers: dict[str, bool] = {}

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        return [self._messages.pop(0)] if self._messages else []

    def send(self, output: SchedulerOutput) -> None:
        if isinstance(output, ControlReqOutput):
            self.answers[output.req_id] = output.success
            return
        for one in output.outputs:
            if one.finish_reason is not None:
                self.reasons[one.rid] = one.finish_reason.type


def test_a_clock_that_is_set_neither_shortens_a_shutdown_nor_a_flush(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(model)
    leaps = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(time, "time", lambda: next(leaps))
    channel = _Lines(
        rig.request("runs", PROMPTS[0], greedy(5)),
        FlushCacheReqInput(req_id="flush", timeout=60.0),
        ShutdownReq(timeout=60.0),
    )
    rig.scheduler.run(channel)
    assert channel.reasons == {"runs": "length"}
    assert channel.answers == {"flush": True}


def test_keys_of_a_request_are_of_its_prompt_and_output() -> None:
    message = TokenizedGenerateReqInput(
        rid="r",
        input_ids=token_array([5, 6, 7, 8]),
        sampling_params=greedy(8),
        seed=0,
        extra_key="k",
    )
    spec = RequestSpec.from_message(
        message, arrival_number=0, max_request_tokens=64, eos_token_ids=[]
    )
    req = Req(spec)
    assert (list(req.match_key()), req.match_key().extra_key) == ([5, 6, 7, 8], "k")
    for output in (9, 10):
        progress = req.progress
        progress.output_ids.append(output)
        progress.kv_committed_len = progress.num_tokens - 1
        before = [5, 6, 7, 8, *progress.output_ids[:-1]]
        assert req.slots.kv_committed_ids.tolist() == before
        assert list(req.match_key()) == [*before, output]
        whole = [*before, output]
        for begin in range(len(whole) + 1):
            for end in range(begin, len(whole) + 1):
                assert progress.ids_between(begin, end).tolist() == whole[begin:end]
    req.progress.kv_committed_len = 2
    assert req.slots.kv_committed_ids.tolist() == [5, 6]
    scored = Req(dataclasses.replace(spec, logprob_start_len=1))
    assert list(scored.match_key()) == [5]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
