"""Whole schedulers on ranks that split heads and prompts: what requests get is as from one rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rigs.drafts.guesses import guessed, recorded
from rigs.models.grammar_rig import HandBackend, text_of
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import Collected, SchedulerRig, greedy, prompt
from sglang.srt.layers import context_parallel
from sglang.srt.layers.context_parallel import Run
from sglang.srt.messages.io_struct import ToScheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=18, suite="base-a-test-cpu")

ARGS: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 128, "pool_tokens": 1024}
SIZES = [(2, 2), (4, 2)]
"""Ranks, and over how many of them prefills are split."""
PROMPTS = {f"p{length}": prompt(length, length) for length in (5, 130, 300, 64, 33, 1)}
"""Prompts of one page and of several; some are too short to be split, one takes three chunks."""

TWO_TIERS: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
TIERS = ("none", "device", "host", "storage")

Ticks = Sequence[Sequence[ToScheduler]]
AnyRig = SchedulerRig | RankRigs


@pytest.fixture(scope="module", name="qwen3")
def make_qwen3(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", eos_token_id=None, num_attention_heads=8)


@pytest.fixture(scope="module", name="deepseek")
def make_deepseek(tiny_model: Callable[..., Path]) -> Path:
    """A model whose indexer chooses 32 tokens to attend to."""
    return tiny_model(
        "deepseek_v32", eos_token_id=None, num_attention_heads=8, num_key_value_heads=8
    )


@pytest.fixture(name="plans", autouse=True)
def note_plans(monkeypatch: pytest.MonkeyPatch) -> list[list[list[Run]]]:
    """Note how prefills were split."""
    plans: list[list[list[Run]]] = []
    plan_runs = context_parallel.plan_runs

    def noting(*args: Any) -> list[list[Run]] | None:
        plan = plan_runs(*args)
        if plan is not None:
            plans.append(plan)
        return plan

    monkeypatch.setattr(context_parallel, "plan_runs", noting)
    return plans


@pytest.fixture(name="make_ranks")
def make_ranks_maker() -> Iterator[Callable[..., RankRigs]]:
    made: list[RankRigs] = []

    def make(*args: Any, **fields: Any) -> RankRigs:
        made.append(RankRigs(*args, **{**ARGS, **fields}))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def drive(rig: AnyRig, ticks: Ticks) -> dict[str, Collected]:
    """Send each entry in a tick of its own, then step until idle."""
    for messages in ticks:
        rig.step(*messages)
    rig.run()
    return rig.results


def cold_then_cached(rig: AnyRig) -> Ticks:
    """`PROMPTS` without a cached prefix, again with one, and longer than before."""
    cold = [rig.request(rid, ids) for rid, ids in PROMPTS.items()]
    again = [rig.request(f"{rid} again", ids) for rid, ids in PROMPTS.items()]
    longer = [rig.request(f"{rid} longer", ids + prompt(7, 90)) for rid, ids in PROMPTS.items()]
    return [cold[:3], cold[3:], *[[]] * 40, again, *[[]] * 30, longer]


@functools.cache
def answers_of_one_rank(model: Path, *, overlap: bool) -> dict[str, Collected]:
    """The reference for all numbers of ranks."""
    one = SchedulerRig(model, overlap=overlap, **ARGS, **TWO_TIERS)
    try:
        return drive(one, cold_then_cached(one))
    finally:
        one.close()


def words(results: dict[str, Collected]) -> dict[str, list[int]]:
    return {rid: got.output_ids for rid, got in results.items()}


@pytest.mark.parametrize(("size", "cp_size"), SIZES)
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_ranks_give_the_words_of_one_cold_and_from_the_cache(
    request: pytest.FixtureRequest,
    make_ranks: Callable[..., RankRigs],
    plans: list[list[list[Run]]],
    family: str,
    size: int,
    cp_size: int,
) -> None:
    model = request.getfixturevalue(family)
    ranks = make_ranks(model, size, cp_size, **TWO_TIERS)
    want = answers_of_one_rank(model, overlap=SchedulerRig.overlap)
    found = drive(ranks, cold_then_cached(ranks))
    assert words(found) == words(want)
    assert len(found) == 18 and all(len(ids) == 8 for ids in words(found).values())
    cached = [got.last.cached_tokens_details for got in found.values() if got.last is not None]
    assert cached == [got.last.cached_tokens_details for got in want.values() if got.last]
    assert sum(one.device + one.host for one in cached) > 800
    # Whole prompts, chunks in the middle of one, and ends behind a cached prefix.
    assert len(plans) >= 5 * size and all(len(plan) == cp_size for plan in plans)


def test_aborts_in_mid_prefill_and_in_mid_answer_free_everything(
    qwen3: Path, make_ranks: Callable[..., RankRigs]
) -> None:
    def ticks(rig: AnyRig) -> Ticks:
        abort = SchedulerRig.abort
        long = [rig.request(f"r{n}", prompt(20 + n, 300), greedy(20)) for n in range(3)]
        again = rig.request("r0 again", prompt(20, 300), greedy(20))
        aborts = [abort(rig, rid) for rid in ("r0", "r1")]  # type: ignore[arg-type]
        return [long, [], aborts[:1], *[[]] * 8, aborts[1:], [again]]

    one, ranks = SchedulerRig(qwen3, **ARGS), make_ranks(qwen3, 4, 2)
    want, found = drive(one, ticks(one)), drive(ranks, ticks(ranks))
    assert words(found) == words(want)
    reasons = {rid: got.finish_reason for rid, got in found.items()}
    types = {rid: reason.type for rid, reason in reasons.items() if reason is not None}
    assert types == {"r0": "abort", "r1": "abort", "r2": "length", "r0 again": "length"}
    assert len(found["r0"].output_ids) == 0 and 0 < len(found["r1"].output_ids) < 20


def test_retraction_changes_no_word(qwen3: Path, make_ranks: Callable[..., RankRigs]) -> None:
    args: dict[str, Any] = {"pool_tokens": 320, "schedule_conservativeness": 0.01}

    def ticks(rig: AnyRig) -> Ticks:
        return [[rig.request(f"r{n}", prompt(30 + n, 70), greedy(60)) for n in range(4)]]

    one = SchedulerRig(qwen3, **{**ARGS, "pool_tokens": 2048})
    ranks = make_ranks(qwen3, 2, 2, **args)
    want, found = drive(one, ticks(one)), drive(ranks, ticks(ranks))
    assert words(found) == words(want)
    retractions = [rig.scheduler.state.counters.retractions for rig in ranks.rigs]
    assert retractions[0] == retractions[1] > 0


def test_samples_share_one_prompt(qwen3: Path, make_ranks: Callable[..., RankRigs]) -> None:
    """Two samples of three wait for the first, then share its prompt."""

    def ticks(rig: AnyRig) -> Ticks:
        params = SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True)
        params.normalize()
        ids = prompt(40, 200)
        first = rig.request("s0", ids, params, seed=5)
        others = [rig.request(f"s{n}", ids, params, seed=5 + n, sample_of="s0") for n in (1, 2)]
        return [[first, *others]]

    one, ranks = SchedulerRig(qwen3, **ARGS), make_ranks(qwen3, 4, 2)
    want, found = words(drive(one, ticks(one))), words(drive(ranks, ticks(ranks)))
    assert found == want
    assert len({tuple(ids) for ids in found.values()}) == 3


def test_grammars_hold_beside_a_prompt(qwen3: Path, make_ranks: Callable[..., RankRigs]) -> None:
    backends: dict[str, Any] = {"grammar_backend": partial(HandBackend)}

    def ticks(rig: AnyRig) -> Ticks:
        params = SamplingParams(max_new_tokens=20, temperature=0.0, regex="[a-z]{3}[0-9]{4}")
        params.normalize()
        return [
            [
                rig.request("constrained", prompt(50, 150), params),
                rig.request("free", prompt(51, 250)),
            ]
        ]

    one, ranks = SchedulerRig(qwen3, **ARGS, **backends), make_ranks(qwen3, 2, 2, **backends)
    want, found = words(drive(one, ticks(one))), words(drive(ranks, ticks(ranks)))
    assert found == want
    text = text_of(found["constrained"])
    assert text[:3].isalpha() and text[3:].isdigit() and len(text) == 7


def test_log_probabilities_of_prompts_and_answers(
    qwen3: Path, make_ranks: Callable[..., RankRigs], plans: list[list[list[Run]]]
) -> None:
    """Cold, then of a cached prompt, whose tokens are computed again and stored nowhere."""

    def ticks(rig: AnyRig) -> Ticks:
        asks: dict[str, Any] = {
            "return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2,
        }  # fmt: skip
        scored = [rig.request(f"scored {n}", prompt(60, 200), greedy(4), **asks) for n in (1, 2)]
        return [[scored[0], rig.request("short", prompt(61, 9))], *[[]] * 12, scored[1:]]

    one, ranks = SchedulerRig(qwen3, **ARGS), make_ranks(qwen3, 4, 2)
    want, found = drive(one, ticks(one)), drive(ranks, ticks(ranks))
    assert words(found) == words(want)
    for rid in ("scored 1", "scored 2"):
        assert found[rid].input_logprobs == pytest.approx(want[rid].input_logprobs, abs=1e-4)
        assert len(found[rid].input_logprobs) == 196
        assert found[rid].logprobs == pytest.approx(want[rid].logprobs, abs=1e-4)
        tops = zip(found[rid].input_top_logprobs, want[rid].input_top_logprobs, strict=True)
        for got, expected in tops:
            assert [ids for _, ids in got] == [ids for _, ids in expected]
            assert [one for one, _ in got] == pytest.approx([one for one, _ in expected], abs=1e-4)
    assert len(plans) >= 3 * 4


def tails_of(tier: str) -> dict[str, list[int]]:
    """Prompts that begin alike in each tier, and go on differently. Some are too short to split."""
    seed = TIERS.index(tier)
    tail = prompt(80 + seed, 90) if seed else []
    return {"long": prompt(71, 201) + tail, "page": prompt(72, 40), "one": prompt(73 + seed, 1)}


@pytest.mark.usefixtures("reads_are_never_late")
@pytest.mark.settled
@pytest.mark.parametrize(
    ("family", "size", "cp_size"), [("deepseek_v3", 2, 2), ("glm_moe_dsa", 4, 2)]
)
def test_drafts_are_those_of_one_rank_from_every_tier(
    tiny_model: Callable[..., Path],
    make_ranks: Callable[..., RankRigs],
    plans: list[list[list[Run]]],
    family: str,
    size: int,
    cp_size: int,
) -> None:
    """Drafts equal those of one rank without a cache, and words those without speculation."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8}
    model = tiny_model(family, eos_token_id=None, mtp=True, **heads)
    drafting: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
    plain, one = (
        SchedulerRig(model, **ARGS, **fields, disable_radix_cache=True) for fields in ({}, drafting)
    )
    extra = json.dumps({"prefetch_threshold": 16, "prefetch_timeout_base": 30})
    args = {
        **drafting,
        "pool_tokens": 512,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": extra,
    }
    ranks = make_ranks(model, size, cp_size, **args)
    for tier in TIERS:
        prompts = tails_of(tier)
        said = plain.generate(prompts.values(), 10)
        texts = [[*ids, *got] for ids, got in zip(prompts.values(), said, strict=True)]
        with recorded() as want, guessed(texts, 0.0):
            assert one.generate(prompts.values(), 10) == said
        if tier == "host":
            ranks.run(ranks.request("other", prompt(79, 480)))
        if tier == "storage":
            ranks.close()
            ranks = make_ranks(model, size, cp_size, **args)
        plans.clear()
        with recorded() as drafts, guessed(texts, 0.7):
            ranks.run(
                *(ranks.request(f"{name} {tier}", ids, greedy(10)) for name, ids in prompts.items())
            )
        results = {name: ranks.results[f"{name} {tier}"] for name in prompts}
        assert [got.output_ids for got in results.values()] == said, tier
        assert len(drafts) > 6 and drafts.items() <= want.items(), tier
        assert len(plans) >= size and all(len(plan) == cp_size for plan in plans)
        last = results["long"].last
        assert last is not None
        assert tier == "none" or getattr(last.cached_tokens_details, tier) == 192
