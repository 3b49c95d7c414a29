"""One step behind: what is launched before the last step's tokens are known, and what that may
not change."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rigs.models.grammar_rig import HandBackend
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.scheduler import scheduler as scheduler_module
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.scheduler.results import ResultProcessor
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=13, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

# Not by its name, or conftest.py would choose for us.
Rig = SchedulerRig
del SchedulerRig


def make_rig(model: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, **args: Any) -> Rig:
    monkeypatch.setattr(Rig, "overlap", overlap)
    return Rig(model, **args)


@pytest.fixture(name="events")
def record_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`launch` and `take in` of each step, in the order in which they happen."""
    events: list[str] = []
    forward = TpModelWorker.forward_batch_generation
    take_in = ResultProcessor.process

    def launching(*args: Any) -> Any:
        events.append("launch")
        return forward(*args)

    def taking_in(*args: Any) -> None:
        events.append("take in")
        take_in(*args)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", launching)
    monkeypatch.setattr(ResultProcessor, "process", taking_in)
    return events


def test_a_step_is_launched_before_the_one_before_it_is_taken_in(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    rig = make_rig(model, monkeypatch, overlap=True)
    rig.generate([prompt(1, 9)], max_new_tokens=5)
    # The prefill gives the first token and must be known before anything decodes.
    expected = ["launch", "take in", *["launch"] * 2, *["take in", "launch"] * 2, *["take in"] * 2]
    assert events == expected
    events.clear()
    rig = make_rig(model, monkeypatch, overlap=False)
    rig.generate([prompt(1, 9)], max_new_tokens=5)
    assert events == ["launch", "take in"] * 5


def test_first_tokens_go_out_before_their_second_is_launched(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """And a prompt that comes then does not take the turn of decoding."""
    rig = make_rig(model, monkeypatch, overlap=True)
    rig.step(rig.request("first", prompt(1, 9), greedy(3), stream=True))
    rig.step()
    assert events == ["launch", "take in"]
    assert len(rig.results["first"].output_ids) == 1
    rig.step(rig.request("second", prompt(2, 9), greedy(1)))
    assert rig.scheduler.state.in_flight is not None
    assert not rig.scheduler.state.in_flight.works
    rig.run()


def test_what_is_yet_to_be_computed_is_known(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload counts a chunked prompt, both on the device and to come, and the queue."""
    rig = make_rig(model, monkeypatch, overlap=True, chunked_prefill_size=16)
    rig.step(rig.request("long", prompt(1, 40), greedy(1)), rig.request("b", prompt(2, 9)))
    assert rig.scheduler.state.workload() == (40, {"b": 9})
    rig.step()
    assert rig.scheduler.state.workload() == (24, {"b": 9})
    rig.run()
    assert rig.scheduler.state.workload() == (0, {})


def test_prompts_follow_each_other_without_a_gap(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """Parts of one prompt, then whole prompts that end at once: none waits for the one before."""
    rig = make_rig(model, monkeypatch, overlap=True, chunked_prefill_size=16)
    rig.run(rig.request("long", prompt(1, 40), greedy(1)))
    behind = ["launch", *["launch", "take in"] * 2, "take in"]
    assert events == behind
    events.clear()
    rig.run(*(rig.request(f"r{i}", prompt(i, 16), greedy(1)) for i in range(2, 5)))
    assert events == behind


def test_a_prompt_behind_another_waits_until_that_is_mostly_done(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    """Else launching it fills the driver's queue, and holds the interpreter meanwhile."""

    class Milestone:
        def record(self) -> None:
            events.append("mostly done")

        def synchronize(self) -> None:
            events.append("wait")

    runtime = SimpleNamespace(make_event=Milestone, on_kernel_compiled=lambda report: None)
    monkeypatch.setattr(scheduler_module, "device_runtime", lambda device: runtime)
    rig = make_rig(model, monkeypatch, overlap=True, chunked_prefill_size=16)
    rig.run(rig.request("long", prompt(1, 30), greedy(1)))
    first, second = ["launch", "mostly done"], ["wait", "launch", "mostly done"]
    assert events == [*first, *second, "take in", "wait", "take in"]


def test_parts_of_a_prompt_that_wants_logprobs_wait_for_each_other(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    def logprobs(overlap: bool) -> list[float]:
        rig = make_rig(model, monkeypatch, overlap, chunked_prefill_size=16)
        wish = {"return_logprob": True, "logprob_start_len": 0}
        rig.run(rig.request("score", prompt(1, 40), greedy(1), **wish))
        return rig.results["score"].input_logprobs

    settled = logprobs(overlap=False)
    assert len(settled) == 39
    events.clear()
    assert logprobs(overlap=True) == settled
    assert events == ["launch", "take in"] * 3


def test_a_health_check_leaves_nothing_in_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(model, monkeypatch, overlap=True)
    rig.run(rig.request(f"{HEALTH_CHECK_RID_PREFIX}-1", prompt(1, 16), greedy(2)))
    assert rig.scheduler.state.tree.total_size() == 0


def test_a_request_that_ends_has_used_its_prompt_last(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end counts as a use even if the request adds no whole page."""
    rig = make_rig(model, monkeypatch, overlap=True, page_size=8)
    long, short = prompt(1, 16), prompt(2, 16)
    rig.step(rig.request("long", long, greedy(6)))
    rig.run(rig.request("short", short, greedy(1)))
    tree = rig.scheduler.state.tree
    assert isinstance(tree, RadixCache)
    times = {int(node.key.ids[0]): node.last_access_time for node in tree.nodes()}
    assert times[long[0]] > times[short[0]]


def test_copies_to_the_host_start_in_the_tick_that_launches(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"page_size": 4, "enable_hierarchical_cache": True, "hicache_size": 0.01}
    rig = make_rig(model, monkeypatch, overlap=True, **args)
    rig.step(rig.request("one", prompt(1, 16), greedy(4)))
    tree = rig.scheduler.state.tree
    assert isinstance(tree, HiRadixCache)
    assert rig.scheduler.state.in_flight is not None
    assert tree.cache_controller.ack_write_queue
    assert not tree.cache_controller.write_queue
    rig.run(check_each_step=True)
    rig.close()


def test_a_decode_step_comes_between_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(model, monkeypatch, overlap=True, chunked_prefill_size=16)
    rig.step(*(rig.request(f"r{i}", prompt(i, 16), greedy(8)) for i in range(5)))
    kinds = []
    while rig.scheduler.state.in_flight is not None:
        kinds.append("prompt" if rig.scheduler.state.in_flight.works else "step")
        rig.step()
    assert kinds[:8] == ["prompt", *["prompt", "step"] * 3, "prompt"]


def test_what_a_step_in_flight_computes_is_in_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    rig = make_rig(model, monkeypatch, overlap=True, page_size=4, chunked_prefill_size=16)
    rig.step(*(rig.request(name, prompt(1, 16), greedy(1)) for name in "ab"))
    rig.run(check_each_step=True)
    assert events == ["launch", "launch", "take in", "take in"]
    assert rig.results["b"].output_ids == rig.results["a"].output_ids
    last = rig.results["b"].last
    assert last is not None
    assert last.cached_tokens_details.total == 15


def test_running_requests_are_counted_while_their_prompts_are_in_flight(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(model, monkeypatch, overlap=True, chunked_prefill_size=8, max_requests=2)
    for i in range(5):
        rig.step(rig.request(f"r{i}", prompt(i, 8), greedy(6)))
        assert rig.scheduler.state.queues.num_holders <= 2
    rig.run(check_each_step=True)
    assert all(len(got.output_ids) == 6 for got in rig.results.values())


def test_no_step_runs_for_a_request_that_ends_by_length(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next token would have no place in its row, too."""
    rig = make_rig(model, monkeypatch, overlap=True)
    context = rig.scheduler.state.limits.context_len
    ids = prompt(2, 40)
    rig.run(rig.request("whole", ids, greedy(context)), rig.request("short", ids[:9], greedy(3)))
    assert len(rig.results["short"].output_ids) == 3
    tokens = sum(len(got.output_ids) for got in rig.results.values())
    counters = rig.scheduler.state.counters
    assert counters.decode_tokens == tokens - 2, "the first token of each is the prefill's"
    longest = max(len(got.output_ids) for got in rig.results.values())
    assert counters.decode_steps == longest - 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_slot_of_a_step_too_many_comes_back(
    model: Path, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """A stop token is known one step late, wherever in a page that happens."""
    alone = make_rig(model, monkeypatch, overlap=False).generate([prompt(3, 10)], 12)[0]
    rig = make_rig(model, monkeypatch, overlap=True, page_size=page_size)
    for place in range(1, 10):
        stop = alone[place]
        want = alone[: alone.index(stop) + 1]
        params = greedy(12, stop_token_ids=[stop], ignore_eos=False)
        rig.step(rig.request(f"stop-{place}", prompt(3, 10), params))
        rig.run(rig.request(f"other-{place}", prompt(4, 6), greedy(14)), check_each_step=True)
        assert rig.results[f"stop-{place}"].output_ids == want


def test_grammars_and_joining_penalties_wait_for_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    backend = HandBackend()
    rig = make_rig(model, monkeypatch, overlap=True, grammar_backend=lambda: backend)
    params = SamplingParams(max_new_tokens=8, regex="[a-c]{8}")
    params.normalize()
    rig.run(rig.request("grammar", prompt(5, 7), params))
    assert events == ["launch", "take in"] * (len(events) // 2)
    events.clear()
    # Counted on the device from the first decode step on.
    rig.run(rig.request("penalty", prompt(5, 7), greedy(8, frequency_penalty=1.5)))
    assert events[:4] == ["launch", "take in", "launch", "launch"]


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("tiers", [False, True])
def test_any_traffic_gives_the_words_of_settled_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: int, tiers: bool
) -> None:
    """Arrivals, aborts, stops, penalties, chunks and retractions, with too little memory."""
    args: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 16, "pool_tokens": 96}
    args["schedule_conservativeness"] = 0.01
    if tiers:
        args |= {"enable_hierarchical_cache": True, "hicache_size": 0.01}
    chance = random.Random(seed)
    plan: list[tuple[int, str, list[int], SamplingParams, int | None]] = []
    for number in range(14):
        ids = prompt(chance.randrange(4), 64)[: chance.randrange(1, 40)]
        options: list[dict[str, Any]] = [
            {}, {"stop_token_ids": [chance.randrange(160) for _ in range(6)]},
            {"frequency_penalty": 1.0}, {"min_new_tokens": 3, "stop_token_ids": [*range(9)]},
        ]  # fmt: skip
        params = greedy(chance.randrange(10, 40), ignore_eos=False, **chance.choice(options))
        params.temperature = chance.choice([0.0, 1.0])
        abort_after = chance.randrange(12) if chance.random() < 0.2 else None
        plan.append((chance.randrange(8), f"r{number}", ids, params, abort_after))

    def play(overlap: bool) -> Rig:
        rig = make_rig(model, monkeypatch, overlap, **args)
        for tick in range(40):
            messages: list[Any] = [
                rig.request(rid, ids, params) for at, rid, ids, params, _ in plan if at == tick
            ]
            messages += [
                rig.abort(rid)
                for at, rid, *_, after in plan
                if after is not None and at + after == tick
            ]
            rig.step(*messages)
            rig.check()
        rig.run(check_each_step=True)
        rig.close()
        return rig

    settled, behind = play(False), play(True)
    aborted = {rid for _, rid, *_, after in plan if after is not None}
    for rid, got in settled.results.items():
        other = behind.results[rid]
        if rid in aborted:
            common = min(len(got.output_ids), len(other.output_ids))
            assert got.output_ids[:common] == other.output_ids[:common]
        else:
            assert got.output_ids == other.output_ids, rid
            assert got.finish_reason == other.finish_reason
    for rig in (settled, behind):
        counters = rig.scheduler.state.counters
        # Tiers may free memory by copying to L2 instead.
        was_short = counters.retractions or (tiers and counters.decode_stalls)
        assert was_short, "memory was short"
