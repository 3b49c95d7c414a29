"""Control requests: flushing, internal state, metrics, shutting down."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.distributed.device_communicators import transfer_engines
from sglang.srt.messages.io_struct import (
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetCacheViewReq,
    GetInternalStateReq,
    GetMetricsReq,
    GetWeightSeedReq,
    ShutdownReq,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_cuda_ci(est_time=8, suite="base-b-test-1-gpu-large")


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


def test_a_question_for_idleness_flushes_nothing(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.step(rig.request("r", PROMPTS[0], greedy(30)))
    rig.step(FlushCacheReqInput(req_id="now", only_asks=True))
    assert not rig.answers[-1].success
    rig.run(FlushCacheReqInput(req_id="patient", timeout=1000.0, only_asks=True))
    assert rig.answers[-1].success
    assert rig.tree.total_size() > 0


def test_state_metrics_and_what_a_single_tier_cannot_do(model: Path) -> None:
    rig = SchedulerRig(model, admin_api_key="secret")
    ids = prompt(1, 40)
    rig.run(rig.request("a", ids))
    rig.run(rig.request("b", ids), rig.request("HEALTH_CHECK_1", prompt(2, 4), greedy(1)))
    rig.step(
        GetInternalStateReq(req_id="state"),
        GetMetricsReq(req_id="metrics"),
        DetachHiCacheStorageReqInput(req_id="detach"),
        GetWeightSeedReq(req_id="seed", rank=0),
    )
    state, metrics, detach, seed = rig.answers
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
    assert not seed.success
    assert "start-seed-via-transfer-engine" in seed.message


def test_the_view_of_a_single_tier_adds_up(model: Path) -> None:
    rig = SchedulerRig(model)
    ids = prompt(1, 40)
    rig.run(rig.request("a", ids))
    rig.run(rig.request("b", ids))
    rig.step(rig.request("c", ids, greedy(30)))
    rig.step(GetCacheViewReq(req_id="view"))
    seen = rig.answers[-1].data
    (l1,) = seen["tiers"]
    assert l1["total"] == 512
    assert sum(l1["parts"].values()) == 512
    assert l1["parts"]["locked"] >= 40, "the third request uses them"
    assert seen["store"] is None
    assert seen["queues"] == {"running": 1, "waiting": 0}
    counts = seen["history"][-1]["counts"]
    assert (counts["hit_device"], counts["computed"]) == (2 * 39, 40 + 2)
    assert seen["missed"] == {"evicted": 0, "no_state": 0, "logprobs": 0, "new": 42}
    assert seen["prefixes"][0]["tiers"] == ["L1"]


def test_the_transfer_engine_is_described_as_it_is_when_asked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Describes itself anew each time."""

        num_asked = 0

        def describe(self) -> dict[str, int]:
            self.num_asked += 1
            return {"engine_objects": self.num_asked}

    rig = SchedulerRig(model)
    rig.step(GetInternalStateReq(req_id="without"))
    engine = Engine()
    monkeypatch.setattr(transfer_engines, "get_mooncake_transfer_engine", lambda: engine)
    rig.step(GetInternalStateReq(req_id="first"))
    rig.step(GetInternalStateReq(req_id="second"))
    told = [answer.data["transfer_engine"] for answer in rig.answers]
    assert told == [None, {"engine_objects": 1}, {"engine_objects": 2}]


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
