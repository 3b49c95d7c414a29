"""Sampler: against straightforward references, and independent of the rest of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rigs.layers.reference_sampling import kept_tokens
from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers import sampling_batch_info
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.penalties import TokenHistory
from sglang.srt.layers.sampler import Sampler, uniform_from_seed
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits
from sglang.srt.sampling.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

VOCAB = 50
MASK64 = (1 << 64) - 1


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    # Rounded as bf16 logits are: ties are the rule, not the exception.
    noise = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return noise.bfloat16().float()


def sample(
    logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], steps: list[int]
) -> list[int]:
    info = SamplingBatchInfo.from_reqs(params, VOCAB, "cpu", eos_token_ids=(7,))
    output = LogitsProcessorOutput(logits=VocabLogits.of(logits))
    return Sampler().forward(output, info, torch.tensor(seeds), torch.tensor(steps)).tolist()


def reference_uniform(seed: int, step: int) -> float:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    bits = mix((mix((seed + golden) & MASK64) + (step + 1) * golden) & MASK64)
    return (bits >> 16) / 2**48


def test_hash_is_splitmix_and_uniform() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 123456789])
    steps = torch.tensor([0, 5, 77, 100000])
    pairs = zip(seeds.tolist(), steps.tolist(), strict=True)
    assert uniform_from_seed(seeds, steps).tolist() == [reference_uniform(*pair) for pair in pairs]
    many = uniform_from_seed(torch.arange(400).repeat_interleave(50), torch.arange(50).repeat(400))
    assert 0.0 <= float(many.min()) < float(many.max()) < 1.0
    counts = torch.histc(many, bins=20, min=0, max=1)
    assert (counts - 1000).abs().max() < 150
    grid = many.view(400, 50)
    neighbours = torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))
    assert abs(float(neighbours[0, 1])) < 0.03


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    ],
    ids=str,
)
def test_distribution_matches_the_reference(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    row = random_logits(1, seed=3)
    want = kept_tokens(row[0], params)
    n = 20000
    tokens = sample(row.expand(n, -1), [params] * n, list(range(n)), [4] * n)
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
    assert set(counts.nonzero().flatten().tolist()) <= set(want)
    for token, prob in want.items():
        spread = 5 * (prob * (1 - prob) / n) ** 0.5
        assert abs(float(counts[token]) / n - prob) < spread + 1e-4


def test_a_token_is_looked_up_in_the_cumulative_distribution() -> None:
    """The exact token, not only the distribution: the head kept by the filters, renormalised."""
    params = SamplingParams(top_k=12, top_p=0.9, temperature=0.8)
    logits = random_logits(200, seed=8)
    got = sample(logits, [params] * 200, list(range(200)), [9] * 200)
    for row in range(200):
        target, before = reference_uniform(row, 9), 0.0
        want = -1
        for candidate, prob in kept_tokens(logits[row], params).items():
            before += prob
            if want < 0 and before > target:
                want = candidate
        assert got[row] == want


def test_tokens_do_not_depend_on_the_batch() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.5, temperature=2.0),
        SamplingParams(min_p=0.1, frequency_penalty=1.0),
        SamplingParams(logit_bias={"3": 4.0}),
        SamplingParams(min_new_tokens=8, stop_token_ids=[3]),
    ]
    params = [kinds[i % len(kinds)] for i in range(35)]
    logits = random_logits(35, seed=5)
    seeds = [i * 7919 for i in range(35)]
    steps = list(range(35))
    together = sample(logits, params, seeds, steps)
    alone = [sample(logits[i : i + 1], [params[i]], [seeds[i]], [steps[i]])[0] for i in range(35)]
    order = torch.randperm(35, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [seeds[i] for i in order], order)
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_greedy_takes_the_first_maximum_and_ignores_the_seed() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [9, 4]] = 3.0
    logits[1, 49] = 1.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, temperature=5.0)):
        for seed in range(5):
            assert sample(logits, [params] * 2, [seed] * 2, [0, 1]) == [4, 49]


@pytest.mark.parametrize(
    ("temperatures", "uploads", "expected"),
    [((0.0, 0.0), 0, None), ((0.0, 0.5), 2, [[1.0], [0.5]])],
    ids=["greedy", "mixed"],
)
def test_a_greedy_batch_uploads_nothing(
    monkeypatch: pytest.MonkeyPatch,
    temperatures: tuple[float, ...],
    uploads: int,
    expected: list[list[float]] | None,
) -> None:
    uploaded = []

    def upload(values: list[float], *args: Any) -> torch.Tensor:
        uploaded.append(values)
        return torch.tensor(values)

    monkeypatch.setattr(sampling_batch_info, "on_device", upload)
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    for one in params:
        one.normalize()
    info = SamplingBatchInfo.from_reqs(params, VOCAB, "cpu")
    assert len(uploaded) == uploads, "temperatures, and the rows that are drawn"
    assert (info.temperatures is None) == (expected is None)
    assert (None if info.temperatures is None else info.temperatures.tolist()) == expected


def test_impossible_tokens_are_never_sampled() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [0, 13, 49]] = 0.0
    n = 500
    tokens = sample(logits.expand(n, -1), [SamplingParams()] * n, list(range(n)), [0] * n)
    assert set(tokens) == {0, 13, 49}


def test_large_vocabularies_are_not_sorted_and_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with short and long heads, and with ties right where the candidates end."""
    vocab = 3000
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(4))
    logits[::2] = (logits[::2] * 4).bfloat16().float()
    logits[5:10] = logits[5:10].round()
    kinds = [
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=40),
        SamplingParams(top_k=512),
        SamplingParams(top_k=2000),
        SamplingParams(top_p=0.99),
        SamplingParams(min_p=0.3),
    ]
    params = [kinds[i % 6] for i in range(40)]
    info = SamplingBatchInfo.from_reqs(params, vocab, "cpu")
    runs = []
    for head in (sampler_module._HEAD_TOKENS, vocab):
        monkeypatch.setattr(sampler_module, "_HEAD_TOKENS", head)
        output = LogitsProcessorOutput(logits=VocabLogits.of(logits))
        runs.append(Sampler().forward(output, info, torch.arange(40), torch.arange(40)))
    assert torch.equal(runs[0], runs[1])


def test_a_row_of_nan_gives_some_token_and_harms_no_other() -> None:
    logits = random_logits(4)
    want = sample(logits, [SamplingParams(), SamplingParams(top_p=0.5)] * 2, [1] * 4, [0] * 4)
    logits[:2] = torch.nan
    got = sample(logits, [SamplingParams(), SamplingParams(top_p=0.5)] * 2, [1] * 4, [0] * 4)
    assert all(0 <= token < VOCAB for token in got)
    assert got[2:] == want[2:]


@pytest.mark.parametrize("temperature", [2 * GREEDY_TEMPERATURE, 1.0, MAX_TEMPERATURE])
@pytest.mark.parametrize("penalty", [MIN_REPETITION_PENALTY, 2.0])
def test_what_is_masked_is_never_chosen_at_any_edge(temperature: float, penalty: float) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, min_new_tokens=1,
        logit_bias={"7": 1e6, "8": -1e6, "9": 1e6},
    )  # fmt: skip
    params.verify(VOCAB)
    logits = random_logits(64, seed=3) * 100
    info = SamplingBatchInfo.from_reqs(
        [params] * 64,
        VOCAB,
        "cpu",
        eos_token_ids=(7,),
        histories=[TokenHistory(range(VOCAB), ()) for _ in range(64)],
    )
    output = LogitsProcessorOutput(logits=VocabLogits.of(logits))
    ids = Sampler().forward(output, info, torch.arange(64), torch.zeros(64).long()).tolist()
    assert 7 not in ids  # the end, before the least number of tokens
    adjusted = info.adjusted(logits, torch.zeros(64).long())
    assert not (adjusted / temperature).softmax(-1).isnan().any()


def test_logits_are_left_alone_and_logprobs_are_of_the_original() -> None:
    logits = random_logits(3, seed=2)
    before = logits.clone()
    params = [
        SamplingParams(temperature=0.0, logit_bias={"11": 1000.0}),
        SamplingParams(temperature=3.0, top_k=3),
        SamplingParams(temperature=0.0),
    ]
    info = SamplingBatchInfo.from_reqs(params, VOCAB, "cpu")
    output = LogitsProcessorOutput(logits=VocabLogits.of(logits))
    ids = Sampler().forward(output, info, torch.arange(3), torch.zeros(3).long(), True, [2, 0, 1])
    assert torch.equal(logits, before)
    assert ids[0] == 11
    want = before.double().log_softmax(-1)
    assert output.next_token_logprobs is not None
    torch.testing.assert_close(
        output.next_token_logprobs.double(), want[torch.arange(3), ids], atol=1e-5, rtol=0
    )
    values, indices = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    assert values is not None
    assert indices is not None
    assert values.shape == indices.shape == (3, 2)
    torch.testing.assert_close(values.double(), want.topk(2).values, atol=1e-5, rtol=0)
    assert torch.equal(indices, before.topk(2).indices)
