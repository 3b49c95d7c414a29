"""Chooses a DP group for each request, and joins what several groups answer.

A DP group is a scheduler with ranks, requests and a cache of its own. A server has
`--attn-dp-size` of them. Pure, but for the counts of open requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import xxhash

from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.messages.io_struct import ControlReqOutput

_MOST_LOAD: Final = 1.25
"""Requests of a group, as a multiple of the mean, up to which a session goes to its own group
(consistent hashing with bounded loads)."""
_CHARS_PER_TOKEN: Final = 4
"""Estimate for texts that are not tokenized yet."""


@dataclass(slots=True)
class _Load:
    """Open requests of a group, and the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


class Place(NamedTuple):
    """The group of a request, and the tokens with which it counts there."""

    dp_rank: int
    tokens: int


_ONLY: Final = Place(0, 0)


class DPGroups:
    """Event loop thread only. `method` is a `--load-balance-method`."""

    def __init__(self, size: int = 1, method: str = "auto") -> None:
        self.size = size
        self._method = method
        self._loads = [_Load() for _ in range(size)]
        self._turn = 0

    def enter(
        self, requests: Sequence[GenerateRequest], prompts: Sequence[TokenArray | None]
    ) -> list[Place]:
        """Choose the group of each request of a body, in which it counts until `leave`. Samples are
        where their prompt is computed. `prompts` has None for a text that is not tokenized yet."""
        if self.size == 1:
            return [_ONLY] * len(requests)
        places: list[Place] = []
        of_prompts: dict[str, int] = {}
        for request, tokens in zip(requests, prompts, strict=True):
            dp_rank = request.dp_rank
            if dp_rank is None:
                dp_rank = of_prompts.get(request.sample_of or "")
            if dp_rank is None:
                dp_rank = self._choose(request)
            of_prompts.setdefault(request.rid, dp_rank)
            place = Place(dp_rank, _num_tokens(request, tokens))
            self._count(place, 1)
            places.append(place)
        return places

    def leave(self, places: Sequence[Place]) -> None:
        """The requests that `enter` has placed have ended."""
        if self.size > 1:
            for place in places:
                self._count(place, -1)

    def _count(self, place: Place, sign: int) -> None:
        load = self._loads[place.dp_rank]
        load.requests += sign
        load.tokens += sign * place.tokens

    def _choose(self, request: GenerateRequest) -> int:
        """Equal loads: the first group, whose cache is the likeliest to have the prompt."""
        if self._method == "round_robin":
            turn, self._turn = self._turn, (self._turn + 1) % self.size
            return turn
        if self._method == "auto" and (own := self._group_of_session(request)) is not None:
            return own
        if self._method == "total_requests":
            return min(range(self.size), key=lambda one: self._loads[one].requests)
        return min(
            range(self.size), key=lambda one: (self._loads[one].tokens, self._loads[one].requests)
        )

    def _group_of_session(self, request: GenerateRequest) -> int | None:
        """The group of the request's session, in which its prefix is; None: there is none, or it
        has more than its share of the load."""
        if request.session_id is None:
            return None
        own = xxhash.xxh3_64_intdigest(request.session_id.encode(errors="surrogatepass"))
        own %= self.size
        total = 1 + sum(load.requests for load in self._loads)
        most = math.ceil(_MOST_LOAD * total / self.size)
        return own if self._loads[own].requests < most else None


def _num_tokens(request: GenerateRequest, tokens: TokenArray | None) -> int:
    """Tokens of a prompt; an estimate if it is not tokenized yet."""
    if tokens is not None:
        return len(tokens)
    return len(request.text or "") // _CHARS_PER_TOKEN


def joined(answers: Sequence[ControlReqOutput]) -> ControlReqOutput:
    """One answer for those of all groups, in order. It is a success if all are. Its data are those
    of the first group; with several groups, `dp_groups` has the data of each."""
    first = answers[0]
    if len(answers) == 1:
        return first
    refusals = [
        f"dp_rank {dp_rank}: {answer.message}"
        for dp_rank, answer in enumerate(answers)
        if not answer.success
    ]
    message = "; ".join(refusals) or first.message
    if 0 < len(refusals) < len(answers):
        message += "; the other groups have done it"
    return ControlReqOutput(
        req_id=first.req_id,
        success=not refusals,
        message=message,
        data={**first.data, "dp_groups": [answer.data for answer in answers]},
    )


_SUMMED: Final = (
    "num_running_reqs", "num_waiting_reqs", "used_tokens", "max_total_num_tokens",
    "max_running_requests",
)  # fmt: skip


def sums_of(states: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The numbers of all DP groups' internal states that can be added, added."""
    return {name: sum(state.get(name, 0) for state in states) for name in _SUMMED}
