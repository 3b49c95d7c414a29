"""The scheduler over a tiny random model, real pools and the real tree; no sockets."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    FlushCacheReqInput,
    SchedulerOutput,
    ShutdownReq,
    ToScheduler,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")


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


@pytest.mark.settled
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


@pytest.mark.settled
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
        assert isinstance(output, BatchTokenIDOutput)
        for one in output.outputs:
            if one.finish_reason is not None:
                self.reasons[one.rid] = one.finish_reason.type


def test_tokens_leave_before_copies_to_l2_are_issued(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SchedulerRig(model, enable_hierarchical_cache=True, overlap=True)
    done: list[str] = []
    channel = _Lines(rig.request("runs", PROMPTS[0], greedy(1)), ShutdownReq(timeout=60.0))
    send = channel.send

    def noting(output: SchedulerOutput) -> None:
        done.append("send")
        send(output)

    monkeypatch.setattr(channel, "send", noting)
    monkeypatch.setattr(rig.tree, "start_writing_host_cache", lambda: done.append("copy"))
    rig.scheduler.run(channel)
    # The tick of the launch, and that of its result.
    assert done[:3] == ["copy", "send", "copy"]
    assert channel.reasons == {"runs": "length"}


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
