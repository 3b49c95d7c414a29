"""Prompts for a load test: random, in groups that share a prefix, or from a trace.

Deterministic: the same arguments and seed give the same tokens in every process. Prompts are token
ids; text is made from them where a chat endpoint wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang.benchmark.mooncake_trace import TokenMaker, TraceRequest, TraceScale

Vocabulary: TypeAlias = npt.NDArray[np.uint32]
"""Ids of the tokens that prompts are made of; no special ones."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and how long its answer shall be."""

    prompt_ids: list[int]
    output_len: int
    """Tokens."""
    at_s: float | None = None
    """When to send it, in seconds after the begin; None: the request rate decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Lengths drawn evenly from `[len * range_ratio, len]`, in tokens."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ValueError(
                f"--random-input-len {self.input_len} and --random-output-len {self.output_len}: "
                "need both >= 1"
            )
        if not 0 <= self.range_ratio <= 1:
            raise ValueError(f"--random-range-ratio {self.range_ratio}: must be in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixShape:
    """Groups of prompts: a system prompt for each group, a question for each prompt. Tokens."""

    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"--gsp-{name.replace('_', '-')} {value}: must be 1 or more")


def random_requests(
    vocabulary: Vocabulary, shape: RandomShape, count: int, seed: int
) -> list[BenchRequest]:
    """`count` prompts that share nothing but by chance."""
    rng = np.random.default_rng(seed)

    def lengths(most: int) -> npt.NDArray[np.int64]:
        return rng.integers(max(1, int(most * shape.range_ratio)), most + 1, size=count)

    pairs = zip(lengths(shape.input_len), lengths(shape.output_len), strict=True)
    return [
        BenchRequest(_draw(rng, vocabulary, int(prompt)), int(answer)) for prompt, answer in pairs
    ]


def shared_prefix_requests(
    vocabulary: Vocabulary, shape: SharedPrefixShape, seed: int
) -> list[BenchRequest]:
    """All prompts of all groups, in random order."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(shape.num_groups):
        system = _draw(rng, vocabulary, shape.system_prompt_len)
        for _ in range(shape.prompts_per_group):
            question = _draw(rng, vocabulary, shape.question_len)
            requests.append(BenchRequest(system + question, shape.output_len))
    return [requests[index] for index in rng.permutation(len(requests))]


def trace_requests(
    vocabulary: Vocabulary, trace: Sequence[TraceRequest], scale: TraceScale
) -> list[BenchRequest]:
    """The requests of a trace, with the times at which to send them."""
    maker = TokenMaker(vocabulary, scale.block_tokens)
    begin = trace[0].timestamp_ms if trace else 0.0
    return [
        BenchRequest(
            maker.prompt(one.hash_ids, scale.prompt_tokens(one)).tolist(),
            scale.output_tokens(one),
            (one.timestamp_ms - begin) / 1000 * scale.time,
        )
        for one in trace
    ]


def arrival_times(requests: Sequence[BenchRequest], rate: float | None, seed: int) -> list[float]:
    """When to send each request, in seconds after the begin.

    Args:
        rate: Requests a second of a Poisson process; infinite: all at once. None: the times that
            the requests bring along, at once where they bring none.
    """
    if rate is None:
        return [one.at_s or 0.0 for one in requests]
    if rate <= 0:
        raise ValueError(f"--request-rate {rate}: must be above 0 (inf sends all at once)")
    if rate == float("inf"):
        return [0.0] * len(requests)
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=len(requests))
    times: list[float] = (np.cumsum(gaps) - gaps[:1]).tolist()
    return times


def _draw(rng: np.random.Generator, vocabulary: Vocabulary, count: int) -> list[int]:
    ids: list[int] = vocabulary[rng.integers(len(vocabulary), size=count)].tolist()
    return ids
