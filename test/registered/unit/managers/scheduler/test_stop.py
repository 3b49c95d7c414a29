"""Ends of outputs: tokens, strings, patterns."""

from __future__ import annotations

from pathlib import Path

from rigs.models.letters import Letters
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig, greedy
from sglang.srt.messages.io_struct import (
    FinishReason,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")


def test_stop_tokens_eos_and_min_new_tokens(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model)
    ids, words = PROMPTS[2], alone[2]
    stop = words[3]
    at = words.index(stop)
    rig.run(rig.request("stop", ids, greedy(stop_token_ids=[stop], ignore_eos=False)))
    got = rig.results["stop"]
    assert got.finish_reason is not None
    assert (got.finish_reason.type, got.finish_reason.matched) == ("stop", stop)
    assert got.output_ids == words[: at + 1]
    later = greedy(stop_token_ids=[stop], ignore_eos=False, min_new_tokens=at + 2)
    rig.run(rig.request("later", ids, later))
    assert stop not in rig.results["later"].output_ids[: at + 1]
    assert len(rig.results["later"].output_ids) >= at + 2


def test_stop_strings_across_tokens(model: Path, alone: list[list[int]]) -> None:
    rig = SchedulerRig(model, tokenizer=Letters())
    text = Letters().decode(alone[1])
    stop = text[2:5]
    end = text.index(stop) + 3
    rig.run(
        rig.request("stop", PROMPTS[1], greedy(stop=["zzzz", stop])),
        rig.request("min", PROMPTS[1], greedy(stop=stop, min_new_tokens=end + 1)),
        rig.request("pattern", PROMPTS[1], greedy(stop_regex=f"0|{stop[:2]}[{stop[2]}]")),
    )
    for rid, matched in (("stop", stop), ("pattern", f"0|{stop[:2]}[{stop[2]}]")):
        got = rig.results[rid]
        assert got.last is not None
        assert got.last.finish_reason == FinishReason(type="stop", matched=matched)
        assert got.last.shown_chars == end - 3
        assert got.output_ids == alone[1][:end]
    assert len(rig.results["min"].output_ids) > end


def test_what_stops_cost_does_not_grow_with_the_output(model: Path) -> None:
    letters = Letters()
    rig = SchedulerRig(model, tokenizer=letters, page_size=16)
    params = greedy(100, stop=["-" * 1000], stop_regex="--+")
    rig.step(rig.request("long", PROMPTS[0], params))
    decoded = []
    while not rig.scheduler.is_idle():
        before = letters.num_decoded
        rig.step()
        decoded.append(letters.num_decoded - before)
    assert len(rig.results["long"].output_ids) == 100
    assert max(decoded) <= 8, "tokens decoded in a step"


def test_a_pattern_that_takes_too_long_ends_its_own_request(model: Path) -> None:
    rig = SchedulerRig(model, tokenizer=Letters())
    catastrophic = "([a-z]|[a-z][a-z])+[0-9]"
    rig.run(
        rig.request("slow", PROMPTS[0], greedy(60, stop_regex=catastrophic)),
        rig.request("other", PROMPTS[0], greedy(60, stop_regex="-")),
    )
    reason = rig.results["slow"].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 400)
    assert str(reason.message).startswith("stop_regex: ")
    assert len(rig.results["other"].output_ids) == 60
