"""Prompts for a load test: random, in groups that share a prefix, or from a trace.

Deterministic: the same arguments and seed give the same tokens in every process. Prompts are token
ids; for chat endpoints they are converted to text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang.benchmark.mooncake_trace import TokenMaker, TraceRequest, TraceScale

Vocabulary: TypeAlias = npt.NDArray[np.uint32]
"""Token ids that prompts are made of, without special tokens."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt, and the length of its answer."""

    prompt_ids: list[int]
    output_len: int
    """Tokens."""
    at_s: float | None = None
    """Time to send it, in seconds after the start; None lets the request rate decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Lengths in tokens, uniformly distributed over `[len * range_ratio, len]`."""

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
    """Groups of prompts: each group shares a system prompt, each prompt has a question. Tokens."""

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
    """`count` independent random prompts."""
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
    """The requests of a trace, with their times."""
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
    """The time to send each request, in seconds after the start.

    Args:
        rate: Requests per second of a Poisson process; infinity sends all at once. None uses the
            times of the requests, and 0 for requests without a time.
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
