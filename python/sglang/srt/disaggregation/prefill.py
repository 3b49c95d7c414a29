"""Role of a prefill server: it holds computed prompts until decode servers have read them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVSender, KVPoll
from sglang.srt.disaggregation.utils import failure_reasons, poll_and_all_reduce
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.scheduler.role import Role, TransferUpdate
from sglang.srt.messages.first_token import FirstToken, prompt_digest, sampling_digest
from sglang.srt.messages.io_struct import FinishReason
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.messages.io_struct import Bootstrap, TokenizedGenerateReqInput

logger = logging.getLogger(__name__)

_LOG_AFTER_S: Final = 5.0
"""Seconds that a request has waited before the log says so."""
_SHOWN_ROOMS: Final = 8
REMEMBER_S: Final = 60.0
"""Seconds for which a room that has ended is not given to another request."""


def room_taken(room: int) -> FinishReason:
    """The end of a request whose room another request has."""
    message = f"bootstrap_room {room} belongs to another request: draw one for each request"
    return FinishReason(type="abort", message=message, status_code=400)


def transfer_lost(why: str) -> FinishReason:
    """The end of a request whose other server is lost, or has failed it."""
    return FinishReason(type="abort", message=why, status_code=503)


@dataclass(slots=True, eq=False)
class PrefillRoom:
    """The room of a request, from the request's arrival until another request may have the room."""

    sender: BaseKVSender
    arrived: float
    """Time of the request's arrival, in seconds of the scheduler's ticks."""
    rid: str = ""
    """Id of the request; "": it was refused before it came here."""
    asked: float | None = None
    """`time.monotonic()` at which a decode server was found to ask for it; None: none asks yet."""
    has_failed: bool = False
    held: tuple[Req, FinishReason] | None = None
    """The request with its finish reason in case of success, once its prompt is computed and until
    it has been read."""
    ended: float = 0.0
    """Time of the request's end, in seconds of the scheduler's ticks."""


class PrefillRole(Role):
    """Requests that a prefill server computes for decode servers.

    A request waits until a decode server asks for it and so has slots for it. If prompts were
    computed earlier, each server's slots could fill with requests that wait for slots of the other.
    Until a decode server asks for a request, it names the request in every poll. A request that is
    not named fails soon: its decode server has died, or never got it. A computed request is held,
    without decoding, until the decode server has read its pages or is gone. A request that the
    decode server gives up ends in any state.

    Each rank has a sender for each request, and the ranks agree on the status of their senders
    (`poll_and_all_reduce`): a decode server asks for a prompt once it has asked each rank, and has
    read it once it has read each rank's part.

    Args:
        wait_s: Seconds for which a request waits until a decode server asks for it.
    """

    def __init__(
        self,
        state: SchedulerState,
        kv_manager: BaseKVManager,
        sender_class: type[BaseKVSender],
        wait_s: float,
        group: RankGroup | None = None,
    ) -> None:
        self._state = state
        self._kv_manager = kv_manager
        self._sender_class = sender_class
        self._wait_s = wait_s
        self._group = group or SingleRank()
        self._log = RateLimitedLogger(logger)
        self._rooms: dict[int, PrefillRoom] = {}
        """Rooms of requests that have not ended, by number, in order of arrival."""
        self._past: dict[int, PrefillRoom] = {}
        """Rooms that have ended, by number, in order of their ends."""
        self._metrics = state.metrics.of_role(
            DisaggregationMode.PREFILL,
            {
                "num_prefill_bootstrap_queue_reqs": lambda: len(self._unclaimed()),
                "num_prefill_inflight_queue_reqs": lambda: sum(
                    room.held is not None for room in self._rooms.values()
                ),
            },
        )

    def _unclaimed(self) -> list[int]:
        return [number for number, room in self._rooms.items() if room.asked is None]

    def on_arrival(self, req: Req) -> FinishReason | None:
        bootstrap = req.spec.bootstrap
        if bootstrap is None:
            return None
        room = self._open_room(bootstrap, req.rid)
        if room is None:
            return room_taken(bootstrap.room)
        self._rooms[bootstrap.room] = room
        req.decodes_elsewhere = True
        return None

    def _open_room(self, bootstrap: Bootstrap, rid: str = "") -> PrefillRoom | None:
        """A room for request `rid`; None: another request has the room."""
        number = bootstrap.room
        if number in self._rooms or number in self._past:
            return None
        sender = self._sender_class(self._kv_manager, (bootstrap.host, bootstrap.port), number)
        return PrefillRoom(sender, self._state.now, rid)

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        bootstrap = message.bootstrap
        if bootstrap is None:
            return
        why = reason.message or "the request was refused"
        room = self._rooms.get(bootstrap.room)
        if room is not None and room.rid == message.rid:
            self._end_room(room, why)
        else:
            self.on_declined(bootstrap, why)

    def on_declined(self, bootstrap: Bootstrap, reason: str) -> None:
        room = self._open_room(bootstrap)
        if room is not None:
            self._end_room(room, reason)

    def _end_room(self, room: PrefillRoom, why: str) -> None:
        number = room.sender.bootstrap_room
        self._rooms.pop(number, None)
        room.sender.abort(why)
        room.held, room.ended = None, self._state.now
        self._past[number] = room

    def may_compute(self, req: Req) -> bool:
        bootstrap = req.spec.bootstrap
        room = None if bootstrap is None else self._rooms.get(bootstrap.room)
        return room is None or room.asked is not None

    def on_computed(self, work: PrefillWork) -> None:
        req = work.req
        bootstrap = req.spec.bootstrap
        if bootstrap is None or req.progress.finish_reason is not None:
            return
        page_size = self._state.limits.page_size
        sender = self._rooms[bootstrap.room].sender
        # Only the last page of a prompt may be partial: no other chunk ends within a page.
        row = self._state.pools.req_to_token_pool.req_to_token[req.slots.row]
        slots = row[sender.num_sent * page_size : work.end : page_size]
        sender.send(slots.div(page_size, rounding_mode="floor").tolist())

    def is_read(self, req: Req) -> bool:
        bootstrap = req.spec.bootstrap
        return bootstrap is not None and self._rooms[bootstrap.room].sender.num_sent > 0

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        bootstrap, spec, progress = req.spec.bootstrap, req.spec, req.progress
        assert bootstrap is not None
        room = self._rooms[bootstrap.room]
        outputs, report = progress.output_ids, req.report
        prefill_seconds = report.stages.prefill
        assert prefill_seconds is not None, "its prompt is computed"
        first_step = report.stage_began - prefill_seconds
        cache_report = None
        if report.cache is not None and spec.return_cache_report:
            # Times are this machine's.
            cache_report = msgspec.structs.replace(report.cache, spans=None)
        rows = self._state.pools.req_to_token_pool
        first_token = FirstToken(
            token_id=outputs[0] if outputs else None,
            prompt_len=len(spec.input_ids),
            prompt_digest=prompt_digest(spec.input_ids),
            sampling_digest=sampling_digest(spec.sampling_params),
            logprob=progress.output_logprobs[0] if progress.output_logprobs else None,
            top_logprobs=(
                progress.output_top_logprobs[0] if progress.output_top_logprobs else None
            ),
            cached=report.cached_tokens_details,
            cache_report=cache_report,
            queue_seconds=0.0 if room.asked is None else max(0.0, first_step - room.asked),
            l3_wait_seconds=report.stages.l3_wait,
            prefill_seconds=prefill_seconds,
            state_slot=None if rows.mamba_pool is None else rows.state_of(req.slots.row),
            request_row=req.slots.row if rows.request_pools else None,
            hidden=None if rows.last_hidden is None else rows.last_hidden.read(req.slots.row),
        )
        room.held = req, reason or FinishReason(type="length", length=len(outputs))
        room.sender.send_aux(first_token)

    def tick(self) -> TransferUpdate:
        now = self._state.now
        while self._past:
            number, room = next(iter(self._past.items()))
            if now - room.ended <= REMEMBER_S:
                break
            del self._past[number]
            room.sender.clear()
        update = TransferUpdate(ended=self._poll())
        for room in self._rooms.values():
            if now - room.arrived <= self._wait_s:
                break
            if room.asked is None and not room.has_failed:
                self._fail(room, f"no decode server has asked for it within {self._wait_s:.0f} s")
        if self._group.rank == 0:
            self._log_unclaimed()
        return update

    def _poll(self) -> list[tuple[Req, FinishReason]]:
        """Act on the status that the ranks agree on; return the requests that were read."""
        rooms = [room for room in self._rooms.values() if not room.has_failed]
        polls = poll_and_all_reduce([room.sender for room in rooms], self._group)
        if KVPoll.Failed in polls:
            failed = [one for one, poll in zip(rooms, polls, strict=True) if poll == KVPoll.Failed]
            reasons = failure_reasons([room.sender for room in failed], self._group)
            for room, why in zip(failed, reasons, strict=True):
                self._fail(room, why)
        read: list[tuple[Req, FinishReason]] = []
        for room, poll in zip(rooms, polls, strict=True):
            if room.asked is None and poll >= KVPoll.WaitingForInput:
                room.asked = time.monotonic()
            if poll == KVPoll.Success and room.held is not None:
                read.append(room.held)
                room.held = None
        return read

    def _log_unclaimed(self) -> None:
        first = next((room for room in self._rooms.values() if room.asked is None), None)
        if first is None or (waited := self._state.now - first.arrived) < _LOG_AFTER_S:
            return
        if self._log.suppresses(logging.WARNING, "unclaimed"):
            return
        unclaimed = self._unclaimed()
        count = len(unclaimed)
        more = f" and {count - _SHOWN_ROOMS} more" if count > _SHOWN_ROOMS else ""
        self._log.warning(
            "unclaimed",
            "%d requests wait until decode servers ask for them, the longest for %.0f s: "
            "rooms %s%s",
            count,
            waited,
            ", ".join(map(str, unclaimed[:_SHOWN_ROOMS])),
            more,
        )

    def _fail(self, room: PrefillRoom, why: str) -> None:
        room.has_failed = True
        req = self._state.queues.find(room.rid)
        if req is None or req.progress.to_abort is not None:
            return  # The client has aborted the request.
        logger.warning("request %s, room %d: %s", req.rid, room.sender.bootstrap_room, why)
        self._metrics.on_failure(had_bootstrapped=room.asked is not None)
        self._state.queues.abort(req, transfer_lost(why))

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        bootstrap = req.spec.bootstrap
        room = None if bootstrap is None else self._rooms.get(bootstrap.room)
        if room is not None and room.rid == req.rid:
            self._end_room(room, reason.message or "the request has ended")
        # A decode server that still reads learns that it read too late.
        return True

    def close(self) -> None:
        self._kv_manager.close()
