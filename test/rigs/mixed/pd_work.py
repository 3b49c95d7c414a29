"""Requests of the random PD driver, and what they must give.

A checkable model knows its words. Words of a tiny real model are compared with those of an engine
without a cache.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final, Protocol

from rigs.mixed.mixed_requests import Asked, MixedRequests
from rigs.mixed.mixed_scheduler import cold_engine
from rigs.models.letters import Letters
from rigs.schedulers.random_checks import (
    assert_input_logprobs,
    assert_output_logprobs,
    assert_words,
)
from rigs.schedulers.random_requests import RandomRequests, Sent
from rigs.schedulers.scheduler_rig import Collected
from sglang.srt.managers.scheduler.policy import BatchLimits

FAMILIES: Final = ("deepseek_v4", "glm5_next")
"""Families that the driver draws, of which other runs have only stand-ins: strides, windows and
groups of several pools."""


def draw_family(seed: int) -> str | None:
    """The family of a seed; None: its model is checkable."""
    rng = random.Random(f"kind of {seed}")
    return rng.choice(FAMILIES) if rng.random() < 0.25 else None


class PdWork(Protocol):
    """Draws requests, and knows what they must give.

    Attributes:
        most: Requests under way at once. A small decode server of a real model that serves many one
            after the other ends the last of them for want of slots.
    """

    most: int

    def draw(self, limits: BatchLimits) -> list[Sent]:
        """Some requests."""

    def remember(self, sent: Sent, words: list[int]) -> None:
        """A request has ended: later ones repeat it or go on from it."""

    def assert_so_far(self, sent: Sent, got: Collected) -> None:
        """Assert that the words so far are right."""

    def assert_first(self, sent: Sent, got: Collected) -> None:
        """Assert that a request that a prefill server ended is right."""

    def assert_whole(self, sent: Sent, got: Collected) -> None:
        """Assert that a request that a decode server ended is right."""


class CheckableWork(RandomRequests):
    """Of a checkable model."""

    most = 30

    def remember(self, sent: Sent, words: list[int]) -> None:  # type: ignore[override]
        super().remember(sent.message.extra_key, sent.prompt + words)

    def assert_so_far(self, sent: Sent, got: Collected) -> None:
        assert_words(sent, got)

    def assert_first(self, sent: Sent, got: Collected) -> None:
        assert got.output_ids == sent.words[:1]
        assert_input_logprobs(sent, got)
        assert_output_logprobs(sent, got)

    def assert_whole(self, sent: Sent, got: Collected) -> None:
        rid = sent.message.rid
        assert got.output_ids == sent.words, f"{rid}: {len(got.output_ids)} words"
        assert_output_logprobs(sent, got)


class RealWork:
    """Of a tiny model of `family`. Words are checked at the end of a request alone."""

    most = 12

    def __init__(self, family: str, rng: random.Random, page_size: int) -> None:
        self._family = family
        self._cold = cold_engine(family, "auto")
        self._requests = MixedRequests(rng, page_size, 8 * page_size)

    def __str__(self) -> str:
        return self._family

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        return self._cold.path

    def draw(self, limits: BatchLimits) -> list[Sent]:
        asked = self._requests.draw()
        most = min(asked.count, limits.max_request_tokens - len(asked.prompt))
        is_refused = most < 1
        # `words` has their number alone.
        return [Sent(asked.message, asked.prompt, [0] * most, False, is_refused, ())]

    def remember(self, sent: Sent, words: list[int]) -> None:
        self._requests.remember(Asked(sent.message, sent.prompt, len(words)), words)

    def assert_so_far(self, sent: Sent, got: Collected) -> None:
        assert len(got.output_ids) <= len(sent.words)

    def assert_first(self, sent: Sent, got: Collected) -> None:
        assert len(got.output_ids) == 1
        self._cold.assert_words(sent.prompt, got.output_ids, got.logprobs)

    def assert_whole(self, sent: Sent, got: Collected) -> None:
        rid, words = sent.message.rid, got.output_ids
        wanted = Asked(sent.message, sent.prompt, len(sent.words)).end_of(words)
        assert len(words) == wanted, f"{rid}: {len(words)} of {wanted} words"
        self._cold.assert_words(sent.prompt, words, got.logprobs)


def real_args(args: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Arguments of a side, with those that a model with windows or recurrent states adds."""
    added = {"num_states": 2 * args["max_requests"] + 4, "tokenizer": Letters()}
    if not args["disable_radix_cache"]:
        added["mamba_track_interval"] = 2 * page_size
    return {**args, **added}
