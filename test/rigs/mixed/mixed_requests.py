"""Requests of a mixed run: prompts that share prefixes, and whatever a request may ask for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rigs.models.letters import Letters
from rigs.schedulers.scheduler_rig import greedy
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput

VOCAB: Final = 160
_MOST_KNOWN: Final = 24
_SHARE_OF_SAMPLES: Final = 0.2
_SHARE_OF_STOPS: Final = 0.2
_KEYS: Final = (
    *[None] * 4,
    combine_extra_key("tenant", None),
    combine_extra_key(None, "salt"),
    combine_extra_key("tenant", "salt"),
)


@dataclass(slots=True)
class Asked:
    """A request under way."""

    message: TokenizedGenerateReqInput
    prompt: list[int]
    count: int
    """Words that it wants."""
    is_aborted: bool = False

    def end_of(self, words: list[int]) -> int:
        """Number of `words`, of those that the model says, with which the request ends."""
        params = self.message.sampling_params
        stops, text = params.stop_token_ids or (), Letters().decode(words)
        for end, word in enumerate(words[: self.count], 1):
            if word in stops or any(text[:end].endswith(stop) for stop in params.stop_strings):
                return end
        return self.count

    def features(self) -> set[str]:
        """Features that the request asks for."""
        message = self.message
        asked = {
            "session": message.session_id is not None,
            "cache report": message.return_cache_report,
            "extra key": message.extra_key is not None,
            "abort": self.is_aborted,
            "priority": message.priority > 0,
            "logprobs": message.return_logprob,
            "prompt logprobs": message.logprob_start_len >= 0,
            "samples": message.sample_of is not None,
            "stops": not message.sampling_params.ignore_eos,
        }
        return {name for name, is_asked in asked.items() if is_asked}


class MixedRequests:
    """Draws requests.

    Args:
        rng: Source of randomness.
        page_size: Tokens of a page.
        most_tokens: Most tokens of a prompt.
    """

    def __init__(self, rng: random.Random, page_size: int, most_tokens: int) -> None:
        self._rng, self._page_size, self._most = rng, page_size, most_tokens
        self._known = [(rng.choice(_KEYS), self._tokens(4 * page_size)) for _ in range(4)]
        self._num_drawn = 0
        # Drawn apart, so that the rest of a run stays that of its seed.
        self._apart = random.Random(repr(rng.getstate()))
        self._last: Asked | None = None

    def remember(self, asked: Asked, words: list[int]) -> None:
        """A request has ended: later ones repeat it, go on from it, or turn off."""
        self._known.append((asked.message.extra_key, asked.prompt + words))
        if len(self._known) > _MOST_KNOWN:
            del self._known[self._rng.randrange(_MOST_KNOWN)]

    def draw(self) -> Asked:
        """A request, or another sample of the last one."""
        first = self._last
        if first is not None and self._apart.random() < _SHARE_OF_SAMPLES:
            self._num_drawn += 1
            message = msgspec.structs.replace(
                first.message, rid=f"r{self._num_drawn}", sample_of=first.message.rid
            )
            return Asked(message, first.prompt, first.count)
        self._last = one = self._draw()
        return one

    def _draw(self) -> Asked:
        rng = self._rng
        key, tokens = self._prompt()
        self._num_drawn += 1
        count = rng.choice((1, 2, 12, 3 * self._page_size, rng.randint(1, 3 * self._page_size)))
        fields: dict[str, Any] = {}
        if rng.random() < 0.4:
            fields["session_id"] = f"s{rng.randrange(6)}"
        if rng.random() < 0.5:
            fields["return_logprob"] = True
            if rng.random() < 0.3:
                fields["logprob_start_len"] = rng.randrange(len(tokens))
        message = TokenizedGenerateReqInput(
            rid=f"r{self._num_drawn}",
            input_ids=token_array(tokens),
            sampling_params=greedy(count, **self._stops()),
            seed=7,
            stream=rng.random() < 0.5,
            extra_key=key,
            priority=rng.choice((0, 0, 1, 2)),
            return_cache_report=rng.random() < 0.4,
            **fields,
        )
        return Asked(message, tokens, count)

    def _stops(self) -> dict[str, Any]:
        """Sampling parameters that may end an output early."""
        rng = self._apart
        if rng.random() > _SHARE_OF_STOPS:
            return {}
        if rng.random() < 0.5:
            return {"ignore_eos": False, "stop_token_ids": rng.sample(range(1, VOCAB), 12)}
        letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3))
        return {"ignore_eos": False, "stop": [letters[0], letters[1:]]}

    def _prompt(self) -> tuple[str | None, list[int]]:
        rng, page = self._rng, self._page_size
        kind = rng.random()
        if kind < 0.15:
            return rng.choice(_KEYS), self._tokens(rng.randint(1, 4 * page))
        key, tokens = rng.choice(self._known)
        if kind < 0.5:
            # All of it is cached, if it still is.
            tokens = tokens[: max(page, len(tokens) // page * page)]
        elif kind < 0.75:
            tokens = tokens + self._tokens(rng.randint(1, page))
        elif kind < 0.95:
            tokens = tokens[: rng.randint(1, len(tokens))] + self._tokens(rng.randint(0, page))
        else:
            key = rng.choice(_KEYS)
        return key, tokens[: self._most]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(count)]
