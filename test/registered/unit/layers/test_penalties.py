"""Penalties, biases and minimum lengths, against plain loops, step after step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from sglang.srt.layers.penalties import TokenHistory
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

VOCAB = 12


def histories_of(
    prompts: Sequence[list[int]], outputs: Sequence[list[int]] | None = None
) -> list[TokenHistory]:
    return [
        TokenHistory(prompt, output)
        for prompt, output in zip(prompts, outputs or [[] for _ in prompts], strict=True)
    ]


def reference(
    logits: list[float], p: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """The definition, token by token."""
    result = list(logits)
    for token in range(VOCAB):
        count = output.count(token)
        if count or token in prompt:
            factor = p.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= p.frequency_penalty * count
        result[token] -= p.presence_penalty * (count > 0)
        result[token] += (p.logit_bias or {}).get(str(token), 0.0)
        if len(output) < p.min_new_tokens and token in {5, *(p.stop_token_ids or [])}:
            result[token] = float("-inf")
    return result


def test_penalties_equal_the_definition_over_several_steps() -> None:
    params = [
        SamplingParams(),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(presence_penalty=-1.5, logit_bias={"0": 2.0, "11": -3.0}),
        SamplingParams(repetition_penalty=1.3, min_new_tokens=3, stop_token_ids=[2, 5]),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.2, presence_penalty=0.1),
        SamplingParams(min_new_tokens=2),
    ]
    prompts = [[1, 2], [3], [], [4, 4, 9], [0, 1, 2, 3], [7]]
    outputs: list[list[int]] = [[], [3, 3], [5], [], [1], []]
    info = SamplingBatchInfo.from_reqs(
        params, VOCAB, "cpu", eos_token_ids=(5,), histories=histories_of(prompts, outputs)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        logits = torch.randn(len(params), VOCAB, generator=generator)
        steps = torch.tensor([len(output) for output in outputs])
        got = info.adjusted(logits, steps)
        want = [
            reference(row, p, prompt, output)
            for row, p, prompt, output in zip(
                logits.tolist(), params, prompts, outputs, strict=True
            )
        ]
        torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
        tokens = torch.randint(0, VOCAB, (len(params),), generator=generator)
        info.accumulate(tokens)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)


def test_counts_go_along_through_any_company() -> None:
    """Requests join, leave and give way; tokens are counted on the device before or after the CPU
    knows them."""
    chance = random.Random(5)
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in (0, 1, 4, 9)]
    outputs: list[list[int]] = [[] for _ in prompts]
    histories = histories_of(prompts, outputs)
    for _ in range(60):
        rows = chance.sample(range(4), chance.randint(1, 4))
        gives_way = chance.randrange(12)
        if gives_way < 4:
            histories[gives_way].forget()
        info = SamplingBatchInfo.from_reqs(
            [params] * len(rows), VOCAB, "cpu", histories=[histories[row] for row in rows]
        )
        for is_counted in chance.choice(([False], [True], [True, True, False])):
            logits = torch.randn(len(rows), VOCAB)
            want = [
                reference(line, params, prompts[row], outputs[row])
                for line, row in zip(logits.tolist(), rows, strict=True)
            ]
            got = info.adjusted(logits, torch.zeros(len(rows), dtype=torch.int64))
            torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
            tokens = [chance.randrange(VOCAB) for _ in rows]
            if is_counted:
                info.accumulate(torch.tensor(tokens))
            for row, token in zip(rows, tokens, strict=True):
                outputs[row].append(token)


def test_what_an_earlier_batch_counts_is_not_lost_in_silence() -> None:
    params = [SamplingParams(presence_penalty=1.0)]
    histories = histories_of([[1]])
    earlier = SamplingBatchInfo.from_reqs(params, VOCAB, "cpu", histories=histories)
    SamplingBatchInfo.from_reqs(params, VOCAB, "cpu", histories=histories)
    with pytest.raises(AssertionError, match="another batch"):
        earlier.accumulate(torch.tensor([2]))


def test_nothing_asked_for_costs_nothing() -> None:
    info = SamplingBatchInfo.from_reqs([SamplingParams()] * 3, VOCAB, "cpu", eos_token_ids=(5,))
    logits = torch.randn(3, VOCAB)
    assert info.adjusted(logits, torch.zeros(3, dtype=torch.int64)) is logits
    assert not info.adjusts_logits


def test_only_penalised_rows_are_counted() -> None:
    params = [SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams()]
    info = SamplingBatchInfo.from_reqs(params, VOCAB, "cpu", histories=histories_of([[], [1], []]))
    assert info.penalties is not None
    assert info.penalties.rows.tolist() == [1]
