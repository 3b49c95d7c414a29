"""Constrained requests: waiting for a grammar, masked, ended by it, retracted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rigs.models.grammar_rig import EOS_ID, HandBackend, text_of
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constrained.grammar import GrammarLimits
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")
register_cuda_ci(est_time=25, suite="base-b-test-1-gpu-large")


def constrained(**params: Any) -> SamplingParams:
    """Parameters of random sampling under a constraint."""
    made = SamplingParams(**{"max_new_tokens": 64, **params})
    made.normalize()
    return made


def make_rig(model: Path, backend: HandBackend, **args: Any) -> SchedulerRig:
    return SchedulerRig(model, grammar_backend=lambda: backend, **args)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_random_sampling_stays_inside_the_grammar(model: Path, ignore_eos: bool) -> None:
    pattern = r"[a-c]{2,6}-[0-9]{3}"
    rig = make_rig(model, HandBackend(), chunked_prefill_size=16)
    params = constrained(regex=pattern, ignore_eos=ignore_eos)
    messages = [
        rig.request(f"r{seed}", prompt(seed, 5 + 7 * seed), params, seed=seed) for seed in range(6)
    ]
    free = rig.request("free", prompt(9, 12), greedy(20))
    rig.run(*messages, free)
    texts = set()
    for seed in range(6):
        got = rig.results[f"r{seed}"]
        assert re.fullmatch(pattern, text_of(got.output_ids)), text_of(got.output_ids)
        assert got.finish_reason is not None
        assert (got.finish_reason.type, got.finish_reason.matched) == ("stop", EOS_ID)
        texts.add(text_of(got.output_ids))
    assert len(texts) > 1, "it is random"
    alone = make_rig(model, HandBackend()).generate([prompt(9, 12)], 20)[0]
    assert rig.results["free"].output_ids == alone, "the others are left alone"


def test_min_new_tokens_gives_way_to_a_complete_grammar(model: Path) -> None:
    rig = make_rig(model, HandBackend())
    rig.run(
        rig.request("fixed", prompt(1, 8), constrained(regex="ab", min_new_tokens=20)),
        rig.request(
            "open",
            prompt(2, 8),
            constrained(regex="a*", min_new_tokens=20, stop_token_ids=[EOS_ID]),
        ),
    )
    assert text_of(rig.results["fixed"].output_ids) == "ab"
    opened = rig.results["open"].output_ids
    assert opened[:20] == [opened[0]] * 20
    assert text_of(opened) == "a" * len(text_of(opened))


def test_others_overtake_while_a_grammar_compiles(model: Path) -> None:
    backend = HandBackend(hold=True)
    rig = make_rig(model, backend)
    rig.step(rig.request("waits", prompt(1, 8), constrained(regex="[0-9]{4}")))
    rig.step(rig.request("free", prompt(2, 8), greedy(3)))
    for _ in range(6):
        rig.step()
    assert rig.results["free"].finish_reason is not None
    assert "waits" not in rig.results
    assert not rig.scheduler.is_idle()
    backend.release()
    rig.run()
    assert re.fullmatch("[0-9]{4}", text_of(rig.results["waits"].output_ids))


def test_a_request_may_be_aborted_while_its_grammar_compiles(model: Path) -> None:
    backend = HandBackend(hold=True)
    rig = make_rig(model, backend)
    rig.step(rig.request("waits", prompt(1, 8), constrained(regex="a")))
    rig.run(rig.abort("waits"))
    reason = rig.results["waits"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 499)


@pytest.mark.parametrize(
    ("params", "field"),
    [({"regex": "["}, "regex"), ({"ebnf": "x"}, "ebnf"), ({"json_schema": "{"}, "json_schema")],
)
def test_a_failed_grammar_ends_the_request_with_its_field(
    model: Path, params: dict[str, str], field: str
) -> None:
    rig = make_rig(model, HandBackend())
    rig.run(rig.request("bad", prompt(1, 8), constrained(**params)))
    reason = rig.results["bad"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert str(reason.message).startswith(f"{field}: ")


def test_without_a_backend_a_constraint_is_refused(model: Path) -> None:
    rig = SchedulerRig(model)
    rig.run(rig.request("bad", prompt(1, 8), constrained(regex="a")))
    reason = rig.results["bad"].finish_reason
    assert reason is not None
    assert reason.status_code == 400
    assert "regex" in str(reason.message)


def test_a_grammar_that_costs_too_much_ends_its_request(model: Path) -> None:
    rig = make_rig(model, HandBackend(limits=GrammarLimits(step_burst=0.0, step_cost=0.0)))
    rig.run(rig.request("slow", prompt(1, 8), constrained(regex="[0-9]{40}")))
    got = rig.results["slow"]
    assert got.finish_reason is not None
    assert (got.finish_reason.type, got.finish_reason.status_code) == ("abort", 400)
    assert len(got.output_ids) == 1


def test_a_vocabulary_that_cannot_say_it_ends_the_request(model: Path) -> None:
    rig = make_rig(model, HandBackend())
    rig.run(rig.request("kanji", prompt(1, 8), constrained(ebnf='root ::= "ab" "\\u6f22"')))
    got = rig.results["kanji"]
    assert got.finish_reason is not None
    assert got.finish_reason.status_code == 400
    assert "vocabulary" in str(got.finish_reason.message)
    assert len(got.output_ids) <= 3 + rig.overlap, "or as many as one step more gives"


def test_a_retracted_request_keeps_its_place_in_the_grammar(model: Path) -> None:
    pattern = "([0-9]{5}-){8}"
    texts = {}
    for pool in (1024, 150):
        rig = make_rig(model, HandBackend(), pool_tokens=pool, schedule_conservativeness=0.1)
        rig.run(
            *(
                rig.request(f"r{i}", prompt(i, 24), constrained(regex=pattern), seed=i)
                for i in range(3)
            ),
            check_each_step=True,
        )
        texts[pool] = [text_of(rig.results[f"r{i}"].output_ids) for i in range(3)]
        assert all(re.fullmatch(pattern, text) for text in texts[pool]), texts[pool]
    assert rig.scheduler.state.counters.retractions > 0
    assert texts[150] == texts[1024]


def test_the_backend_is_made_for_the_first_constraint_and_closed(model: Path) -> None:
    made: list[HandBackend] = []

    def make() -> HandBackend:
        made.append(HandBackend())
        return made[-1]

    rig = SchedulerRig(model, grammar_backend=make)
    rig.run(rig.request("free", prompt(1, 8)))
    assert made == []
    for i in range(2):
        rig.run(rig.request(f"r{i}", prompt(i, 8), constrained(regex="a")))
    [backend] = made
    assert backend.num_asked == 2
    rig.close()
    assert backend.is_closed


def test_a_backend_without_threads_refuses_its_request_alone(model: Path) -> None:
    backends: list[HandBackend] = []

    def make() -> HandBackend:
        if not backends:
            backends.append(HandBackend())
            raise RuntimeError("can't start new thread")
        return backends[0]

    rig = SchedulerRig(model, grammar_backend=make)
    rig.run(rig.request("first", prompt(1, 8), constrained(regex="ab")))
    reason = rig.results["first"].finish_reason
    assert reason is not None and reason.message == (
        "regex: cannot be compiled now, can't start new thread: retry later"
    )
    rig.run(rig.request("second", prompt(1, 8), constrained(regex="ab")))
    assert text_of(rig.results["second"].output_ids) == "ab"
