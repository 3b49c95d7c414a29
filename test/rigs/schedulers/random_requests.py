"""Requests of the random driver, each with its expected output."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rigs.models.grammar_rig import ids_of, text_of
from rigs.models.letters import Letters
from rigs.schedulers import checkable_model
from rigs.schedulers.checkable_model import VOCAB_SIZE
from rigs.schedulers.scheduler_rig import greedy
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.scheduler.policy import BatchLimits
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import SessionReqInput, TokenizedGenerateReqInput

_MOST_CONVERSATIONS: Final = 20
_KEYS: Final = (*[None] * 4, combine_extra_key("a", None), combine_extra_key(None, "salt"))
_SHARE_OF_EXTRAS: Final = 0.25
_SHARE_OF_PAIRS: Final = 0.3
"""Share of two demands among requests with any."""
_SHARE_OF_SESSIONS: Final = 0.3
_SESSIONS: Final = 5
_GRAMMAR_WORDS: Final = range(1, 63)
"""Digits and letters of `character_vocabulary`, which stand for themselves in a pattern."""
_PENALTIES: Final[tuple[dict[str, float], ...]] = (
    {"frequency_penalty": 3.0},
    {"presence_penalty": 3.0},
    {"repetition_penalty": 4.0},
    {"frequency_penalty": 1.0, "presence_penalty": 1.5, "repetition_penalty": 0.25},
)


class Extra(StrEnum):
    """A demand that changes the output of a request, or its end."""

    PENALTIES = "penalties"
    BIAS = "a bias"
    MINIMUM = "a minimum length"
    STOP_STRING = "a stop string"
    GRAMMAR = "a grammar"


_ADJUSTING: Final = (Extra.PENALTIES, Extra.BIAS, Extra.MINIMUM)
"""Demands that adjust the logits."""


@dataclass(slots=True)
class Sent:
    """A request under way, and its expected output."""

    message: TokenizedGenerateReqInput
    prompt: list[int]
    words: list[int]
    """The expected output; its last token ends the request."""
    stops: bool
    """True if the last token is a stop token, or completes a stop string."""
    is_refused: bool
    """True if the prompt is too long to run."""
    extras: tuple[Extra, ...]
    arrived: int = 0
    """Number of forwards before its arrival."""
    may_be_aborted: bool = False


class RandomRequests:
    """Draws requests whose prompts share prefixes in every way.

    Args:
        rng: Source of randomness.
        page_size: Tokens of a page; lengths near multiples of it are the most frequent.
        penalises: Requests may have penalties.
        in_company: Requests may have two demands, and sessions.
    """

    def __init__(
        self,
        rng: random.Random,
        page_size: int,
        *,
        penalises: bool = True,
        in_company: bool = True,
    ) -> None:
        self._rng = rng
        # Drawn apart, so that prompts stay those of the seed.
        self._apart = random.Random(repr(rng.getstate()))
        self._beside = random.Random(f"beside {rng.getstate()}")
        self.in_company = in_company
        self._extras = [one for one in Extra if penalises or one is not Extra.PENALTIES]
        self._page_size = page_size
        self._conversations: list[tuple[str | None, list[int]]] = []
        self._families = [self._tokens(self._pages(2, 6)) for _ in range(3)]
        self._num_drawn = 0

    @property
    def last_rid(self) -> str:
        return f"r{self._num_drawn}"

    def remember(self, extra_key: str | None, conversation: list[int]) -> None:
        """Store a conversation, to be repeated or continued."""
        self._conversations.insert(
            self._rng.randint(0, len(self._conversations)), (extra_key, conversation)
        )
        del self._conversations[_MOST_CONVERSATIONS:]

    def session(self, req_id: str) -> SessionReqInput:
        """A session that begins or goes on, or ends."""
        rng = self._beside
        return SessionReqInput(
            req_id=req_id,
            session_id=f"s{rng.randrange(_SESSIONS)}",
            extra_key=rng.choice(_KEYS),
            is_closed=rng.random() < 0.5,
        )

    def draw(self, limits: BatchLimits) -> list[Sent]:
        """A request, or several samples of one prompt."""
        return self._samples(*self._prompt(), limits)

    def draw_again(self, limits: BatchLimits) -> list[Sent]:
        """Prompts that continue earlier conversations."""
        known = self._rng.sample(self._conversations, min(8, len(self._conversations)))
        return [one for key, said in known for one in self._samples(key, [*said, 1], limits)]

    def _samples(self, key: str | None, tokens: list[int], limits: BatchLimits) -> list[Sent]:
        rng = self._rng
        if rng.random() < 0.03:
            tokens = tokens * (1 + limits.pool_tokens // len(tokens))
        samples: list[Sent] = []
        for _ in range(rng.choice((1, 1, 1, 1, 2, 5))):
            first = samples[0].message.rid if samples else None
            samples.append(self._request(key, tokens, first, limits))
        return samples

    def _pages(self, least: int, most: int) -> int:
        """Tokens of `least` to `most` pages, give or take a few; more pages if pages are short."""
        scale = max(1, 4 // self._page_size)
        pages = self._rng.randint(least * scale, most * scale)
        return max(1, pages * self._page_size + self._rng.choice((-1, 0, 0, 1, 3)))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def _prompt(self) -> tuple[str | None, list[int]]:
        """`extra_key` and tokens."""
        rng, page = self._rng, self._page_size
        kind = rng.random()
        if kind < 0.45 and self._conversations:
            key, said = rng.choice(self._conversations)
            again = rng.random() < 0.5
            return key, said if again else said + self._tokens(rng.randint(1, 2 * page + 1))
        key = rng.choice(_KEYS)
        if kind < 0.65:
            # Prompts that branch at every page.
            depth = rng.randint(1, 5)
            branches = [rng.randrange(2) * 500 + 7 * level for level in range(depth)]
            tokens = [start + i for start in branches for i in range(1, page + 1)]
            return key, tokens + self._tokens(rng.choice((0, 0, 1, page)))
        family = rng.choice(self._families)
        cut = rng.choice((len(family), rng.randint(0, len(family))))
        if rng.random() < 0.5:
            cut -= cut % page
        tail = rng.choice((0, 1, page - 1, page, page + 1, self._pages(1, 3)))
        return key, (family[:cut] + self._tokens(tail)) or [1]

    def _request(
        self, key: str | None, tokens: list[int], sample_of: str | None, limits: BatchLimits
    ) -> Sent:
        rng = self._rng
        self._num_drawn += 1
        rid = self.last_rid
        if sample_of is None and rng.random() < 0.03:
            rid = f"{HEALTH_CHECK_RID_PREFIX}{self._num_drawn}"
        seed = sum(map(ord, key or "")) + 1
        is_refused = len(tokens) > limits.max_input_tokens
        wanted = rng.choice((1, 2, 12, rng.randint(1, 2 * self._page_size + 40)))
        wanted = 0 if rng.random() < 0.02 else wanted
        most = min(wanted, limits.max_request_tokens - len(tokens))
        words = [] if is_refused else checkable_model.words(tokens, seed, most)
        params: dict[str, Any] = {}
        extras, stops = self._draw_extras() if words else (), False
        for extra in extras:
            params |= self._params_of(extra, words)
            if extra is Extra.GRAMMAR:
                words = ids_of(params["regex"])
            elif Extra.GRAMMAR not in extras:
                words = checkable_model.words(tokens, seed, most, greedy(**params))
        may_stop = words and Extra.MINIMUM not in extras and rng.random() < 0.3
        if may_stop and extras != (Extra.STOP_STRING,):
            params |= {"ignore_eos": False, "stop_token_ids": [rng.choice(words)]}
        if (end := _end_of(words, params)) is not None:
            words, stops = words[:end], True
        logprobs = rng.random() < 0.15
        session = None
        if self.in_company and self._beside.random() < _SHARE_OF_SESSIONS:
            session = f"s{self._beside.randrange(_SESSIONS)}"
        message = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=token_array(tokens),
            sampling_params=greedy(wanted, **params),
            seed=seed,
            stream=rng.random() < 0.5,
            extra_key=key,
            priority=rng.randrange(3),
            sample_of=sample_of,
            session_id=session,
            return_cache_report=session is not None,
            return_logprob=logprobs,
            top_logprobs_num=self._apart.choice((0, 1, 3)) if logprobs else 0,
            logprob_start_len=rng.choice((-1, 0, len(tokens) // 2)) if logprobs else -1,
        )
        return Sent(message, tokens, words, stops, is_refused, extras)

    def _draw_extras(self) -> tuple[Extra, ...]:
        """The demands of a request, in the order in which their parameters are drawn."""
        rng = self._apart
        if rng.random() >= _SHARE_OF_EXTRAS:
            return ()
        first = rng.choice(self._extras)
        if not self.in_company or self._beside.random() >= _SHARE_OF_PAIRS:
            return (first,)
        extras = {first, self._beside.choice(self._extras)}
        if extras == {Extra.GRAMMAR, Extra.MINIMUM}:
            return (first,)  # The grammar would demand a token that the minimum forbids.
        # A grammar chooses the words, and a stop string is part of them.
        return tuple(sorted(extras, key=(Extra.GRAMMAR, *_ADJUSTING, Extra.STOP_STRING).index))

    def _params_of(self, extra: Extra, words: list[int]) -> dict[str, Any]:
        """Sampling parameters of a request that would say `words` without them."""
        rng = self._apart
        at = rng.randrange(len(words))
        match extra:
            case Extra.PENALTIES:
                return dict(rng.choice(_PENALTIES))
            case Extra.BIAS:
                return {"logit_bias": {str(words[at]): rng.choice((-3.0, 5.0))}}
            case Extra.MINIMUM:
                least = rng.randint(at, len(words))
                return {"ignore_eos": False, "stop_token_ids": [words[at]], "min_new_tokens": least}
            case Extra.STOP_STRING:
                return {"stop": Letters().decode(words[at : at + rng.randint(1, 3)])}
            case Extra.GRAMMAR:
                # The pattern is one text: the request says it whatever the model prefers.
                return {"regex": text_of(rng.choices(_GRAMMAR_WORDS, k=len(words)))}


def _end_of(words: list[int], params: dict[str, Any]) -> int | None:
    """Words up to the first stop; None: none of `words` ends them."""
    stops, stop = params.get("stop_token_ids", ()), params.get("stop")
    text = Letters().decode(words)
    for end in range(max(1, params.get("min_new_tokens", 0)), len(words) + 1):
        if words[end - 1] in stops or (stop is not None and text[:end].endswith(stop)):
            return end
    return None
