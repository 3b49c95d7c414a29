"""The arithmetic of a model whose state can be checked, for tests of everything around a model.

The model keeps one *fact* of each position: a running hash of all tokens up to it, its place and
its token. The two likeliest next tokens are functions of the hash. The output is thus a pure
function of the prompt, even if penalties, biases or a minimum length adjust the logits (`words`).
The `seed` of a request starts its chain of hashes. A separate seed for each `extra_key` reveals
state that leaks between keys.

`checkable_worker.py` runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB_SIZE: Final = 1009

Words = npt.NDArray[np.uint64]
"""Facts are two words each: the hash; the place and the token."""
LIKELIEST: Final = 4.0
SECOND: Final = 2.0
"""Logits of two tokens; all others have 0."""
NOISE: Final = 0x5EED
"""Stands for the hash of a wrong context: no prompt has it."""

_MASK: Final = (1 << 64) - 1
_HASH_FACTOR: Final = 6364136223846793005  # Knuth, The Art of Computer Programming 2, MMIX
_TOKEN_FACTOR: Final = 0x9E3779B97F4A7C15
_TOKEN_BITS: Final = np.uint64(32)
_TOKEN_MASK: Final = np.uint64(0xFFFFFFFF)


class WrongContext(AssertionError):
    """A forward got a wrong context or inconsistent metadata."""


def chain(tokens: Sequence[int], seed: int) -> list[int]:
    """The hash at each position of `tokens`."""
    return extend(start(seed), tokens)


def words(
    prompt: Sequence[int], seed: int, count: int, params: SamplingParams | None = None
) -> list[int]:
    """The `count` tokens that follow `prompt`. `params`: adjust the logits by penalties, biases and
    a minimum length; None: nothing does."""
    at = chain(prompt, seed)[-1]
    said: list[int] = []
    for _ in range(count):
        said.append(word(at) if params is None else _adjusted_word(at, prompt, said, params))
        at = extend(at, said[-1:])[-1]
    return said


def _adjusted_word(
    at: int, prompt: Sequence[int], said: Sequence[int], params: SamplingParams
) -> int:
    scores = np.zeros(VOCAB_SIZE)
    scores[second(at)] = SECOND
    scores[word(at)] = LIKELIEST
    scores[list({*prompt, *said})] /= params.repetition_penalty  # No score is negative.
    for token in said:
        scores[token] -= params.frequency_penalty
    scores[list(set(said))] -= params.presence_penalty
    for name, value in (params.logit_bias or {}).items():
        scores[int(name)] += value
    if len(said) < params.min_new_tokens:
        scores[params.stop_token_ids or []] = -np.inf
    return int(scores.argmax())


def output_logprobs(prompt: Sequence[int], seed: int, said: Sequence[int]) -> list[float]:
    """The logprobs of the tokens `said` after `prompt`."""
    return input_logprobs([*prompt, *said], seed, len(prompt) - 1)


def output_top_logprobs(
    prompt: Sequence[int], seed: int, said: Sequence[int], count: int
) -> list[list[tuple[float, int]]]:
    """The `count` top logprobs at each of the tokens `said` after `prompt`, with their tokens."""
    hashes = chain([*prompt, *said], seed)[len(prompt) - 1 : -1]
    return [[(logprob(at, token), token) for token in tops(at, count)] for at in hashes]


def input_logprobs(prompt: Sequence[int], seed: int, start: int) -> list[float]:
    """The logprobs of the prompt tokens after `start`."""
    hashes = chain(prompt, seed)
    return [logprob(hashes[i], prompt[i + 1]) for i in range(start, len(prompt) - 1)]


def start(seed: int) -> int:
    """The hash before the first token."""
    return (seed * _HASH_FACTOR + 1) & _MASK


def extend(at: int, tokens: Sequence[int]) -> list[int]:
    """The hash at each of `tokens`, which follow the hash `at`."""
    hashes = []
    for token in tokens:
        at = (at * _HASH_FACTOR + token * _TOKEN_FACTOR + 1) & _MASK
        hashes.append(at)
    return hashes


def word(at: int) -> int:
    """The likeliest token after the hash `at`, which the model says unless its logits change."""
    return (at >> 33) % (VOCAB_SIZE - 1) + 1


def second(at: int) -> int:
    """The next likeliest token after the hash `at`; maybe the same."""
    return (at >> 17) % (VOCAB_SIZE - 1) + 1


def tops(at: int, count: int) -> list[int]:
    """The tokens of the `count` top logprobs after the hash `at`."""
    return [(word(at) + i) % VOCAB_SIZE for i in range(count)]


def logprob(at: int, token: int) -> float:
    """The logprob of `token` after the hash `at`; exact in fp32."""
    return -(((at >> 40) ^ token) & 0xFFFF) / 4096


# ---- facts ---------------------------------------------------------------------------------------


def facts(hashes: Sequence[int], begin: int, tokens: Sequence[int]) -> Words:
    """`[n, 2]`: the facts of `tokens`, of which the first is at position `begin`."""
    places = [(begin + i) << 32 | token for i, token in enumerate(tokens)]
    found = np.array(list(zip(hashes, places, strict=True)), dtype=np.uint64)
    return found.reshape(-1, 2)


def token_of(fact: Words) -> int:
    """The token of a fact."""
    return int(fact[1] & _TOKEN_MASK)


def first_break(found: Words, seed: int) -> int | None:
    """The first of the facts `[n, 2]`, from position 0 on, that does not follow from those before
    it; None: all do."""
    hashes, places = found[:, 0], found[:, 1]
    before = np.concatenate([np.array([start(seed)], dtype=np.uint64), hashes[:-1]])
    tokens = places & _TOKEN_MASK
    follows = before * np.uint64(_HASH_FACTOR) + tokens * np.uint64(_TOKEN_FACTOR) + np.uint64(1)
    position = np.arange(len(found), dtype=np.uint64)
    bad = (follows != hashes) | (places >> _TOKEN_BITS != position)
    return int(np.argmax(bad)) if bad.any() else None


def describe(fact: Words) -> str:
    """A fact in words, for errors."""
    place = int(fact[1])
    return f"token {place & 0xFFFFFFFF} at position {place >> 32}, hash {int(fact[0]):x}"
