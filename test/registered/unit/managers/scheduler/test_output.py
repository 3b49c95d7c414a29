"""Messages that a client gets about a request: how often, and with which logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_cuda_ci(est_time=8, suite="base-b-test-1-gpu-large")


def test_a_stream_sends_every_interval_and_the_end(model: Path) -> None:
    rig = SchedulerRig(model, stream_interval=3)
    rig.run(
        rig.request("stream", PROMPTS[0], greedy(9), stream=True),
        rig.request("whole", PROMPTS[1], greedy(9)),
    )
    assert rig.results["stream"].pieces == [1, 3, 3, 2]
    assert rig.results["whole"].pieces == [9]


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
