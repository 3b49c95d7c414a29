"""Speculation in the scheduler: the words are those without it, whatever is drafted, and the draft
layer drafts the same after a hit in any tier as in a cold run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedModel

from rigs.drafts.draft_driver import draft_reference
from rigs.drafts.guesses import Drafts, guessed, recorded
from rigs.drafts.replayed_graphs import replayed_graphs
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy, prompt
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.messages.io_struct import CachedTokensDetails, FlushCacheReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=32, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

FAMILIES = ("deepseek_v3", "glm_moe_dsa", "qwen3_next")
"""Each kind of state once: latent rows, these with indexer keys, and recurrent states.
`test_mtp_models.py` has the draft layers of all families."""
NEW_TOKENS = 16
SPECULATES: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@pytest.fixture(name="reference", scope="module", params=FAMILIES)
def make_reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    """A tiny checkpoint, and transformers' model."""
    path = tmp_path_factory.mktemp(request.param)
    return path, save_tiny_checkpoint(path, request.param, eos_token_id=None, mtp=True)


@pytest.fixture(scope="module")
def model(reference: tuple[Path, PreTrainedModel]) -> Path:
    return reference[0]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """The answer to each prompt without speculation."""
    rig = SchedulerRig(model, disable_radix_cache=True)
    return [rig.generate([ids], NEW_TOKENS)[0] for ids in PROMPTS]


@pytest.fixture(name="texts", scope="module")
def make_texts(alone: list[list[int]]) -> list[list[int]]:
    return [[*ids, *said] for ids, said in zip(PROMPTS, alone, strict=True)]


@pytest.mark.settled
@pytest.mark.parametrize(
    ("page_size", "chunk", "right", "overlap_steps"),
    [
        (1, -1, 0.7, False),
        (4, 8, 0.0, True),
        nightly(4, 8, 1.0, False),
        nightly(16, 16, 0.7, True),
    ],
)
def test_words_are_those_without_speculation(
    model: Path,
    alone: list[list[int]],
    texts: list[list[int]],
    page_size: int,
    chunk: int,
    right: float,
    *,
    overlap_steps: bool,
) -> None:
    rig = SchedulerRig(
        model,
        page_size=page_size,
        chunked_prefill_size=chunk,
        overlap=overlap_steps,
        **SPECULATES,
    )
    with guessed(texts, right):
        assert rig.generate(PROMPTS, NEW_TOKENS) == alone
        assert rig.generate(PROMPTS, NEW_TOKENS) == alone, "once more, with the prompts cached"
    counters = rig.scheduler.state.counters
    assert counters.decode_tokens == 2 * len(PROMPTS) * (NEW_TOKENS - 1)
    if right == 1.0:
        assert counters.decode_steps <= 2 * len(PROMPTS) * (NEW_TOKENS - 1) / 2.5


@pytest.mark.settled
def test_graphs_change_no_words_and_no_drafts(
    model: Path, alone: list[list[int]], texts: list[list[int]], launches: list[Launch]
) -> None:
    """Requests join and leave padded batches of captured sizes, and take snapshots. Verifications
    that overlap do not wait for results."""
    found: list[Drafts] = []
    for is_captured, overlaps in ((False, False), (True, False), (True, True)):
        launches.clear()
        graphs = replayed_graphs() if is_captured else nullcontext()
        with graphs, recorded() as drafts, guessed(texts, 0.7):
            rig = SchedulerRig(model, page_size=4, overlap=overlaps, **SPECULATES)
            assert rig.generate(PROMPTS, NEW_TOKENS) == alone
            assert rig.generate(PROMPTS[::-1], NEW_TOKENS) == alone[::-1], "cached"
            assert rig.generate([PROMPTS[5]], NEW_TOKENS) == [alone[5]], "of one token"
        found.append(drafts)
        assert any(one.is_ahead for one in launches) == overlaps
    assert len(found[0]) > 20
    assert found[0] == found[1]
    # Steps that ran for requests that had ended drafted for them too.
    assert {at: found[2][at] for at in found[0]} == found[0]


class Launch(NamedTuple):
    """A verification that was launched."""

    size: int
    is_ahead: bool
    """True if the results of the one before it were not known."""


@pytest.fixture(name="launches")
def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches: list[Launch] = []
    forward = TpModelWorker.forward_batch_generation

    def launching(worker: TpModelWorker, batch: ModelWorkerBatch) -> Any:
        if batch.verified is not None:
            launches.append(Launch(batch.forward.batch_size, batch.verified.behind is not None))
        return forward(worker, batch)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", launching)
    return launches


@pytest.mark.settled
def test_a_verification_waits_for_no_results(
    model: Path, alone: list[list[int]], texts: list[list[int]], launches: list[Launch]
) -> None:
    """Except with a request whose sampling needs its tokens, and at the end of the context."""
    with replayed_graphs(), guessed(texts, 1.0):
        rig = SchedulerRig(model, page_size=4, pool_tokens=2048, overlap=True, **SPECULATES)
        assert rig.generate([PROMPTS[3]], NEW_TOKENS) == [alone[3]]
        # Its first token comes from the prefill; of five verifications the last is for nothing.
        assert [one.is_ahead for one in launches] == [False, True, True, True, True]
        launches.clear()
        penalised = SamplingParams(
            temperature=0.0, presence_penalty=0.1, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        rig.run(rig.request("penalised", PROMPTS[2], penalised), rig.request("free", PROMPTS[4]))
        assert not any(one.is_ahead for one in launches if one.size == 2)
        launches.clear()
        most = rig.scheduler.state.limits.context_len
        rig.run(rig.request("longest", prompt(8, most - 6), greedy(6)))
        assert len(rig.results["longest"].output_ids) == 6
        assert launches, "its first token comes from the prefill"
        assert not launches[-1].is_ahead
    rig.scheduler.state.check_integrity()


@pytest.mark.settled
def test_plain_steps_in_between_change_no_words_and_no_drafts(
    model: Path, alone: list[list[int]], texts: list[list[int]]
) -> None:
    found: list[Drafts] = []
    for always in (True, False):
        with (
            envs.SGLANG_SPECULATE_ALWAYS.override(always),
            recorded() as drafts,
            guessed(texts, 0.7),
        ):
            rig = SchedulerRig(model, page_size=4, overlap=True, **SPECULATES)
            policy = rig.scheduler._draft_policy
            policy.first_steps, policy.trial_steps, policy.period_steps = 2, 2, 2
            assert rig.generate(PROMPTS, NEW_TOKENS) == alone
            assert rig.generate(PROMPTS[::-1], NEW_TOKENS) == alone[::-1], "cached"
        found.append(drafts)
    both = found[0].keys() & found[1].keys()
    assert len(both) > 10
    assert len(found[0]) != len(found[1]), "some steps were plain"
    assert {at: found[0][at] for at in both} == {at: found[1][at] for at in both}


@pytest.mark.settled
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_equal_those_of_transformers(
    reference: tuple[Path, PreTrainedModel],
    alone: list[list[int]],
    texts: list[list[int]],
    right: float,
) -> None:
    """After accepted drafts, whose entries came from drafts first, and after rejected ones."""
    path, hf = reference
    rig = SchedulerRig(path, page_size=4, chunked_prefill_size=8, **SPECULATES)
    with recorded() as drafts, guessed(texts, right):
        assert rig.generate([PROMPTS[2]], NEW_TOKENS) == [alone[2]]
    assert len(drafts) >= NEW_TOKENS // 4
    for (newest, before), got in drafts.items():
        text = texts[2][: before + 1]
        assert text[-1] == newest
        logits = draft_reference(hf, text, steps=3).logits[-3:]
        assert got == logits.argmax(-1).tolist(), f"after {before} tokens"


@pytest.mark.settled
def test_a_simulated_length_is_kept_on_average(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3_5", eos_token_id=None, mtp=True)
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.7):
        rig = SchedulerRig(tmp_path, page_size=4, **SPECULATES)
        rig.generate([PROMPTS[2]], 28)
    # The first token comes from the prefill, and ten verifications give 27.
    assert rig.scheduler.state.counters.decode_steps == 10


@pytest.mark.settled
def test_sampled_words_are_those_without_speculation(model: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    said: list[list[list[int]]] = []
    for settings in ({}, SPECULATES):
        rig = SchedulerRig(model, page_size=4, **settings)
        rids = [f"sampled-{number}" for number in range(len(PROMPTS))]
        texts = (
            [[*ids, *words] for ids, words in zip(PROMPTS, said[0], strict=True)] if said else []
        )
        with guessed(texts, 0.8):
            rig.run(
                *(
                    rig.request(rid, ids, params, seed=number)
                    for number, (rid, ids) in enumerate(zip(rids, PROMPTS, strict=True))
                )
            )
        said.append([rig.results[rid].output_ids for rid in rids])
    assert said[0] == said[1]


def ask(rig: SchedulerRig, rid: str, ids: list[int]) -> CachedTokensDetails:
    rig.step(rig.request(rid, ids, greedy(NEW_TOKENS)))
    rig.settle()
    last = rig.results[rid].last
    assert last is not None
    return last.cached_tokens_details


def evict_l1(rig: SchedulerRig) -> None:
    """Fill L1 with another prompt."""
    ask(rig, f"other-{len(rig.results)}", prompt(99 + len(rig.results), 480))


@pytest.mark.settled
def test_drafts_do_not_depend_on_the_tier_of_the_prefix(model: Path) -> None:
    """The prompt also shares its page edge with another prompt that continues differently."""
    page = 16
    extra = json.dumps({"prefetch_threshold": page, "prefetch_timeout_base": 30})
    rig = SchedulerRig(
        model,
        page_size=page,
        pool_tokens=512,
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=extra,
        **SPECULATES,
    )
    try:
        shared = prompt(5, 4 * page)
        ids = [*shared, *prompt(6, 23)]
        with recorded() as cold:
            assert ask(rig, "cold", ids).total == 0
        assert len(cold) > NEW_TOKENS // 4
        rig.step(FlushCacheReqInput(req_id="flush"))
        # The shared page is computed beside another continuation.
        ask(rig, "other continuation", [*shared, *prompt(7, 30)])
        with recorded() as beside:
            assert ask(rig, "L1", ids).device >= 3 * page
        assert beside == cold
        evict_l1(rig)
        with recorded() as from_host:
            assert ask(rig, "L2", ids).host > 0
        assert from_host == cold
        rig.step(FlushCacheReqInput(req_id="flush again"))
        with recorded() as from_storage:
            assert ask(rig, "L3", ids).storage > 0
        assert from_storage == cold
    finally:
        rig.close()


@pytest.mark.settled
def test_retracted_requests_say_and_draft_the_same(model: Path) -> None:
    prompts = [prompt(seed, 20) for seed in range(4)]
    plain = SchedulerRig(model, disable_radix_cache=True)
    want = [plain.generate([ids], 40)[0] for ids in prompts]
    texts = [[*ids, *said] for ids, said in zip(prompts, want, strict=True)]
    drafts: list[Drafts] = []
    for pool_tokens in (512, 160):
        rig = SchedulerRig(model, page_size=4, pool_tokens=pool_tokens, **SPECULATES)
        with recorded() as found, guessed(texts, 0.8):
            assert rig.generate(prompts, 40) == want
        drafts.append(found)
    assert rig.scheduler.state.counters.retractions > 0
    # After a retraction the tokens of a verification begin elsewhere.
    same = drafts[0].keys() & drafts[1].keys()
    assert len(same) > len(drafts[0]) / 2
    assert [drafts[0][key] for key in same] == [drafts[1][key] for key in same]


@pytest.mark.settled
def test_penalties_take_one_token_a_step(model: Path, texts: list[list[int]]) -> None:
    """Though the drafts are what the model says without them."""
    params = SamplingParams(
        temperature=0.0, frequency_penalty=0.7, max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    said = []
    for settings in ({}, SPECULATES):
        rig = SchedulerRig(model, page_size=4, **settings)
        with guessed(texts, 1.0):
            rig.run(rig.request("penalised", PROMPTS[2], params), rig.request("free", PROMPTS[3]))
        said.append([rig.results[rid].output_ids for rid in ("penalised", "free")])
        assert rig.scheduler.state.counters.decode_steps == NEW_TOKENS - 1
    assert said[0] == said[1]


@pytest.mark.settled
def test_a_stop_among_accepted_drafts_drops_the_rest(
    model: Path, alone: list[list[int]], texts: list[list[int]]
) -> None:
    rig = SchedulerRig(model, page_size=4, **SPECULATES)
    stop = alone[3][9]
    first = alone[3].index(stop)
    with guessed(texts, 1.0):
        params = SamplingParams(
            temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=[stop], ignore_eos=False
        )
        rig.run(rig.request("stops", PROMPTS[3], params))
    got = rig.results["stops"]
    assert got.output_ids == alone[3][: first + 1]
    assert got.finish_reason is not None
    assert got.finish_reason.matched == stop
