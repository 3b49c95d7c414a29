"""Role of a decode server: prompts come from prefill servers, into slots that requests hold."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BootstrapAddr,
    KVPoll,
    KVTransferError,
)
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.control.protocol import MAX_POLLED_ROOMS
from sglang.srt.disaggregation.prefill import room_taken, transfer_lost
from sglang.srt.disaggregation.utils import failure_reasons, poll_and_all_reduce
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.scheduler.policy import AddOutcome, ceil_to_page
from sglang.srt.managers.scheduler.role import Role, TransferUpdate
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.first_token import fake_metadata, mismatch_of
from sglang.srt.messages.io_struct import FinishReason
from sglang.srt.utils.fair_share import is_within_share

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.prefill import PrefillScheduler
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.messages.io_struct import Bootstrap, TokenizedGenerateReqInput

logger = logging.getLogger(__name__)

_UNKNOWN_S: Final = 2.0
"""Seconds for which a room that its prefill server does not know may keep others from being asked
about."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request whose prompt a prefill server computes: it waits for slots, then its prompt is
    read. After its end it stays until no read into its slots is in flight."""

    req: Req
    peer: BootstrapAddr
    """The request's prefill server."""
    arrived: float
    """Time of the arrival, in seconds of the scheduler's ticks."""
    vocab_size: int
    hidden_bytes: int
    """Bytes of the hidden state with which its drafts begin; 0: none comes with the metadata."""
    receiver: BaseKVReceiver
    bootstrap_room: int
    asked: float | None = None
    """Time since which the prefill server is asked about it, in seconds of the scheduler's ticks;
    None: it is not."""
    is_known: bool = False
    """True once the ranks agree that the prefill server has the request."""
    num_tokens: int | None = None
    """Slots that were taken for it and that its output is expected to need; None: it waits for
    slots."""
    newest_load: int = -1
    """The last load from L2 that may fill pages of its prefix; -1: none may."""
    mismatch: str | None = None
    """Why the metadata does not fit the request; "": it does; None: it was not compared yet."""
    ended: float | None = None
    """Time of its end, in seconds of the scheduler's ticks."""

    def poll(self) -> KVPoll:
        """Progress of the receiver, but `Failed` if the metadata does not fit. After the end of the
        request `Success`: no read into its slots is in flight."""
        if self.ended is not None:
            return KVPoll.Success if self.receiver.has_ended else KVPoll.Transferring
        poll = self.receiver.poll()
        if poll != KVPoll.Success:
            return poll
        if self.mismatch is None:
            metadata = self.receiver.metadata
            found = metadata and mismatch_of(
                self.req.spec, metadata, self.vocab_size, self.hidden_bytes
            )
            self.mismatch = found or ""
        return KVPoll.Failed if self.mismatch else poll

    def failure_exception(self) -> NoReturn:
        if self.mismatch:
            raise KVTransferError(self.mismatch)
        self.receiver.failure_exception()


class DecodeRole(Role):
    """Requests whose prompts prefill servers compute.

    A request waits until its prefill server has it, then for slots, then for its prompt; then it
    decodes like any other. A retracted request is computed again on this server, before new ones
    get slots. A request that ends while its prompt is read keeps its slots until no read into them
    is in flight.

    Requests get slots in the order of arrival. A request that waits for slots blocks those behind
    it; otherwise small ones would starve it. A request that its prefill server does not know yet
    blocks none. The prompts of each prefill server may hold a share of the slots
    (`is_within_share`), so a stuck server leaves some to the others. A request that waits for its
    server's share blocks only requests of the same server.

    Each rank reads its own part of a prompt. A request goes on once all ranks have their parts, and
    fails as soon as the part of one rank fails (`poll_and_all_reduce`).

    Args:
        wait_s: Seconds for which a request waits for slots. Prefill servers wait no longer.
        silent_s: Seconds after which reads for ended requests count as stuck.
    """

    def __init__(
        self,
        state: SchedulerState,
        holder: PrefillScheduler,
        kv_manager: BaseKVManager,
        receiver_class: type[BaseKVReceiver],
        wait_s: float,
        silent_s: float,
        group: RankGroup | None = None,
    ) -> None:
        self._state = state
        self._holder = holder
        self._kv_manager = kv_manager
        self._receiver_class = receiver_class
        self._wait_s = wait_s
        self._silent_s = silent_s
        self._group = group or SingleRank()
        self._hidden_bytes = state.pools.req_to_token_pool.hidden_bytes
        self._waiting: dict[str, DecodeRequest] = {}
        """Requests that wait for slots, by id, in order of arrival."""
        self._transferring: dict[str, DecodeRequest] = {}
        self._lingering: list[DecodeRequest] = []
        self._update = TransferUpdate()
        self._owners: dict[int, str] = {}
        self._metrics = state.metrics.of_role(
            DisaggregationMode.DECODE,
            {
                "num_decode_prealloc_queue_reqs": lambda: len(self._waiting),
                "num_decode_transfer_queue_reqs": lambda: len(self._transferring),
                "num_decode_lingering_reqs": lambda: len(self._lingering),
            },
        )
        self._transfers = state.metrics.of_reads((CONTROL, TRANSPORT))

    def on_arrival(self, req: Req) -> FinishReason | None:
        bootstrap = req.spec.bootstrap
        if bootstrap is None:
            return None
        if bootstrap.room in self._owners:
            return room_taken(bootstrap.room)
        self._owners[bootstrap.room] = req.rid
        room, peer, state = bootstrap.room, (bootstrap.host, bootstrap.port), self._state
        receiver = self._receiver_class(self._kv_manager, peer, room)
        self._waiting[req.rid] = DecodeRequest(
            req, peer, state.now, state.vocab_size, self._hidden_bytes, receiver, room
        )
        req.is_computed_elsewhere = True
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        bootstrap = message.bootstrap
        if bootstrap is None:
            return
        if self._waiting.pop(message.rid, None) is not None:
            del self._owners[bootstrap.room]
        self.on_declined(bootstrap, reason.message or "the request was refused")

    def on_declined(self, bootstrap: Bootstrap, reason: str) -> None:
        if bootstrap.room not in self._owners:
            address = bootstrap.host, bootstrap.port
            self._receiver_class(self._kv_manager, address, bootstrap.room).abort(reason)

    def may_compute(self, req: Req) -> bool:
        return req.rid not in self._waiting

    def tick(self) -> TransferUpdate:
        self._update = TransferUpdate()
        self._init_receivers()
        self._poll()
        self._give_up_unknown()
        self._give_slots()
        return self._update

    def _init_receivers(self) -> None:
        unasked = [one for one in self._waiting.values() if one.asked is None]
        if not unasked:
            return
        num_asked = Counter(one.peer for one in self._waiting.values() if one.asked is not None)
        for one in unasked:
            if num_asked[one.peer] < MAX_POLLED_ROOMS and one.req.progress.to_abort is None:
                num_asked[one.peer] += 1
                one.asked = self._state.now
                one.receiver.init()

    def _poll(self) -> None:
        asked = [one for one in self._waiting.values() if one.asked is not None]
        others = [*self._transferring.values(), *self._lingering]
        requests = [*asked, *others]
        polls = poll_and_all_reduce(requests, self._group)
        if KVPoll.Failed in polls:
            self._fail_polled(requests, polls)
        for one, poll in zip(requests, polls, strict=True):
            if one.num_tokens is None:
                one.is_known = poll >= KVPoll.WaitingForInput
            elif poll == KVPoll.Success and one.ended is None:
                if self._has_whole_prefix(one):
                    self._receive(one)
            elif poll == KVPoll.Success:
                self._lingering.remove(one)
                self._update.released.append(one.req)

    def _has_whole_prefix(self, one: DecodeRequest) -> bool:
        """True if no load still fills pages that the steps of a request will read: those of its
        prefix; and pages that another request loads although they were read for this one, because
        the tree keeps those alone."""
        hicache, spec = self._state.hicache, one.req.spec
        if hicache is None:
            return True
        if not hicache.has_settled(one.newest_load):
            return False
        load = hicache.host_load
        return not (
            load.loading
            and load.is_filling(hicache.tree.walk(RadixKey(spec.input_ids, spec.extra_key)))
        )

    def _fail_polled(self, requests: Sequence[DecodeRequest], polls: Sequence[KVPoll]) -> None:
        """Fail the requests whose status is `Failed`. A collective."""
        failed = [one for one, poll in zip(requests, polls, strict=True) if poll == KVPoll.Failed]
        for one, why in zip(failed, failure_reasons(failed, self._group), strict=True):
            self._fail(one, why)

    def _give_up_unknown(self) -> None:
        """Fail requests that the prefill server has not known for a while, if others of the same
        server cannot be asked about. A router that repeats a request because the prefill server
        has refused it leaves a room of each try here, which nobody knows."""
        unasked = Counter(one.peer for one in self._waiting.values() if one.asked is None)
        if not unasked:
            return
        now, failed = self._state.now, {req.rid for req, _ in self._update.ended}
        for rid, one in self._waiting.items():
            if one.asked is None or one.is_known or now - one.asked <= _UNKNOWN_S:
                continue
            if unasked[one.peer] and rid not in failed and one.req.progress.to_abort is None:
                unasked[one.peer] -= 1
                self._fail(one, "the prefill server does not know the request in time")

    def _give_slots(self) -> None:
        if not self._waiting:
            return
        now = self._state.now
        failed = {req.rid for req, _ in self._update.ended}
        waiting = self._state.queues.waiting
        # Retracted requests wait for the slots that are free.
        has_retracted = len(waiting) > len(self._waiting) and any(
            req.progress.output_ids for req in waiting
        )
        blocked: dict[BootstrapAddr, str | None] = {}
        """Prefill servers whose share is used up, with the reason to take no more requests."""
        shares: defaultdict[BootstrapAddr, list[DecodeRequest]] = defaultdict(list)
        """Requests of each prefill server that hold slots for their prompts."""
        for one in (*self._transferring.values(), *self._lingering):
            shares[one.peer].append(one)
        for rid, one in list(self._waiting.items()):
            is_late = now - one.arrived > self._wait_s
            if not (one.is_known or is_late):
                continue
            progress = one.req.progress
            if rid in failed or progress.to_abort is not None:
                continue
            if is_late:
                self._fail(one, self._why_late(one))
                continue
            if has_retracted or progress.grammar_ticket is not None:
                continue
            if self._state.awaits_l3(one.req):
                if self._state.hicache is not None:
                    self._holder.issue_loads(self._state.hicache)
                continue
            share = shares[one.peer]
            # The first prompt of a server may have any share: else a long one would never come.
            if one.peer not in blocked and (not share or self._is_within_share(one.req, share)):
                if not self._hold(one):
                    return
                share.append(one)
                continue
            why = blocked.setdefault(one.peer, self._why_stuck(share))
            if why is not None:
                self._fail(one, why)

    def _why_late(self, one: DecodeRequest) -> str:
        if one.is_known:
            return f"no slots were free for the request within {self._wait_s:.0f} s"
        if one.asked is None:
            return f"{MAX_POLLED_ROOMS} requests before it wait for the same prefill server"
        return f"the prefill server does not know the request within {self._wait_s:.0f} s"

    def _why_stuck(self, share: Sequence[DecodeRequest]) -> str | None:
        """Reason to take no new requests of a prefill server, or None. It is stuck if its share
        holds only reads for requests that ended at least `silent_s` seconds ago."""
        now = self._state.now
        if any(one.ended is None or now - one.ended < self._silent_s for one in share):
            return None
        return (
            f"reads of {len(share)} earlier prompts from the prefill server have not ended for "
            f"{self._silent_s:.0f} s, and hold its share of the slots"
        )

    def _is_within_share(self, req: Req, share: Sequence[DecodeRequest]) -> bool:
        """True if `req` may have slots beside the other prompts of its prefill server."""
        state, queues, page_size = self._state, self._state.queues, self._state.limits.page_size
        free_rows = state.limits.max_running_requests - queues.num_holders
        if not is_within_share(len(share), 1, free_rows):
            return False
        # Counts like `PrefillAdder.plan`: a request within the share finds room.
        free = state.free_tokens() - sum(map(state.reserve_for, queues.holders()))
        need = ceil_to_page(req.progress.num_tokens, page_size) + state.reserve_for(req)
        own = sum(one.num_tokens or 0 for one in share)
        if is_within_share(own, need, free):
            return True
        match = state.tree.match_prefix(
            MatchPrefixParams(req.match_key(), req=req.slots, needs_state=False)
        )
        return is_within_share(own, need - len(match.device_indices), free)

    def _receive(self, one: DecodeRequest) -> None:
        req, receiver = one.req, one.receiver
        first = receiver.metadata or fake_metadata(req.spec, one.vocab_size)
        del self._transferring[req.rid]
        last_hidden = self._state.pools.req_to_token_pool.last_hidden
        if last_hidden is not None and first.hidden is not None:
            last_hidden.write(req.slots.row, first.hidden)
        stages, metric = req.report.stages, receiver.get_transfer_metric()
        stages.queue = (stages.queue or 0.0) + first.queue_seconds
        if first.l3_wait_seconds is not None:
            stages.l3_wait = (stages.l3_wait or 0.0) + first.l3_wait_seconds
        stages.prefill, stages.transfer = first.prefill_seconds, metric.transfer_latency_s
        self._transfers.on_read(
            metric.transfer_total_bytes, metric.transfer_latency_s, metric.aux_bytes
        )
        self._transfers.on_checked(metric.checked)
        self._update.received.append((req, first))

    def _fail(self, one: DecodeRequest, why: str) -> None:
        logger.warning("request %s: %s", one.req.rid, why)
        self._transfers.on_checked(one.receiver.get_transfer_metric().checked)
        self._metrics.on_failure(had_bootstrapped=one.num_tokens is not None)
        self._update.ended.append((one.req, transfer_lost(why)))

    def _hold(self, one: DecodeRequest) -> bool:
        """Give slots to a request and begin to read its prompt. False: there is no room now."""
        req, state, queues = one.req, self._state, self._state.queues
        outcome, num_taken = self._holder.hold(req)
        if outcome is not AddOutcome.ADDED:
            if queues.num_holders == 0 and not state.tree.is_busy():
                message = f"the engine has {state.free_tokens()} token slots, too few for it"
                queues.abort(req, FinishReason(type="abort", message=message, status_code=503))
            return False
        progress, page_size = req.progress, state.limits.page_size
        begin, end = progress.kv_committed_len, progress.num_tokens
        rows = state.pools.req_to_token_pool
        slots = rows.req_to_token[req.slots.row, begin:end:page_size]
        # On a GPU this waits for the step in flight, which is necessary: the step may write to
        # pages that a request gave back meanwhile, and the reads are not queued after it.
        pages = slots.div(page_size, rounding_mode="floor").tolist()
        state_slot = None if rows.mamba_pool is None else rows.state_of(req.slots.row)
        request_row = req.slots.row if rows.request_pools else None
        # The same wait covers the zeroing of states. A recurrent state never comes without pages:
        # the tree gives none of a whole prompt, since its last token has to be computed. A state
        # of the request comes with a recurrent one.
        assert pages or state_slot is None, "the last token of a hybrid's prompt is not cached"
        one.receiver.send_metadata(
            pages,
            state_indices=() if state_slot is None else (state_slot,),
            decode_prefix_len=begin,
            request_row=request_row,
        )
        one.num_tokens = num_taken + state.reserve_for(req)
        if state.hicache is not None:
            one.newest_load = state.hicache.newest_load
        self._transferring[req.rid] = self._waiting.pop(req.rid)
        return True

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        bootstrap = req.spec.bootstrap
        if bootstrap is None or self._owners.get(bootstrap.room) != req.rid:
            return True
        del self._owners[bootstrap.room]
        message = reason.message or "the request has ended"
        if (waiting := self._waiting.pop(req.rid, None)) is not None:
            waiting.receiver.abort(message)
        one = self._transferring.pop(req.rid, None)
        if one is None:
            return True
        one.receiver.abort(message)
        if self._group.size == 1 and one.receiver.has_ended:
            return True
        one.ended = self._state.now
        self._lingering.append(one)
        return False

    def close(self) -> None:
        for one in (*self._transferring.values(), *self._lingering):
            one.receiver.abort("the server is shutting down")
        self._kv_manager.close()
