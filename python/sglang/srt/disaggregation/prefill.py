"""The scheduler's part of a prefill server: computed prompts are held until they have been read."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import xxhash

from sglang.srt.disaggregation.common.protocol import FirstToken
from sglang.srt.disaggregation.common.votes import FAILED, Votes
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.observability.disaggregation_metrics import DisaggregationMetrics
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.mem_cache.tree.radix_key import TokenArray
    from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

LOST_STATUS: Final = 503
SURVEY_S: Final = 1.0
"""Seconds between two looks at the requests that no decode server asks for."""
_SAY_S: Final = 5.0
"""Seconds that a request has waited before the log says so."""
_SHOWN_ROOMS: Final = 8
REMEMBER_S: Final = 60.0
"""Seconds for which a room that has ended is not given to another request."""


class RoomVote(IntEnum):
    """Progress of a room as a rank has seen it."""

    FAILED = FAILED
    """The room was given up, or its reader is gone."""
    OPEN = 1
    ASKED = 2
    """A decode server asks for the room."""
    RECEIVED = 3


class Desk(Protocol):
    """The part of `RoomDesk` that prefilling uses."""

    def open(self, room: int) -> None: ...
    def add_pages(self, room: int, pages: Sequence[int]) -> None: ...
    def num_pages(self, room: int) -> int: ...
    def complete(self, room: int, first_token: FirstToken, row: int | None = None) -> None: ...
    def end(self, room: int, failure: str | None = None) -> None: ...
    def forget(self, room: int) -> None: ...
    def take_claimed(self) -> Sequence[int]: ...
    def outcome(self, room: int) -> str | None: ...
    def take_given_up(self) -> Mapping[int, str]: ...
    def unheard_of(self, rooms: Iterable[int], limit_s: float) -> Mapping[int, str]: ...
    def close(self) -> None: ...


def prompt_digest(ids: TokenArray) -> str:
    """The digest of a prompt's token ids."""
    return xxhash.xxh3_64_hexdigest(ids.tobytes())


def sampling_digest(params: SamplingParams) -> str:
    """Digest of the parameters by which the first token may differ from the likeliest; "" if there
    are none.

    A seed that a server has drawn is not included.
    """
    draws = None
    if not params.is_greedy:
        draws = params.temperature, params.top_p, params.top_k, params.min_p, params.sampling_seed
    facts = (
        draws,
        params.min_new_tokens,
        params.repetition_penalty,
        sorted((params.logit_bias or {}).items()),
        (params.json_schema, params.regex, params.ebnf, params.structural_tag),
    )
    if facts == (None, 0, 1.0, [], (None, None, None, None)):
        return ""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(facts))


class PrefillHalf:
    """Requests that a prefill server computes for decode servers.

    A request waits until a decode server asks for it, which then has slots for it. If it were
    computed before, each server's slots could be full of requests that wait for slots of the other.
    Until it asks, the decode server names the request all the time. One that is not named fails
    soon: its decode server has died, or never got it.
    A computed request is held, without decoding, until the decode server has read its pages or is
    gone. A request that the decode server gives up ends in any state.

    Each rank has a desk, which ranks of decode servers ask. The desks' observations count once the
    ranks agree on them (`Votes`): a room is asked for when each rank has been asked, and it has
    been read when each rank's part has.

    Args:
        state: State of the scheduler.
        desk: Answers decode servers.
        wait_s: Seconds for which a request waits until a decode server asks for it.
        unknown_s: Seconds for which it waits until one names it.
        group: The ranks.
        metadata: Rows for the first tokens; None: the desk sends them. If no row is free, a
            computed request is held until one is.
    """

    def __init__(
        self,
        state: SchedulerState,
        desk: Desk,
        wait_s: float,
        unknown_s: float,
        group: RankGroup | None = None,
        metadata: MetadataBuffers | None = None,
    ) -> None:
        self._state = state
        self._desk = desk
        self._wait_s = wait_s
        self._unknown_s = unknown_s
        ranks = group or SingleRank()
        self._is_first = ranks.rank == 0
        """Whether this is the rank that all decode servers name rooms to."""
        self._surveyed = -math.inf
        self._say = RateLimitedLogger(logger)
        self._votes = Votes(ranks)
        """Votes on prompts, by room."""
        self._unclaimed: dict[int, float] = {}
        """Arrival of the request of each room that was not asked for yet, in seconds of the
        scheduler's ticks; ascending."""
        self._asked: dict[int, float] = {}
        """`time.monotonic()` at which a decode server was found to ask for a room."""
        self._held: dict[str, tuple[Req, FinishReason]] = {}
        """Complete requests by id, each with its finish reason in case of success."""
        self._metadata = metadata
        self._rows: dict[int, int] = {}
        """Row of each room that has one."""
        self._rowless: dict[int, FirstToken] = {}
        """First tokens that wait for a row, by room, in order."""
        self._ended: list[tuple[Req, FinishReason]] = []
        self._owners: dict[int, str] = {}
        """Id of each room's request."""
        self._past: dict[int, float] = {}
        """End of each ended room, in seconds of the scheduler's ticks; ascending."""
        self._metrics = DisaggregationMetrics(
            state.metrics.registry,
            {
                "num_prefill_bootstrap_queue_reqs": lambda: len(self._unclaimed),
                "num_prefill_inflight_queue_reqs": lambda: len(self._held),
            },
        )

    def on_arrival(self, req: Req) -> FinishReason | None:
        meeting = req.spec.bootstrap
        if meeting is None:
            return None
        room = meeting.room
        if self._is_taken(room):
            message = f"bootstrap_room {room} belongs to another request: draw one for each request"
            return FinishReason(type="abort", message=message, status_code=400)
        self._desk.open(room)
        self._votes.open(room, RoomVote.OPEN)
        self._owners[room] = req.rid
        self._unclaimed[room] = self._state.now
        return None

    def _is_taken(self, room: int) -> bool:
        """Whether a request has the room, or had it a moment ago."""
        return room in self._owners or room in self._past

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        meeting = message.bootstrap
        if meeting is None:
            return
        why = reason.message or "the request was refused"
        if self._owners.get(meeting.room) == message.rid:
            self._end_room(meeting.room, why)
        else:
            self.on_declined(meeting, why)

    def on_declined(self, meeting: Bootstrap, reason: str) -> None:
        if not self._is_taken(meeting.room):
            self._desk.open(meeting.room)
            self._end_room(meeting.room, reason)

    def _end_room(self, room: int, why: str) -> None:
        self._owners.pop(room, None)
        self._unclaimed.pop(room, None)
        self._asked.pop(room, None)
        self._votes.close(room)
        self._past[room] = self._state.now
        self._desk.end(room, why)
        self._rowless.pop(room, None)
        row = self._rows.pop(room, None)
        if self._metadata is not None and row is not None:
            self._metadata.give_back(row)

    def is_remote(self, req: Req) -> bool:
        return False

    def may_compute(self, req: Req) -> bool:
        meeting = req.spec.bootstrap
        return meeting is None or meeting.room not in self._unclaimed

    def on_computed(self, work: PrefillWork) -> None:
        req = work.req
        meeting = req.spec.bootstrap
        if meeting is None or req.progress.finish_reason is not None:
            return
        page_size = self._state.limits.page_size
        known = self._desk.num_pages(meeting.room) * page_size
        # Only the last page of a prompt may be partial: no other chunk ends within a page.
        row = self._state.pools.req_to_token_pool.req_to_token[req.slots.row]
        slots = row[known : work.end : page_size]
        self._desk.add_pages(meeting.room, slots.div(page_size, rounding_mode="floor").tolist())

    def keeps(self, req: Req) -> bool:
        return req.spec.bootstrap is not None

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        meeting, spec, progress = req.spec.bootstrap, req.spec, req.progress
        assert meeting is not None
        outputs, report = progress.output_ids, req.report
        prefill_seconds = report.stages.prefill
        assert prefill_seconds is not None, "its prompt is computed"
        first_step = report.stage_began - prefill_seconds
        first_token = FirstToken(
            token_id=outputs[0] if outputs else None,
            prompt_len=len(spec.origin_input_ids),
            prompt_digest=prompt_digest(spec.origin_input_ids),
            sampling_digest=sampling_digest(spec.sampling_params),
            logprob=progress.output_logprobs[0] if progress.output_logprobs else None,
            top_logprobs=(
                progress.output_top_logprobs[0] if progress.output_top_logprobs else None
            ),
            cached=report.cached_tokens_details,
            queue_seconds=max(0.0, first_step - self._asked.get(meeting.room, first_step)),
            prefill_seconds=prefill_seconds,
            state_slot=self._state.pools.req_to_token_pool.state_of(req.slots.row),
        )
        self._held[req.rid] = req, reason or FinishReason(type="length", length=len(outputs))
        self._rowless[meeting.room] = first_token
        self._complete()

    def _complete(self) -> None:
        """Give first tokens to the desk, while there are rows for them."""
        for room, first_token in list(self._rowless.items()):
            row = None
            if self._metadata is not None:
                row = self._metadata.take()
                if row is None:
                    return
                if self._metadata.set_buf(row, room, first_token):
                    self._rows[room] = row
                else:
                    self._metadata.give_back(row)
                    row = None
            del self._rowless[room]
            self._desk.complete(room, first_token, row)

    def tick(self) -> None:
        now = self._state.now
        while self._past and now - (oldest := next(iter(self._past.items())))[1] > REMEMBER_S:
            del self._past[oldest[0]]
            self._desk.forget(oldest[0])
        self._complete()
        self._look()
        if self._is_first and self._unclaimed and now - self._surveyed >= SURVEY_S:
            self._surveyed = now
            self._survey()
        for room, vote, why in self._votes.count():
            if vote == RoomVote.FAILED:
                self._fail_room(room, why)
                continue
            if self._unclaimed.pop(room, None) is not None:
                self._asked[room] = time.monotonic()
            if vote == RoomVote.RECEIVED:
                self._ended.append(self._held.pop(self._owners[room]))
        for room, arrived in self._unclaimed.items():
            if now - arrived <= self._wait_s:
                break
            self._fail_room(room, f"no decode server has asked for it within {self._wait_s:.0f} s")

    def _survey(self) -> None:
        """Look at the requests that no decode server asks for yet."""
        for room, why in self._desk.unheard_of(self._unclaimed, self._unknown_s).items():
            self._votes.see(room, RoomVote.FAILED, why)
        rooms = list(self._unclaimed)
        waited = self._state.now - self._unclaimed[rooms[0]]
        if waited < _SAY_S:
            return
        more = f" and {len(rooms) - _SHOWN_ROOMS} more" if len(rooms) > _SHOWN_ROOMS else ""
        self._say.warning(
            "unclaimed",
            "%d requests wait until decode servers ask for them, the longest for %.0f of at most "
            "%.0f s: rooms %s%s",
            len(rooms),
            waited,
            self._wait_s,
            ", ".join(map(str, rooms[:_SHOWN_ROOMS])),
            more,
        )

    def _look(self) -> None:
        """Vote on the observations of this rank's desk."""
        for room in self._desk.take_claimed():
            self._votes.see(room, RoomVote.ASKED)
        for room, why in self._desk.take_given_up().items():
            self._votes.see(room, RoomVote.FAILED, why)
        for req, _ in self._held.values():
            meeting = req.spec.bootstrap
            assert meeting is not None
            failure = self._desk.outcome(meeting.room)
            if failure is not None:
                vote = RoomVote.FAILED if failure else RoomVote.RECEIVED
                self._votes.see(meeting.room, vote, failure)

    def _fail_room(self, room: int, why: str) -> None:
        owner = self._state.queues.find(self._owners.get(room, ""))
        if owner is not None:
            self._fail(owner, room, why)

    def _fail(self, req: Req, room: int, why: str) -> None:
        if req.progress.to_abort is not None:
            return  # Its client has aborted it, or it has failed already.
        logger.warning("request %s, room %d: %s", req.rid, room, why)
        self._metrics.on_failure(had_met=room not in self._unclaimed)
        reason = FinishReason(type="abort", message=why, status_code=LOST_STATUS)
        self._state.queues.abort(req, reason)

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        ended, self._ended = self._ended, []
        return [(req, reason) for req, reason in ended if req.progress.finish_reason is None]

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        return ()

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        meeting = req.spec.bootstrap
        if meeting is not None and self._owners.get(meeting.room) == req.rid:
            self._held.pop(req.rid, None)
            self._end_room(meeting.room, reason.message or "the request has ended")
        # A decode server that still reads learns that it read too late.
        return True

    def take_let_go(self) -> Sequence[Req]:
        return ()

    def close(self) -> None:
        self._desk.close()
