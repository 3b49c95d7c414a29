"""DP groups that share experts draft tokens: verifications meet prefills, plain steps and idle
groups."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.caches.memory_ranks import run_on_ranks
from rigs.drafts.guesses import guessed
from rigs.drafts.replayed_graphs import replayed_graphs
from rigs.groups.group_rigs import GroupRigs
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.layers.forward_batch_info import GroupStep
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.model_executor.grouped_runner import GroupPlan
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DRAFTS: Final = 3
LONG: Final = 90
FAMILIES: Final = ("deepseek_v32", "qwen3_next", "glm4_moe")
VERIFY: Final = GroupPlan(8, 8, 2, fits_graph=True, drafts=2)
DECODE: Final = GroupPlan(5, 5, 5, fits_graph=True, drafts=0)
PREFILL: Final = GroupPlan(70, 70, 2, fits_graph=False, drafts=0)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafting")
    save_tiny_checkpoint(path, request.param, mtp=True, eos_token_id=None)
    return path


def words_alone(model: Path, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Answers of one rank with all experts, without drafts."""
    rig = SchedulerRig(model)
    try:
        return [rig.generate([one], count)[0] for one, count in zip(prompts, counts, strict=True)]
    finally:
        rig.close()


def rounds_of(*plans: GroupPlan | None) -> GroupStep | None:
    def work(group: RankGroup) -> GroupStep | None:
        return StepAgreement(group, group.rank, group.size, None).join(plans[group.rank])

    first, *others = run_on_ranks(len(plans), work)
    assert all(other == first for other in others)
    return first


def test_graphs_run_steps_of_one_kind() -> None:
    assert rounds_of(VERIFY, None) == GroupStep((8, 0), (8, 0), 2, (2, 0))
    assert rounds_of(VERIFY, VERIFY, None) == GroupStep((8, 8, 0), (8, 8, 0), 2, (2, 2, 0))
    assert rounds_of(VERIFY, DECODE) == GroupStep((8, 5), (8, 5), None, (2, 0))
    assert rounds_of(VERIFY, PREFILL) == GroupStep((8, 70), (8, 70), None, (2, 0))
    assert rounds_of(DECODE, DECODE) == GroupStep((5, 5), (5, 5), 5)


def test_no_group_drafts_if_one_refuses() -> None:
    def work(group: RankGroup) -> list[bool]:
        agreement = StepAgreement(group, group.rank, group.size, None)
        found = [agreement.may_draft]
        for refuses in (False, group.rank == 1, False):
            agreement.join(DECODE, refuses_drafts=refuses)
            found.append(agreement.may_draft)
        return found

    assert run_on_ranks(3, work) == [[True, True, False, True]] * 3


def drafting(dp_rank: int) -> dict[str, Any]:
    fields = {"speculative_algorithm": "NEXTN", "speculative_num_steps": DRAFTS}
    return {**fields, "overlap": True, "pool_tokens": 1024}


@pytest.mark.half
@pytest.mark.parametrize("captures", [False, True])
def test_verifications_beside_prefills_and_beside_nothing(model: Path, captures: bool) -> None:
    prompts = [prompt(1, 30), *(prompt(seed, 20 + 9 * seed) for seed in (2, 3))]
    counts = [LONG, 12, 12]
    expected = words_alone(model, prompts, counts)
    texts = [[*one, *words] for one, words in zip(prompts, expected, strict=True)]
    graphs: AbstractContextManager[None] = replayed_graphs() if captures else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(graphs)
        stack.enter_context(guessed(texts, right=0.6))
        groups = stack.enter_context(GroupRigs(model, 4, captures=captures, args=drafting))
        first, second, *others = groups.rigs

        def send_prompts() -> None:
            for number in (1, 2):
                message = second.request(f"r{number}", prompts[number], greedy(counts[number]))
                second.post(message)

        first.on_tokens("r0", 4, send_prompts)
        first.post(first.request("r0", prompts[0], greedy(LONG), stream=True))
        groups.wait(lambda: all(second.has_ended(f"r{number}") for number in (1, 2)))
        groups.wait(lambda: first.has_ended("r0"))
        assert first.results["r0"].output_ids == expected[0]
        assert [second.results[f"r{number}"].output_ids for number in (1, 2)] == expected[1:]
        assert not any(one.scheduler.state.counters.decode_steps for one in others)
        assert 2 < first.scheduler.state.counters.decode_steps < LONG, "some drafts were right"
        steps = [step for step in first.agreement.steps if step is not None]
    assert any(step.drafts[:2] == (1, 0) and step.tokens[1] > 4 for step in steps), "a prefill"
    alone = [step for step in steps if step.drafts == (1, 0, 0, 0) and not step.tokens[1]]
    both = [step for step in steps if step.drafts and min(step.drafts[:2]) > 0]
    assert alone and both
    for step in (*alone, *both):
        assert step.graph_rows == (max(step.drafts) if captures else None)


def test_groups_decode_without_drafts_beside_one_that_refuses_them(model: Path) -> None:
    prompts = [prompt(1, 30), prompt(2, 25)]
    expected = words_alone(model, prompts, [LONG, 25])
    texts = [[*one, *words] for one, words in zip(prompts, expected, strict=True)]
    with (
        replayed_graphs(),
        guessed(texts, right=0.5),
        GroupRigs(model, 2, captures=True, args=drafting) as groups,
    ):
        first, second = groups.rigs
        second.scheduler._draft_policy.always = False
        second.scheduler._draft_policy._most = 0  # Every batch is too large for drafts.

        def send_prompt() -> None:
            second.post(second.request("plain", prompts[1], greedy(25)))

        first.on_tokens("drafts", 4, send_prompt)
        first.post(first.request("drafts", prompts[0], greedy(LONG), stream=True))
        groups.wait(lambda: second.has_ended("plain") and first.has_ended("drafts"))
        assert first.results["drafts"].output_ids == expected[0]
        assert second.results["plain"].output_ids == expected[1]
        steps = [step for step in first.agreement.steps if step is not None]
    decoding = [step for step in steps if step.tokens[1] == 1]
    assert len(decoding) == 24
    # The group that drafts learns of the other's first decode step in its round.
    assert [bool(step.drafts) for step in decoding] == [True] + [False] * 23
    assert all(step.graph_rows == 1 for step in decoding[1:])
    assert steps[-1].drafts, "alone again, the first group drafts"
