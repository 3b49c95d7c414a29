"""DP groups that share experts: they step together while one has work, and not otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from rigs.caches.memory_ranks import run_on_ranks
from rigs.drafts.replayed_graphs import replayed_graphs
from rigs.groups.group_rigs import GroupRigs
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.messages.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.model_executor.grouped_runner import GroupPlan
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

LONG: Final = 120
"""Tokens of an answer that outlasts what happens beside it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    save_tiny_checkpoint(path, "qwen3_moe", eos_token_id=None)
    return path


def alone(model: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What one rank with all experts says."""
    rig = SchedulerRig(model)
    try:
        return [rig.generate([one], num_tokens)[0] for one in prompts]
    finally:
        rig.close()


def had_work(steps: list[GroupStep | None]) -> list[tuple[int, ...]]:
    return [step.tokens for step in steps if step is not None]


def plan(tokens: int, rows: int, requests: int, *, fits: bool, drafts: int = 0) -> GroupPlan:
    return GroupPlan(tokens, rows, requests, fits, drafts)


DECODE: Final = plan(3, 3, 3, fits=True)
PREFILL: Final = plan(70, 2, 2, fits=False)


def rounds_of(plans: list[list[GroupPlan | None]]) -> list[list[tuple[GroupStep | None, bool]]]:
    """For each group and round: the step, and whether the group has to join the next round.
    `plans` has a list for each group."""

    def work(group: RankGroup) -> list[tuple[GroupStep | None, bool]]:
        agreement = StepAgreement(group, group.rank, group.size, lambda number: None)
        return [(agreement.join(one), agreement.is_called) for one in plans[group.rank]]

    return run_on_ranks(len(plans), work)


def test_groups_get_the_same_step() -> None:
    found = rounds_of(
        [[DECODE, DECODE, None, None], [PREFILL, None, plan(5, 5, 5, fits=True), None]]
    )
    assert found[0] == found[1]
    assert found[0] == [
        (GroupStep((3, 70), (3, 2), None), True),
        (GroupStep((3, 0), (3, 0), 3), True),
        (GroupStep((0, 5), (0, 5), 5), True),
        (None, False),
    ]


def test_ranks_of_a_group_say_the_same_once() -> None:
    """Four ranks in two groups."""

    def work(world: RankGroup) -> GroupStep | None:
        agreement = StepAgreement(world, world.rank // 2, 2, None)
        return agreement.join(DECODE if world.rank < 2 else PREFILL)

    assert run_on_ranks(4, work) == [GroupStep((3, 70), (3, 2), None)] * 4


def test_a_group_calls_only_if_it_is_not_expected_and_ignores_late_calls() -> None:
    def work(world: RankGroup) -> tuple[list[int], list[bool]]:
        called: list[int] = []
        agreement = StepAgreement(world, world.rank, 2, called.append)
        for one in (DECODE, DECODE, None):
            agreement.join(one)
        is_called = []
        for number in (0, 2, 3):
            agreement.on_call(number)
            is_called.append(agreement.is_called)
        return called, is_called

    assert run_on_ranks(2, work) == [([0], [False, False, True])] * 2


def test_a_group_in_another_round_is_an_error() -> None:
    def work(world: RankGroup) -> None:
        agreement = StepAgreement(world, world.rank, 2, None)
        agreement._next = world.rank
        agreement.join(DECODE)

    with pytest.raises(RanksDiverged, match=r"are in rounds \[0, 1\]"):
        run_on_ranks(2, work)


def test_all_have_stopped_when_the_last_says_so() -> None:
    def work(world: RankGroup) -> list[bool]:
        agreement = StepAgreement(world, world.rank, 2, None)
        found = []
        for number in range(3):
            agreement.join(None, has_stopped=number >= 1 + world.rank)
            found.append(agreement.all_have_stopped)
        return found

    assert run_on_ranks(2, work) == [[False, False, True]] * 2


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_group_without_work_runs_empty_steps(model: Path, is_whole: bool) -> None:
    prompts = [prompt(1, 40)]
    expected = alone(model, prompts, 12)
    with GroupRigs(model, 2, is_whole=is_whole) as groups:
        first, second = groups.rigs
        first.post(first.request("a", prompts[0], greedy(12)))
        groups.wait(lambda: first.has_ended("a"))
        second.post(second.request("b", prompts[0], greedy(12)))
        groups.wait(lambda: second.has_ended("b"))
        assert first.results["a"].output_ids == second.results["b"].output_ids == expected[0]
        assert (first.num_tokens("b"), second.num_tokens("a")) == (0, 0)
        steps = had_work(first.agreement.steps)
        assert steps == had_work(second.agreement.steps)
        assert steps == [(40, 0), *[(1, 0)] * 11, (0, 40), *[(0, 1)] * 11]


def test_captured_steps_run_for_the_largest_group(model: Path) -> None:
    prompts = [prompt(seed, 20) for seed in range(4)]
    expected = alone(model, prompts, 40)
    with replayed_graphs(), GroupRigs(model, 2, is_whole=True, captures=True) as groups:
        first, second = groups.rigs

        def send_prompts() -> None:
            second.post(
                *(second.request(f"r{n}", one, greedy(40)) for n, one in enumerate(prompts[:3]))
            )

        first.on_tokens("r", 1, send_prompts)
        first.post(first.request("r", prompts[3], greedy(40), stream=True))
        groups.wait(lambda: first.has_ended("r"))
        groups.wait(lambda: all(second.has_ended(f"r{n}") for n in range(3)))
        assert first.results["r"].output_ids == expected[3]
        assert [second.results[f"r{n}"].output_ids for n in range(3)] == expected[:3]
        steps = [step for step in first.agreement.steps if step is not None]
        sizes = {step.graph_rows for step in steps if max(step.tokens) < 20}
        # How many steps the first request has alone is up to the threads.
        assert {3} <= sizes <= {1, 2, 3}
        assert any(0 in step.tokens for step in steps if step.graph_rows == 3), "an idle replay"
        assert all(step.graph_rows is None for step in steps if max(step.tokens) >= 20)


def test_a_group_that_is_called_polls_without_waiting(model: Path) -> None:
    rigs = GroupRigs(model, 2).rigs
    assert rigs[0].scheduler.poll_timeout_ms() > 0
    rigs[0].agreement.on_call(0)
    assert rigs[0].scheduler.poll_timeout_ms() == 0
    for rig in rigs:
        rig.close()


def test_nothing_is_exchanged_while_nobody_has_work(model: Path) -> None:
    with GroupRigs(model, 2) as groups:
        first, second = groups.rigs
        first.post(first.request("r", prompt(1, 20), greedy(4)))
        groups.wait(lambda: first.has_ended("r"))
        groups.wait(lambda: not (first.agreement.is_called or second.agreement.is_called))
        before = groups.rounds.num_calls, groups.tokens.num_calls
        ticks = [rig.scheduler.state.counters.ticks for rig in groups.rigs]
        # A message wakes a group, which then has nothing to launch.
        for rig in groups.rigs:
            rig.post(AbortReq(rid="nobody"))
        groups.wait(
            lambda: all(
                rig.scheduler.state.counters.ticks > count
                for rig, count in zip(groups.rigs, ticks, strict=True)
            )
        )
        assert (groups.rounds.num_calls, groups.tokens.num_calls) == before


def test_prefills_beside_decoding(model: Path) -> None:
    prompts = [prompt(seed, 20 + 17 * seed) for seed in range(4)]
    expected = alone(model, prompts, 10)
    long = alone(model, [prompt(9, 30)], LONG)[0]
    with GroupRigs(model, 4, is_whole=True) as groups:
        first, second, third, _ = groups.rigs

        def send_prompts() -> None:
            for number, one in enumerate(prompts):
                rig = (second, third)[number % 2]
                rig.post(rig.request(f"r{number}", one, greedy(10)))

        first.on_tokens("long", 4, send_prompts)
        first.post(first.request("long", prompt(9, 30), greedy(LONG), stream=True))
        groups.wait(lambda: all(rig.has_ended(f"r{n}") for n, rig in ((2, second), (3, third))))
        groups.wait(lambda: first.has_ended("long"))
        assert first.results["long"].output_ids == long
        for number, words in enumerate(expected):
            rig = (second, third)[number % 2]
            assert rig.results[f"r{number}"].output_ids == words
    # While the loops run, one group may have taken a step that another is still to take.
    steps = had_work(first.agreement.steps)
    assert any(one[0] == 1 and max(one[1:]) > 1 for one in steps), "unlike steps came together"
    assert all(rig.agreement.steps == first.agreement.steps for rig in groups.rigs)


def test_logprobs_of_prompts_need_all_rows_of_one_group(model: Path) -> None:
    rig = SchedulerRig(model)
    message = rig.request("r", prompt(3, 50), greedy(3), return_logprob=True, logprob_start_len=0)
    rig.run(message)
    expected = rig.results["r"].input_logprobs
    rig.close()
    assert len(expected) == 49
    with GroupRigs(model, 2) as groups:
        first, second = groups.rigs
        first.post(first.request("beside", prompt(4, 30), greedy(40)))
        second.post(message)
        groups.wait(lambda: second.has_ended("r") and first.has_ended("beside"))
        assert second.results["r"].input_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_group_without_slots_retracts_alone(model: Path) -> None:
    prompts = [prompt(seed, 30) for seed in range(4)]
    expected = alone(model, prompts, 60)
    small: dict[str, Any] = {"pool_tokens": 200, "schedule_conservativeness": 0.01}
    with GroupRigs(model, 2, args=lambda dp_rank: small if dp_rank else {}) as groups:
        first, second = groups.rigs
        first.post(first.request("r", prompts[0], greedy(60)))
        second.post(*(second.request(f"r{n}", one, greedy(60)) for n, one in enumerate(prompts)))
        groups.wait(
            lambda: first.has_ended("r") and all(second.has_ended(f"r{n}") for n in range(4))
        )
        assert first.results["r"].output_ids == expected[0]
        assert [second.results[f"r{n}"].output_ids for n in range(4)] == expected
        retractions = [rig.scheduler.state.counters.retractions for rig in groups.rigs]
        assert retractions[0] == 0 and retractions[1] > 0


def test_an_abort_in_one_group_leaves_the_other(model: Path) -> None:
    expected = alone(model, [prompt(1, 30)], LONG)[0]
    with GroupRigs(model, 2) as groups:
        first, second = groups.rigs
        second.on_tokens("goes", 1, lambda: second.post(AbortReq(rid="goes")))
        second.post(second.request("goes", prompt(2, 30), greedy(400), stream=True))
        first.post(first.request("stays", prompt(1, 30), greedy(LONG), stream=True))
        groups.wait(lambda: first.has_ended("stays"))
        groups.wait(lambda: second.has_ended("goes"))
        assert first.results["stays"].output_ids == expected
        assert second.num_tokens("goes") < 400


def test_a_paused_group_takes_part(model: Path) -> None:
    expected = alone(model, [prompt(1, 30)], 20)[0]
    with GroupRigs(model, 2) as groups:
        first, second = groups.rigs
        second.post(PauseGenerationReqInput(req_id="p"))
        groups.wait(lambda: len(second.answers) == 1)
        second.post(second.request("held", prompt(1, 30), greedy(20)))
        first.post(first.request("r", prompt(1, 30), greedy(20)))
        groups.wait(lambda: first.has_ended("r"))
        assert first.results["r"].output_ids == expected
        assert second.num_tokens("held") == 0
        second.post(ContinueGenerationReqInput(req_id="c"))
        groups.wait(lambda: second.has_ended("held"))
        assert second.results["held"].output_ids == expected


def test_a_group_that_has_ended_stays_for_the_others(model: Path) -> None:
    expected = alone(model, [prompt(1, 30)], LONG)[0]
    with GroupRigs(model, 2) as groups:
        first, second = groups.rigs
        first.on_tokens("long", 1, lambda: groups.stop(timeout=60.0))
        first.post(first.request("long", prompt(1, 30), greedy(LONG), stream=True))
        groups.wait(lambda: first.has_ended("long"))
        assert first.results["long"].output_ids == expected
        # Within a step `is_stopped` may be true before the groups have agreed.
        groups.wait(lambda: all(rig.agreement.all_have_stopped for rig in groups.rigs))
        groups.wait(lambda: all(rig.scheduler.is_stopped for rig in groups.rigs))
        assert not any(second.agreement.steps[-1:]), "the last round had no work"
