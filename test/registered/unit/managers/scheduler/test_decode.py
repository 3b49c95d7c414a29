"""Decode steps: tensors that move on, and requests that are retracted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.checkable_worker import CheckableRig
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.layers import penalties
from sglang.srt.layers.forward_batch_info import ForwardMode
from sglang.srt.managers.scheduler.batch import DecodeBatch, ModelWorkerBatch
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues
from sglang.srt.messages.io_struct import FinishReason
from sglang.srt.speculative import verify_graphs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")
register_cuda_ci(est_time=15, suite="base-b-test-1-gpu-large")


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


def joined(rig: SchedulerRig, queues: RequestQueues, rid: str, max_new_tokens: int) -> Req:
    """A request with one token, which decodes."""
    req = Req(rig.request(rid, [1, 2]), max_new_tokens=max_new_tokens)
    rig.scheduler.state.pools.req_to_token_pool.alloc([req.slots])
    req.progress.output_ids.append(3)
    queues.arrive(req)
    queues.admit(req)
    queues.join(req)
    return req


def test_who_may_end_with_a_verification_does_not_hide_who_ended(model: Path) -> None:
    rig, queues = SchedulerRig(model), RequestQueues()
    batch = DecodeBatch(rig.scheduler.state.pools, width=4)
    ends = joined(rig, queues, "ends", 62)
    goes_on = joined(rig, queues, "goes on", 5)
    batch.update(queues, in_flight=False)
    goes_on.progress.num_in_flight = 4
    assert not goes_on.ends_in_flight(batch.width), "it does only if all drafts are accepted"
    batch.update(queues, in_flight=True)
    goes_on.progress.num_in_flight = 0
    queues.finish(ends, FinishReason(type="length"))
    batch.update(queues, in_flight=False)
    assert batch.reqs == [goes_on]


def test_a_request_that_left_and_joined_again_is_a_change_of_the_batch(model: Path) -> None:
    """Though the batch has the same requests in the same order."""
    rig = SchedulerRig(model)
    queues = RequestQueues()
    batch = DecodeBatch(rig.scheduler.state.pools)
    for rid in "ab":
        req = joined(rig, queues, rid, 62)
    seen: list[tuple[list[str], bool]] = []
    for act in (None, None, queues.retract, queues.admit, queues.join):
        if act is not None:
            act(req)
        if act not in (queues.retract, queues.admit):
            batch.update(queues, in_flight=False)
            seen.append(([one.rid for one in batch.reqs], batch.is_stale))
            assert batch.prepare()
    assert seen == [(["a", "b"], True), (["a", "b"], False), (["a", "b"], True)]


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


@pytest.mark.settled
@pytest.mark.parametrize("state", [CheckableState(), CheckableState(num_states=8)])
def test_the_launched_batch_decides_whether_drafts_are_verified(
    state: CheckableState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and end when the step in flight is processed, after the batch was gathered."""
    width, largest = 4, 2
    monkeypatch.setattr(verify_graphs, "MAX_TOKENS", largest * width)
    rig = CheckableRig(
        BUILTIN_MODEL_DIR,
        state=state,
        overlap=True,
        speculative_algorithm="NEXTN",
        speculative_num_steps=width - 1,
    )
    rig.scheduler._draft_policy.always = True
    launched: set[tuple[int, bool]] = set()
    forward = rig.worker.forward_batch_generation

    def noted(batch: ModelWorkerBatch) -> Any:
        if batch.forward.forward_mode is not ForwardMode.EXTEND:
            launched.add((batch.forward.batch_size, batch.verified is not None))
        return forward(batch)

    monkeypatch.setattr(rig.worker, "forward_batch_generation", noted)
    for nth, ends in enumerate(range(1, 9)):
        # One of three ends while the prompt of another is computed.
        lengths = {"ends": ends, "goes on": 20, "too": 20}
        rig.step(
            *[rig.request(f"{rid} {nth}", PROMPTS[0], greedy(n)) for rid, n in lengths.items()]
        )
        for _ in range(3):
            rig.step()
        rig.run(rig.request(f"joins {nth}", prompt(nth, 9), greedy(20)))
    assert launched == {(1, True), (2, True), (3, False), (4, False)}
