"""Prompts for a load test: random, in groups that share a prefix, or from a trace.

Deterministic: the same arguments and seed give the same tokens in every process. Prompts are token
ids; for chat endpoints they are converted to text.

A trace has the format of Mooncake's release. Each line is a JSON object: `timestamp` (ms),
`input_length`, `output_length` (tokens), `hash_ids` (one for each block of 512 prompt tokens; the
last block may be partial). Equal ids mean equal tokens up to the end of the block. There is no
text: tokens are derived from the ids, so that equal ids give equal prefixes. `--record-trace` of a
server adds `share` to a sample.

Source of format and data: Qin et al., "Mooncake: Trading More Storage for Less Computation",
FAST'25.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.constants import TRACE_BLOCK_TOKENS

BLOCK_TOKENS = TRACE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Lengths are tokens, before any scaling."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    priority: int = 0
    share: float = 1.0
    """Share of the prompts that the trace has, by their first blocks."""


@dataclass(frozen=True, slots=True)
class TraceScale:
    """Factors that make a trace small enough for a machine.

    Args:
        length: Factor of prompt lengths, in (0, 1].
        output: Factor of answer lengths, in (0, 1].
        time: Factor of the times between requests; 0 sends all at once.

    Raises:
        ValueError: A factor is outside its range, or a block would have no tokens.
    """

    length: float = 1.0
    output: float = 1.0
    time: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.length <= 1 or not 0 < self.output <= 1:
            raise ValueError(f"scales must be in (0, 1]: {self.length=}, {self.output=}")
        if self.time < 0:
            raise ValueError(f"the time factor must be 0 or more: {self.time}")
        if self.block_tokens < 1:
            raise ValueError(
                f"length scale {self.length}: a block of {BLOCK_TOKENS} tokens would have none; "
                f"use at least {1 / BLOCK_TOKENS}"
            )

    @property
    def block_tokens(self) -> int:
        return int(BLOCK_TOKENS * self.length)

    def prompt_tokens(self, request: TraceRequest) -> int:
        """Scaled prompt length, at least 1 and at most the tokens of the blocks."""
        whole, rest = divmod(request.input_length, BLOCK_TOKENS)
        scaled = whole * self.block_tokens + int(rest * self.length)
        return max(1, min(scaled, len(request.hash_ids) * self.block_tokens))

    def output_tokens(self, request: TraceRequest) -> int:
        """Scaled answer length, at least 1."""
        return max(1, int(request.output_length * self.output))


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` lines of a trace, in the order of arrival; None reads all. A ValueError
    names the line that is wrong."""
    try:
        with Path(path).open("rb") as lines:
            requests = [
                _parsed(line, f"{path}, line {number}")
                for number, line in enumerate(itertools.islice(lines, limit), 1)
                if line.strip()
            ]
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: {error.strerror}") from error
    return sorted(requests, key=lambda one: one.timestamp_ms)


def _parsed(line: bytes, where: str) -> TraceRequest:
    try:
        raw: dict[str, Any] = msgspec.json.decode(line)
        request = TraceRequest(
            timestamp_ms=float(raw["timestamp"]),
            input_length=int(raw["input_length"]),
            output_length=int(raw["output_length"]),
            hash_ids=tuple(int(one) for one in raw["hash_ids"]),
            priority=int(raw.get("priority", 0)),
            share=float(raw.get("share", 1.0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: not a trace request ({type(error).__name__}: {error}); it needs timestamp, "
            "input_length, output_length and hash_ids"
        ) from error
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if not 0 < request.share <= 1:
        raise ValueError(f"{where}: share {request.share} must be above 0, and at most 1")
    if request.input_length < 1 or blocks != len(request.hash_ids):
        raise ValueError(
            f"{where}: input_length {request.input_length} needs {blocks} hash_ids, "
            f"there are {len(request.hash_ids)}"
        )
    return request


class TokenMaker:
    """Derives the tokens of a block, drawn from a vocabulary, from its id."""

    def __init__(self, vocabulary: npt.NDArray[np.uint32], block_tokens: int) -> None:
        if len(vocabulary) < 2:
            raise ValueError("a vocabulary of at least two tokens is needed to tell blocks apart")
        self._vocabulary = vocabulary
        self._block_tokens = block_tokens

    def block(self, block_id: int) -> npt.NDArray[np.uint32]:
        """uint32 `[block_tokens]`; a function of the id."""
        random = np.random.Generator(np.random.Philox(key=block_id))
        return self._vocabulary[random.integers(len(self._vocabulary), size=self._block_tokens)]

    def prompt(self, hash_ids: Iterable[int], length: int) -> npt.NDArray[np.uint32]:
        """uint32 `[length]`: the blocks of `hash_ids` one after the other, cut to `length`."""
        blocks = [self.block(one) for one in hash_ids]
        return np.concatenate(blocks)[:length] if blocks else np.empty(0, np.uint32)


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


def random_requests(
    vocabulary: Vocabulary,
    count: int,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
) -> list[BenchRequest]:
    """Lengths in tokens, uniformly distributed over `[len * range_ratio, len]`."""
    if input_len < 1 or output_len < 1:
        raise ValueError(
            f"--random-input-len {input_len} and --random-output-len {output_len}: need both >= 1"
        )
    if not 0 <= range_ratio <= 1:
        raise ValueError(f"--random-range-ratio {range_ratio}: must be in [0, 1]")
    rng = np.random.default_rng(seed)

    def lengths(most: int) -> npt.NDArray[np.int64]:
        return rng.integers(max(1, int(most * range_ratio)), most + 1, size=count)

    pairs = zip(lengths(input_len), lengths(output_len), strict=True)
    return [
        BenchRequest(_draw(rng, vocabulary, int(prompt)), int(answer)) for prompt, answer in pairs
    ]


def shared_prefix_requests(
    vocabulary: Vocabulary,
    seed: int,
    *,
    num_groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
) -> list[BenchRequest]:
    """All prompts of all groups, in random order: each group shares a system prompt, each prompt
    has a question. Lengths in tokens."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(num_groups):
        system = _draw(rng, vocabulary, system_prompt_len)
        for _ in range(prompts_per_group):
            question = _draw(rng, vocabulary, question_len)
            requests.append(BenchRequest(system + question, output_len))
    return [requests[index] for index in rng.permutation(len(requests))]


def trace_requests(
    vocabulary: Vocabulary, trace: Sequence[TraceRequest], scale: TraceScale
) -> list[BenchRequest]:
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
    """The time to send each request, in seconds after the start. `rate`: requests per second of a
    Poisson process; infinity sends all at once. If it is None, each request has its time, or 0."""
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
