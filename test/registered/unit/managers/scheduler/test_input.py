"""Requests that arrive: accepted, refused, aborted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import (
    AbortReq,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")


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


def test_a_full_queue_refuses_by_the_limits_name(model: Path) -> None:
    rig = SchedulerRig(model, max_queued_requests=2, max_requests=1)
    rig.step(rig.request("runs", prompt(1, 8), greedy(30)))
    rig.step(*(rig.request(f"w{i}", prompt(i, 8)) for i in range(3)))
    reason = rig.results["w2"].finish_reason
    assert reason is not None
    assert reason.status_code == 503
    assert "--max-queued-requests 2" in str(reason.message)
    rig.run()
    assert all(rig.results[f"w{i}"].output_ids for i in range(2))


def test_a_second_request_of_the_same_rid_does_not_harm_the_first(
    model: Path, alone: list[list[int]]
) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("a", PROMPTS[0]))
    rig.run(rig.request("a", PROMPTS[1]))
    assert rig.results["a"].output_ids == alone[0]


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 9])
def test_an_abort_in_any_state_frees_everything(model: Path, ticks: int) -> None:
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


def test_an_aborted_request_wants_its_prefix_no_more(model: Path) -> None:
    rig = SchedulerRig(model, page_size=4, max_requests=1)
    rig.run(rig.request("before", prompt(1, 9)))
    rig.step(rig.request("runs", prompt(2, 9), greedy(30)))
    rig.step(rig.request("waits", prompt(1, 9)))
    assert any(node.wanted_by for node in rig.tree.nodes()), "its pages are evicted last"
    rig.step(AbortReq(rid="waits"))
    assert not any(node.wanted_by for node in rig.tree.nodes())
    rig.run()
