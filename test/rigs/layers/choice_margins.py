"""Margins between chosen and rejected experts, and between the best next tokens, of a text.

Another order of sums changes scores a little, or more if it rounds an fp8 row to another number. A
choice with a margin that small may fall either way. Two right computations of one text then differ
by the output of an expert. Tests that compare words take texts whose choices are decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from rigs.layers.near_choices import ranking_of
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.moe import sparse_moe
from sglang.srt.layers.moe.sparse_moe import RouterOptions

NEAR_SCORE: Final = 0.0005
"""Scores of experts move by less between decoding and a prefill, in models that compute in fp32
with rows in fp8: by 0.0002 for 99.9% of 3,840 tokens of a deepseek_v3, by 0.0003 at most."""
NEAR_LOGIT: Final = 0.004
"""Logits move by less, likewise: 0.0017 for 99.9% of the tokens, 0.0021 at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A sparse layer's choice for each token of a step."""

    experts: torch.Tensor
    """int64 `[num_tokens, top_k]`, ascending."""
    margins: torch.Tensor
    """fp32 `[num_tokens]`: the choice stays if every score moves by less."""


def expert_margins(
    logits: torch.Tensor, options: RouterOptions, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`Choice.margins`; arguments as of `select_experts`."""
    ranking = ranking_of(logits, options, bias)
    margins = ranking.new_full((len(ranking),), torch.inf)
    if options.is_grouped:
        groups = ranking.view(len(ranking), options.num_groups, -1)
        addends = 2 if options.group_score == "top2_sum" else 1
        group_scores = groups.topk(addends, dim=-1).values.sum(dim=-1)
        margins = _gap(group_scores, options.topk_groups) / (2 * addends)
        ranking = sparse_moe._within_best_groups(ranking, options)
    if options.top_k < options.num_experts:
        margins = margins.minimum(_gap(ranking, options.top_k) / 2)
    return margins


def _gap(values: torch.Tensor, count: int) -> torch.Tensor:
    """Gap between the `count`-th largest value and the next smaller one, `[n]`."""
    best = values.sort(dim=-1, descending=True).values
    return best[:, count - 1] - best[:, count]


@contextmanager
def recorded_choices() -> Iterator[list[Choice]]:
    """The choices of all sparse layers that run meanwhile on a CPU, in order."""
    choices: list[Choice] = []
    select = sparse_moe.select_experts

    def recording(
        logits: torch.Tensor,
        options: RouterOptions,
        bias: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = select(logits, options, bias, ids)
        margins = expert_margins(logits, options, bias)
        choices.append(Choice(ids.sort(dim=-1).values, margins))
        return weights, ids

    with mock.patch.object(sparse_moe, "select_experts", recording):
        yield choices


@dataclass(frozen=True, slots=True)
class TextChoices:
    """Logits and expert choices of a model with sparse layers at each token of a text."""

    logits: torch.Tensor
    """fp32 `[num_tokens, vocab_size]`."""
    experts: torch.Tensor
    """int64 `[num_tokens, sparse layers, top_k]`."""
    margins: torch.Tensor
    """fp32 `[num_tokens]`: the least of all layers."""

    @classmethod
    def of(cls, logits: torch.Tensor, steps: Sequence[Sequence[Choice]]) -> TextChoices:
        """Args:
        steps: The choices of each step's layers.
        """
        layers = [torch.stack([one.experts for one in step], dim=1) for step in steps]
        margins = [torch.stack([one.margins for one in step]).amin(dim=0) for step in steps]
        return cls(logits, torch.cat(layers), torch.cat(margins))

    def is_decided(self, words: int) -> bool:
        """True if no choice of experts is near another, nor any of the last `words` likeliest
        tokens."""
        gaps = _gap(self.logits[-words:], 1) / 2
        return bool((self.margins > NEAR_SCORE).all() and (gaps > NEAR_LOGIT).all())


def prefilled(driver: StepDriver, row: int, tokens: Sequence[int]) -> TextChoices:
    """Compute `tokens` in one step, in an empty row."""

    def captures(batch: ForwardBatch) -> None:
        batch.capture_hidden = True

    with recorded_choices() as choices, torch.inference_mode():
        hidden = driver.extend([(row, tokens)], before=captures).hidden_states
        assert hidden is not None, "the step captured them"
        logits = driver.runner.model.draft_logits(hidden).whole()
    return TextChoices.of(logits, [choices])


def decoded(driver: StepDriver, row: int, tokens: Sequence[int]) -> TextChoices:
    """Compute `tokens` one by one, in an empty row."""
    with recorded_choices() as choices:
        outputs = [driver.extend([(row, tokens[:1])])]
        outputs += [driver.decode([(row, token)]) for token in tokens[1:]]
    layers = len(choices) // len(tokens)
    steps = [choices[begin : begin + layers] for begin in range(0, len(choices), layers)]
    return TextChoices.of(torch.cat([output.next_token_logits for output in outputs]), steps)


def decided_prompts(path: Path, length: int, words: int, **config: Any) -> Iterator[list[int]]:
    """Prompts of a tiny checkpoint that are decided, and their greedy answers with them.

    Args:
        length: Tokens of a prompt.
        words: Tokens of an answer.
        config: See `StepDriver`.
    """
    for seed in itertools.count():
        driver = StepDriver(path, **config)
        text = prompt(length, seed)
        output = driver.extend([(0, text)])
        for _ in range(words - 1):
            text.append(int(output.next_token_logits[0].argmax()))
            output = driver.decode([(0, text[-1])])
        if prefilled(driver, 1, text).is_decided(words):
            yield text[:length]
