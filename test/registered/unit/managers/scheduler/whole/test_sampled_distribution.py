"""Sampled tokens have the model's own distribution, with speculation and without.

Acceptance depends on the sampled tokens. A bias may therefore hide in the tokens that follow an
accepted or a rejected draft, though the tokens of all steps together look right. Each place in a
verification thus has its own chi-squared test. Each prefix counts by itself: sums over prefixes
would hide that a token depends on the uniform number of the token before. The prefix alone decides
which place a token has, so the token's exact distribution is the model's after that prefix.

Seeds are fixed, so the tests always give the same result. If a change of seeds, weights or hash
draws other tokens, a test fails without a fault with a probability of at most its number of
chi-squared tests times `RISK`: 0.0012 with speculation, 0.0008 without.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import PreTrainedModel

from rigs.layers.reference_sampling import kept_tokens
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.environ import envs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="base-a-test-cpu")

VOCAB: Final = 5
PROMPT: Final = [1, 3, 2, 4]
NEW_TOKENS: Final = 4
"""The prefill's, and three more: all of them come from one verification if two drafts are right."""
KINDS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 1.5},
    "top-p": {"temperature": 1.5, "top_p": 0.9},
    "top-k": {"temperature": 1.5, "top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
}
REQUESTS_OF_KIND: Final = 850
"""Four kinds, and three tokens after the prefill's, give 10,200 draws."""
RISK: Final = 1e-4
"""Probability that a chi-squared test fails by chance."""
LEAST_EXPECTED: Final = 5.0
"""Draws that a cell is expected to have, for the statistic to have a chi-squared distribution."""

FIRST: Final = "first token of the first step"
AFTER_ACCEPTED: Final = "after an accepted draft"
LATER: Final = "first token of a later step"
"""A rejected draft precedes this token under speculation: a step with all drafts accepted would be
the last."""
Draws = dict[tuple[str, str], dict[tuple[int, ...], Counter[int]]]
"""Number of draws of each token, by kind and place, then by prefix."""
SPECULATES: Final[dict[str, Any]] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "max_requests": 64,
}
"""64 requests: more would have too many tokens for a verification, and decode without drafts."""


@pytest.fixture(name="reference", scope="module")
def make_reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[tuple[int, ...], torch.Tensor]]:
    """A tiny checkpoint with recurrent states, which a verification has to undo, and the logits of
    transformers' model, `[VOCAB]`, after each output of less than `NEW_TOKENS` tokens."""
    path = tmp_path_factory.mktemp("model")
    hf: PreTrainedModel = save_tiny_checkpoint(
        path, "qwen3_5", eos_token_id=None, mtp=True, vocab_size=VOCAB
    )
    outputs = list(itertools.product(range(VOCAB), repeat=NEW_TOKENS - 1))
    with torch.no_grad():
        logits = hf(torch.tensor([[*PROMPT, *output] for output in outputs])).logits
    return path, {
        output[:length]: row[len(PROMPT) - 1 + length]
        for output, row in zip(outputs, logits, strict=True)
        for length in range(NEW_TOKENS)
    }


def draw(path: Path, kinds: list[str], requests_of_kind: int, **settings: Any) -> Draws:
    """Draw `NEW_TOKENS` tokens of each request, as many requests at once as have rows. Requests
    differ in kind and seed alone."""
    rig = SchedulerRig(path, page_size=1, pool_tokens=4096, overlap=True, **settings)
    requests = [
        rig.request(
            f"{kind}-{number}",
            PROMPT,
            SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **KINDS[kind]),
            seed=number * len(kinds) + nth,
            stream=True,
        )
        for number in range(requests_of_kind)
        for nth, kind in enumerate(kinds)
    ]
    for begin in range(0, len(requests), settings["max_requests"]):
        rig.run(*requests[begin : begin + settings["max_requests"]])
    draws: Draws = defaultdict(lambda: defaultdict(Counter))
    for request in requests:
        got = rig.results[request.rid]
        for nth, place in enumerate(places(got.pieces), start=1):
            kind = request.rid.rpartition("-")[0]
            prefix = tuple(got.output_ids[:nth])
            draws[kind, place][prefix][got.output_ids[nth]] += 1
    return draws


def places(pieces: list[int]) -> Iterator[str]:
    """The place of each token after the prefill's. A message has the tokens of one step."""
    assert pieces[0] == 1
    for nth, count in enumerate(pieces[1:]):
        yield LATER if nth else FIRST
        yield from [AFTER_ACCEPTED] * (count - 1)


def cells_of(probs: dict[int, float], count: int) -> list[set[int]]:
    """Divide tokens into cells that are each expected to have enough of `count` draws. `probs` has
    the most probable token first."""
    cells: list[set[int]] = []
    cell: set[int] = set()
    for token in probs:
        cell.add(token)
        if sum(probs[one] for one in cell) * count >= LEAST_EXPECTED:
            cells.append(cell)
            cell = set()
    if cells:
        cells[-1] |= cell
    return cells


def chance(
    draws: dict[tuple[int, ...], Counter[int]],
    logits: dict[tuple[int, ...], torch.Tensor],
    params: SamplingParams,
) -> float:
    """Probability that exact draws differ from their expected numbers by at least as much: the
    chi-squared test of all prefixes together."""
    statistic, freedom = 0.0, 0
    for prefix, found in draws.items():
        probs = kept_tokens(logits[prefix], params)
        assert found.keys() <= probs.keys(), "a token that the filters drop"
        count = found.total()
        cells = cells_of(probs, count)
        for cell in cells if len(cells) > 1 else []:
            expected = count * sum(probs[token] for token in cell)
            statistic += (sum(found[token] for token in cell) - expected) ** 2 / expected
        freedom += max(0, len(cells) - 1)
    assert freedom >= VOCAB - 1, "too few draws to test anything"
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chances(
    draws: Draws, logits: dict[tuple[int, ...], torch.Tensor]
) -> dict[tuple[str, str], float]:
    return {
        (kind, place): chance(found, logits, SamplingParams(**KINDS[kind]))
        for (kind, place), found in draws.items()
    }


def num_draws(draws: Draws) -> int:
    return sum(found.total() for by_prefix in draws.values() for found in by_prefix.values())


@pytest.mark.settled
def test_tokens_of_verifications_have_the_models_distribution(
    reference: tuple[Path, dict[tuple[int, ...], torch.Tensor]],
) -> None:
    path, logits = reference
    draws = draw(path, list(KINDS), REQUESTS_OF_KIND, **SPECULATES)
    assert num_draws(draws) >= 10_000
    found = chances(draws, logits)
    assert found.keys() == set(itertools.product(KINDS, (FIRST, AFTER_ACCEPTED, LATER)))
    assert min(found.values()) > RISK, found


@pytest.mark.settled
def test_tokens_of_plain_steps_have_the_models_distribution(
    reference: tuple[Path, dict[tuple[int, ...], torch.Tensor]],
) -> None:
    path, logits = reference
    draws = draw(path, list(KINDS), REQUESTS_OF_KIND, max_requests=256)
    assert num_draws(draws) >= 10_000
    found = chances(draws, logits)
    assert found.keys() == set(itertools.product(KINDS, (FIRST, LATER)))
    assert min(found.values()) > RISK, found


@pytest.mark.settled
def test_a_draft_accepted_without_agreement_is_found(
    reference: tuple[Path, dict[tuple[int, ...], torch.Tensor]],
) -> None:
    """One draft of each verification counts as accepted, though most are not what the model
    samples. The token after it then has another prefix than the model read."""
    path, logits = reference
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.0):
        draws = draw(path, ["temperature"], 320, **SPECULATES)
    found = chances(draws, logits)
    assert found["temperature", AFTER_ACCEPTED] < RISK**2
    assert found["temperature", FIRST] > RISK
