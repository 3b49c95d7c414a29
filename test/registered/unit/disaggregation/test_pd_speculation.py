"""Prefill and decode apart, with speculation: the words and the drafts of one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.disaggregation.pd_rig import LocalMover, PdRig
from rigs.drafts.guesses import Drafts, guessed, recorded
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

FAMILIES: Final = ("deepseek_v3", "glm_moe_dsa", "qwen3_next")
ARGS: Final[dict[str, Any]] = {
    "page_size": 4,
    "chunked_prefill_size": 16,
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
}
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate((1, 4, 20, 65))]
NEW_TOKENS: Final = 16


@pytest.fixture(name="model", scope="module", params=FAMILIES)
def make_model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(request.param, eos_token_id=None, mtp=True)


@pytest.fixture(name="alone", scope="module")
def run_alone(model: Path) -> list[tuple[list[int], Drafts]]:
    """Words and drafts of one server, for each prompt."""
    rig = SchedulerRig(model, **ARGS)
    found = []
    for ids in PROMPTS:
        with recorded() as drafts:
            (words,) = rig.generate([ids], NEW_TOKENS)
        found.append((words, drafts))
    return found


@pytest.mark.half
@pytest.mark.parametrize(
    ("is_inline", "overlap", "prefill_steps"), [(False, True, 3), (True, False, 1)]
)
def test_a_pair_has_the_words_and_drafts_of_one_server(
    model: Path,
    alone: list[tuple[list[int], Drafts]],
    is_inline: bool,
    overlap: bool,
    prefill_steps: int,
) -> None:
    """The decode server's own number of steps counts."""
    prefill = {"speculative_num_steps": prefill_steps}
    with (
        envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(is_inline),
        PdRig(model, LocalMover(), overlap=overlap, prefill=prefill, **ARGS) as pair,
    ):
        for number, (ids, (words, drafts)) in enumerate(zip(PROMPTS, alone, strict=True)):
            for turn in ("cold", "cached"):
                rid = f"{turn} {number}"
                with recorded() as found:
                    pair.run(pair.request(rid, ids, greedy(NEW_TOKENS)))
                assert pair.result(rid).output_ids == words
                assert found == drafts, rid
                last = pair.result(rid).last
                assert last is not None and last.verifications is not None
                assert last.verifications.count == len(drafts)
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0
        registry = pair.decode.scheduler.state.metrics.registry
        way = {"way": "control" if is_inline else "transport"}
        moved = registry.get_sample_value("sglang:kv_transfer_metadata_bytes_total", way)
        assert moved and moved > 0


def test_good_drafts_are_accepted_of_requests_together(
    model: Path, alone: list[tuple[list[int], Drafts]]
) -> None:
    texts = [[*ids, *words] for ids, (words, _) in zip(PROMPTS, alone, strict=True)]
    with PdRig(model, LocalMover(), **ARGS) as pair, guessed(texts, 0.8):
        messages = [pair.request(f"{n}", ids, greedy(NEW_TOKENS)) for n, ids in enumerate(PROMPTS)]
        pair.run(*messages)
        for number, (words, _) in enumerate(alone):
            got = pair.result(f"{number}")
            assert got.output_ids == words
            assert got.last is not None and got.last.verifications is not None
            assert got.last.verifications.accept_length > 1.3


@pytest.mark.half
@pytest.mark.parametrize("without", ["prefill", "decode"])
def test_a_server_without_speculation_is_no_pair(model: Path, without: str) -> None:
    plain = {"speculative_algorithm": None, "speculative_num_steps": None}
    other: dict[str, Any] = {without: plain}
    with PdRig(model, LocalMover(), **ARGS, **other) as pair:
        message = pair.request("unlike", PROMPTS[2])
        pair.until(lambda: "unlike" in pair.decode.results, message)
        reason = pair.result("unlike").finish_reason
        assert reason is not None and reason.message is not None
        assert "--speculative-algorithm" in reason.message
