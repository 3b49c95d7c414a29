"""Role of a prefill server: it holds computed prompts until decode servers have read them."""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVSender, KVPoll
from sglang.srt.disaggregation.base.first_token import FirstToken
from sglang.srt.disaggregation.request_match import prompt_digest, sampling_digest
from sglang.srt.disaggregation.utils import failure_reasons, poll_and_all_reduce
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.role import TransferUpdate
from sglang.srt.observability.disaggregation_metrics import DisaggregationMetrics
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

LOST_STATUS: Final = 503
_SAY_S: Final = 5.0
"""Seconds that a request has waited before the log says so."""
_SHOWN_ROOMS: Final = 8
REMEMBER_S: Final = 60.0
"""Seconds for which a room that has ended is not given to another request."""


class PrefillRole:
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
        state: State of the scheduler.
        kv_manager: This rank's end of the transport.
        sender_class: The senders of that transport.
        wait_s: Seconds for which a request waits until a decode server asks for it.
        group: The ranks.
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
        self._senders: dict[int, BaseKVSender] = {}
        """Senders of requests, by room."""
        self._polled: dict[int, BaseKVSender] = {}
        """Those of them that have not failed."""
        self._unclaimed: dict[int, float] = {}
        """Arrival of the request of each room that was not asked for yet, in seconds of the
        scheduler's ticks; ascending."""
        self._asked: dict[int, float] = {}
        """`time.monotonic()` at which a decode server was found to ask for a room."""
        self._held: dict[str, tuple[Req, FinishReason]] = {}
        """Complete requests by id, each with its finish reason in case of success."""
        self._owners: dict[int, str] = {}
        """Id of each room's request."""
        self._past: dict[int, tuple[BaseKVSender, float]] = {}
        """Senders of rooms that have ended, and their ends in seconds of the scheduler's ticks;
        ascending."""
        self._metrics = DisaggregationMetrics(
            state.metrics.registry,
            {
                "num_prefill_bootstrap_queue_reqs": lambda: len(self._unclaimed),
                "num_prefill_inflight_queue_reqs": lambda: len(self._held),
            },
        )

    def on_arrival(self, req: Req) -> FinishReason | None:
        bootstrap = req.spec.bootstrap
        if bootstrap is None:
            return None
        room = bootstrap.room
        if self._is_taken(room):
            message = f"bootstrap_room {room} belongs to another request: draw one for each request"
            return FinishReason(type="abort", message=message, status_code=400)
        self._senders[room] = self._polled[room] = self._new_sender(bootstrap)
        self._owners[room] = req.rid
        self._unclaimed[room] = self._state.now
        return None

    def _new_sender(self, bootstrap: Bootstrap) -> BaseKVSender:
        address = bootstrap.host, bootstrap.port
        return self._sender_class(self._kv_manager, address, bootstrap.room)

    def _is_taken(self, room: int) -> bool:
        """Whether a request has the room, or had it a moment ago."""
        return room in self._owners or room in self._past

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        bootstrap = message.bootstrap
        if bootstrap is None:
            return
        why = reason.message or "the request was refused"
        if self._owners.get(bootstrap.room) == message.rid:
            self._end_room(bootstrap.room, why)
        else:
            self.on_declined(bootstrap, why)

    def on_declined(self, bootstrap: Bootstrap, reason: str) -> None:
        if not self._is_taken(bootstrap.room):
            self._senders[bootstrap.room] = self._new_sender(bootstrap)
            self._end_room(bootstrap.room, reason)

    def _end_room(self, room: int, why: str) -> None:
        self._owners.pop(room, None)
        self._unclaimed.pop(room, None)
        self._asked.pop(room, None)
        self._polled.pop(room, None)
        sender = self._senders.pop(room)
        sender.abort(why)
        self._past[room] = sender, self._state.now

    def is_remote(self, req: Req) -> bool:
        return False

    def may_compute(self, req: Req) -> bool:
        bootstrap = req.spec.bootstrap
        return bootstrap is None or bootstrap.room not in self._unclaimed

    def on_computed(self, work: PrefillWork) -> None:
        req = work.req
        bootstrap = req.spec.bootstrap
        if bootstrap is None or req.progress.finish_reason is not None:
            return
        page_size = self._state.limits.page_size
        sender = self._senders[bootstrap.room]
        # Only the last page of a prompt may be partial: no other chunk ends within a page.
        row = self._state.pools.req_to_token_pool.req_to_token[req.slots.row]
        slots = row[sender.num_sent * page_size : work.end : page_size]
        sender.send(slots.div(page_size, rounding_mode="floor").tolist())

    def keeps(self, req: Req) -> bool:
        return req.spec.bootstrap is not None

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        bootstrap, spec, progress = req.spec.bootstrap, req.spec, req.progress
        assert bootstrap is not None
        outputs, report = progress.output_ids, req.report
        prefill_seconds = report.stages.prefill
        assert prefill_seconds is not None, "its prompt is computed"
        first_step = report.stage_began - prefill_seconds
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
            queue_seconds=max(0.0, first_step - self._asked.get(bootstrap.room, first_step)),
            prefill_seconds=prefill_seconds,
            state_slot=self._state.pools.req_to_token_pool.state_of(req.slots.row),
        )
        self._held[req.rid] = req, reason or FinishReason(type="length", length=len(outputs))
        self._senders[bootstrap.room].send_aux(first_token)

    def tick(self) -> TransferUpdate:
        now = self._state.now
        while self._past:
            room, (sender, ended) = next(iter(self._past.items()))
            if now - ended <= REMEMBER_S:
                break
            del self._past[room]
            sender.clear()
        update = TransferUpdate(ended=self._poll())
        for room, arrived in self._unclaimed.items():
            if now - arrived <= self._wait_s:
                break
            self._fail_room(room, f"no decode server has asked for it within {self._wait_s:.0f} s")
        if self._unclaimed and self._group.rank == 0:
            self._log_unclaimed()
        return update

    def _poll(self) -> list[tuple[Req, FinishReason]]:
        """Act on what the ranks' senders have seen; return the requests that were read."""
        read: list[tuple[Req, FinishReason]] = []
        senders = list(self._polled.values())
        polls = poll_and_all_reduce(senders, self._group)
        failed = [one for one, poll in zip(senders, polls, strict=True) if poll == KVPoll.Failed]
        for sender, why in zip(failed, failure_reasons(failed, self._group), strict=True):
            self._fail_room(sender.bootstrap_room, why)
        for sender, poll in zip(senders, polls, strict=True):
            room = sender.bootstrap_room
            if poll >= KVPoll.WaitingForInput and self._unclaimed.pop(room, None) is not None:
                self._asked[room] = time.monotonic()
            if poll == KVPoll.Success and (held := self._held.pop(self._owners[room], None)):
                read.append(held)
        return read

    def _log_unclaimed(self) -> None:
        """Log that requests wait until decode servers ask for them."""
        waited = self._state.now - next(iter(self._unclaimed.values()))
        if waited < _SAY_S:
            return
        count = len(self._unclaimed)
        more = f" and {count - _SHOWN_ROOMS} more" if count > _SHOWN_ROOMS else ""
        self._log.warning(
            "unclaimed",
            "%d requests wait until decode servers ask for them, the longest for %.0f of at most "
            "%.0f s: rooms %s%s",
            count,
            waited,
            self._wait_s,
            ", ".join(map(str, islice(self._unclaimed, _SHOWN_ROOMS))),
            more,
        )

    def _fail_room(self, room: int, why: str) -> None:
        self._polled.pop(room, None)
        owner = self._state.queues.find(self._owners.get(room, ""))
        if owner is not None:
            self._fail(owner, room, why)

    def _fail(self, req: Req, room: int, why: str) -> None:
        if req.progress.to_abort is not None:
            return  # Its client has aborted it, or it has failed already.
        logger.warning("request %s, room %d: %s", req.rid, room, why)
        self._metrics.on_failure(had_bootstrapped=room not in self._unclaimed)
        reason = FinishReason(type="abort", message=why, status_code=LOST_STATUS)
        self._state.queues.abort(req, reason)

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        bootstrap = req.spec.bootstrap
        if bootstrap is not None and self._owners.get(bootstrap.room) == req.rid:
            self._held.pop(req.rid, None)
            self._end_room(bootstrap.room, reason.message or "the request has ended")
        # A decode server that still reads learns that it read too late.
        return True

    def close(self) -> None:
        self._kv_manager.close()
