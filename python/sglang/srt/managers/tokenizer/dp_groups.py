"""Chooses a DP group for each request, and joins what several groups answer.

A DP group is a scheduler with ranks, requests and a cache of its own. A server has
`--attn-dp-size` of them. Pure, but for the counts of open requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.constants import FOLLOW_ROOM
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import ControlReqOutput, HeldPagesReport

_MOST_LOAD: Final = 1.25
"""Requests of a group, as a multiple of the mean, up to which it gets requests for the sake of its
cache (consistent hashing with bounded loads)."""
_MORE_LOAD: Final = 4
"""Requests above that which a group may have for its prefixes: so few more cost its steps
little."""
_OWN_WEIGHT: Final = 3
"""Weight of the tokens that a request would add, beside tokens that others wait for: a second copy
of a prefix also takes room that other prefixes lose. Simulated in
benchmark/results/2026-11-29-dp-balance.md."""


@dataclass(slots=True)
class _Load:
    """A group's open requests."""

    requests: int = 0
    tokens: int = 0
    """Tokens of their prompts."""
    uncomputed: int = 0
    """Tokens that the group's cache lacked when they came; those of prompts without an output."""


@dataclass(slots=True)
class Place:
    """The group of a request, and the tokens with which it counts there."""

    dp_rank: int = 0
    tokens: int = 0
    uncomputed: int = 0
    room: int | None = None
    """Its room, on a prefill or decode server."""


_ONLY: Final = Place()
"""The place of every request of a server with one group."""


class DPGroups:
    """Event loop thread only. `method` is a `--load-balance-method`. `prefixes` has the groups'
    pages; None: requests are not placed by prefix."""

    def __init__(
        self, size: int = 1, method: str = "auto", prefixes: GroupPrefixes | None = None
    ) -> None:
        self.size = size
        self._prefixes = prefixes
        self._method = method
        self._loads = [_Load() for _ in range(size)]
        self._turn = 0
        self._rooms: dict[int, Place] = {}
        """The first open request of each room. Only its group can refuse further ones."""

    def enter(self, request: GenerateRequest, tokens: TokenArray, of_body: dict[str, int]) -> Place:
        """Choose the group of a request, in which it counts until `leave`. `of_body` has the groups
        of the body's prompts so far: samples are where their prompt is computed."""
        if self.size == 1:
            return _ONLY
        prompt = request.sample_of or request.rid
        room = None if request.bootstrap is None else request.bootstrap.room
        dp_rank = of_body.get(prompt)
        if dp_rank is None and room in self._rooms:
            dp_rank = self._rooms[room].dp_rank
        if dp_rank is not None:
            place = Place(dp_rank, len(tokens))
        else:
            place = self._place(request, tokens)
            of_body[prompt] = place.dp_rank
        if room is not None:
            place.room = room
            self._rooms.setdefault(room, place)
        load = self._loads[place.dp_rank]
        load.requests += 1
        load.tokens += place.tokens
        load.uncomputed += place.uncomputed
        return place

    def of_room(self, room: int) -> int:
        """The group that has an open request with the room; if there is none, the first group."""
        place = self._rooms.get(room)
        return 0 if place is None else place.dp_rank

    def note_pages(self, report: HeldPagesReport) -> None:
        """A group's scheduler says how its cache has changed."""
        if self._prefixes is not None:
            self._prefixes.apply(report)

    def computed(self, place: Place) -> None:
        """The prompt of the request in `place` has been computed."""
        self._loads[place.dp_rank].uncomputed -= place.uncomputed
        place.uncomputed = 0

    def leave(self, place: Place) -> None:
        """The request that `enter` has placed has ended."""
        if self.size == 1:
            return
        self.computed(place)
        if place.room is not None and self._rooms.get(place.room) is place:
            del self._rooms[place.room]
        load = self._loads[place.dp_rank]
        load.requests -= 1
        load.tokens -= place.tokens

    def _place(self, request: GenerateRequest, tokens: TokenArray) -> Place:
        """Equal loads: the first group, whose cache is the likeliest to have the prompt."""
        new = [len(tokens)] * self.size
        if self._prefixes is not None:
            key = combine_extra_key(request.extra_key, request.cache_salt)
            new = [len(tokens) - had for had in self._prefixes.lengths(tokens, key)]
        dp_rank = request.dp_rank
        if dp_rank is None and self._method == FOLLOW_ROOM and request.bootstrap is not None:
            dp_rank = request.bootstrap.room % self.size
        elif dp_rank is None:
            dp_rank = self._choose(new)
        return Place(dp_rank, len(tokens), new[dp_rank])

    def _choose(self, new: Sequence[int]) -> int:
        """`new` are the tokens of the prompt that each group would have to compute."""
        loads, groups = self._loads, range(self.size)
        if self._method == "round_robin":
            turn, self._turn = self._turn, (self._turn + 1) % self.size
            return turn
        if self._method == "total_requests":
            return min(groups, key=lambda one: loads[one].requests)
        if self._method == "total_tokens":
            return min(groups, key=lambda one: (loads[one].tokens, loads[one].requests))
        share = _MOST_LOAD * (1 + sum(load.requests for load in loads)) / self.size
        return min(
            (one for one in groups if loads[one].requests < share + _MORE_LOAD),
            key=lambda one: (
                loads[one].uncomputed + _OWN_WEIGHT * new[one],
                loads[one].requests,
            ),
        )


def joined(answers: Sequence[ControlReqOutput], *, is_question: bool = False) -> ControlReqOutput:
    """One answer for those of all groups, in order. It is a success if all are. Its data are those
    of the first group; with several groups, `dp_groups` has the data of each. `is_question`: no
    group has done anything."""
    first = answers[0]
    if len(answers) == 1:
        return first
    refusals = [
        f"dp_rank {dp_rank}: {answer.message}"
        for dp_rank, answer in enumerate(answers)
        if not answer.success
    ]
    message = "; ".join(refusals) or first.message
    if 0 < len(refusals) < len(answers) and not is_question:
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
