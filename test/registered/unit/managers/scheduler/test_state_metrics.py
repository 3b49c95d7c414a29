"""Recurrent states as operators see them: `/metrics` and the scheduler's internal state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.messages.io_struct import (
    FlushCacheReqInput,
    GetInternalStateReq,
    GetMetricsReq,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

PAGE = 4


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_5", eos_token_id=None)


def rig_of(model: Path, **args: Any) -> SchedulerRig:
    settings: dict[str, Any] = {
        "page_size": PAGE,
        "num_states": 6,
        "max_requests": 2,
        "mamba_scheduler_strategy": "no_buffer",
        **args,
    }
    return SchedulerRig(model, **settings)


def run(rig: SchedulerRig, rid: str, tokens: list[int], count: int = 2) -> None:
    rig.run(rig.request(rid, tokens, greedy(count)))


def samples(rig: SchedulerRig) -> Mapping[str, float]:
    """Samples by name, without its prefix, and values of labels."""
    rig.step(GetMetricsReq(req_id="metrics"))
    text = rig.answers.pop().data["text"]
    return {
        "/".join([sample.name.removeprefix("sglang:"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_states(rig: SchedulerRig) -> dict[str, float]:
    """Samples that are about states, but for the time at which a counter was made."""
    return {
        name: value
        for name, value in samples(rig).items()
        if "mamba" in name and "_created" not in name
    }


def slots(rig: SchedulerRig) -> tuple[float, float, float]:
    """Used, evictable, free."""
    found = samples(rig)
    used, evictable, free = (
        found[f"num_{place}_mamba_slots"] for place in ("used", "evictable", "free")
    )
    assert found["mamba_usage"] == used / 6
    return used, evictable, free


def test_slots_are_used_evictable_or_free(model: Path) -> None:
    rig = rig_of(model)
    assert slots(rig) == (0, 0, 6)
    rig.step(rig.request("runs", prompt(1, 21), greedy(8)))
    assert slots(rig) == (1, 1, 5 - 1), "the state that it runs on; its snapshot"
    rig.step(GetInternalStateReq(req_id="state"))
    data = rig.answers.pop().data
    assert {name: data[name] for name in data if "mamba" in name} == {
        "max_mamba_cache_size": 6,
        "free_mamba_slots": 4,
        "evictable_mamba_slots": 1,
        "used_mamba_slots": 1,
    }
    rig.run()
    assert slots(rig) == (0, 1, 5)


def test_a_prompt_whose_state_is_gone_counts_what_it_computes_though_pages_are_there(
    model: Path,
) -> None:
    rig = rig_of(model)
    tokens = prompt(1, 43)
    run(rig, "cold", tokens)
    assert samples(rig)["mamba_cut_tokens_total"] == 0
    run(rig, "longer", [*tokens, *prompt(2, 9)])
    assert samples(rig)["mamba_cut_tokens_total"] == 0, "it continues from the state behind 40"
    run(rig, "shorter", tokens[:30])
    assert samples(rig)["mamba_cut_tokens_total"] == 28, "its whole pages, and no state before 40"
    run(rig, "shorter again", tokens[:30])
    assert samples(rig)["mamba_cut_tokens_total"] == 28, "the one before left a state behind 28"


def test_a_request_for_all_logprobs_of_a_cached_prompt_cuts_nothing(model: Path) -> None:
    rig = rig_of(model)
    tokens = prompt(1, 43)
    run(rig, "cold", tokens)
    rig.run(
        rig.request("scored", tokens, greedy(2), return_logprob=True, logprob_start_len=0),
        rig.request("one", tokens[:1], greedy(2), return_logprob=True, logprob_start_len=0),
    )
    assert len(rig.results["scored"].input_logprobs) == 42
    assert rig.results["scored"].output_ids == rig.results["cold"].output_ids
    assert samples(rig)["mamba_cut_tokens_total"] == 0


def test_snapshots_are_counted_by_step_and_outcome(model: Path) -> None:
    rig = rig_of(model, mamba_scheduler_strategy="extra_buffer", mamba_track_interval=8)
    run(rig, "first", prompt(1, 10), 32)
    found = samples(rig)
    assert found["mamba_snapshots_total/taken/prefill"] == 1
    assert found["mamba_snapshots_total/taken/decode"] == 4, "behind 16, 24, 32 and 40"
    assert "mamba_snapshots_total/no_slot/prefill" not in found

    short = rig_of(model, num_states=1, max_requests=1)
    run(short, "first", prompt(1, 10), 4)
    found = samples(short)
    assert found["mamba_snapshots_total/no_slot/prefill"] == 1
    assert "mamba_snapshots_total/taken/prefill" not in found


def test_states_that_leave_the_device_are_counted_and_those_of_a_flush_are_not(
    model: Path,
) -> None:
    rig = rig_of(model, num_states=3, max_requests=1)
    for number in range(4):
        run(rig, str(number), prompt(number, 21))
    # One slot runs, and two have snapshots: the third and the fourth took those of the first two.
    assert samples(rig)["evicted_mamba_slots_total/device"] == 2
    rig.step(FlushCacheReqInput(req_id="flush"))
    assert rig.answers.pop().success
    found = samples(rig)
    assert found["evicted_mamba_slots_total/device"] == 2
    assert found["num_free_mamba_slots"] == 3


def test_the_host_has_slots_of_its_own(model: Path) -> None:
    rig = rig_of(
        model, num_states=3, max_requests=1, enable_hierarchical_cache=True, hicache_ratio=2.0
    )
    try:
        for number in range(8):
            run(rig, str(number), prompt(number, 21))
            rig.settle()
        found = samples(rig)
        assert found["hicache_host_total_mamba_slots"] == 6
        assert found["hicache_host_used_mamba_slots"] == 6
        assert found["evicted_mamba_slots_total/host"] == 2
        assert found["evicted_mamba_slots_total/device"] == 6
        rig.step(FlushCacheReqInput(req_id="flush"))
        assert rig.answers.pop().success
        found = samples(rig)
        assert found["hicache_host_used_mamba_slots"] == 0
        assert found["evicted_mamba_slots_total/host"] == 2
    finally:
        rig.close()


def test_without_a_prefix_cache_there_are_slots_alone(model: Path) -> None:
    rig = rig_of(model, mamba_scheduler_strategy="auto", disable_radix_cache=True)
    run(rig, "first", prompt(1, 20))
    assert slots(rig) == (0, 0, 6)
    assert set(of_states(rig)) == {
        "mamba_usage", "num_used_mamba_slots", "num_evictable_mamba_slots", "num_free_mamba_slots",
        "mamba_cut_tokens_total",
    }  # fmt: skip


def test_a_model_without_states_has_no_such_metric(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path)
    assert not of_states(rig)
    rig.step(GetInternalStateReq(req_id="state"))
    assert not [name for name in rig.answers.pop().data if "mamba" in name]
