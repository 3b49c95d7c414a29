"""The scheduler's part of a decode server: prompts come from prefill servers into held slots."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BootstrapAddr,
    KVPoll,
    KVPoller,
    KVTransferError,
)
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.protocol import MAX_POLLED_ROOMS
from sglang.srt.disaggregation.decode_shares import Share, is_within_share
from sglang.srt.disaggregation.prefill import LOST_STATUS
from sglang.srt.disaggregation.request_match import fake_metadata, why_not
from sglang.srt.disaggregation.utils import failure_reasons, poll_and_all_reduce
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.policy import AddOutcome, ceil_to_page
from sglang.srt.mem_cache.tree.base_prefix_cache import MatchPrefixParams
from sglang.srt.observability.disaggregation_metrics import (
    DisaggregationMetrics,
    TransferMetrics,
)
from sglang.srt.utils.network import canonical_host

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.first_token import FirstToken
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wanted:
    """A request that waits for slots."""

    req: Req
    peer: BootstrapAddr
    """Its prefill server, by canonical host."""
    arrived: float
    """Time of the arrival, in seconds of the scheduler's ticks."""
    receiver: BaseKVReceiver | None = None
    """None: the prefill server is not asked yet."""
    is_known: bool = False
    """Whether the ranks agree that the prefill server has the request."""


@dataclass(slots=True)
class _Coming:
    """A request whose prompt is on its way into its slots."""

    req: Req
    peer: BootstrapAddr
    receiver: BaseKVReceiver
    num_tokens: int
    """Slots that were taken for it, and that its output is expected to need."""
    misfit: str | None = None
    """Why the metadata does not fit the request; "": it does; None: it was not there yet."""

    @property
    def bootstrap_room(self) -> int:
        return self.receiver.bootstrap_room

    def poll(self) -> KVPoll:
        """Progress of the receiver; metadata that does not fit is a failure."""
        poll = self.receiver.poll()
        if poll == KVPoll.Success and self.misfit is None:
            return KVPoll.Transferring
        return KVPoll.Failed if self.misfit else poll

    def failure_exception(self) -> NoReturn:
        if self.misfit:
            raise KVTransferError(self.misfit)
        self.receiver.failure_exception()


@dataclass(frozen=True, slots=True)
class _Lingering:
    """A request that has ended, and whose prompt may still be read."""

    coming: _Coming
    ended: float
    """Time of the request's end, in seconds of the scheduler's ticks."""

    @property
    def bootstrap_room(self) -> int:
        return self.coming.bootstrap_room

    def poll(self) -> KVPoll:
        """`Success`: no read into its slots is in flight."""
        return KVPoll.Success if self.coming.receiver.has_ended else KVPoll.Transferring

    def failure_exception(self) -> NoReturn:
        raise AssertionError("it does not fail any more")


class DecodeHalf:
    """Requests whose prompts prefill servers compute.

    A request waits until its prefill server says that it has the request, then for slots, then for
    its prompt; then it decodes like any other. A retracted request is computed again on this
    server, before new ones get slots. A request that ends while its prompt is read keeps its slots
    until no read into them is in flight.

    Slots are given in the order of arrival. A request that waits for them blocks those behind it,
    so that small ones do not starve it. Requests that prefill servers do not know yet block none.
    Slots for prompts on their way are shared among the prefill servers (`is_within_share`), so that
    one that is stuck leaves some to the others. A request that waits for its server's share blocks
    only those of the same server.

    Each rank reads its own part of a prompt. A request goes on once all ranks have their parts, and
    fails as soon as the part of one rank fails (`poll_and_all_reduce`).

    Args:
        state: State of the scheduler.
        holder: Gives slots to requests.
        kv_manager: This rank's end of the transport.
        receiver_class: The receivers of that transport.
        wait_s: Seconds for which a request waits for slots. Prefill servers wait no longer.
        silent_s: Seconds after which reads for ended requests count as stuck.
        group: The ranks.
    """

    def __init__(
        self,
        state: SchedulerState,
        holder: Holder,
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
        self._wanted: dict[str, _Wanted] = {}
        """Requests that wait for slots, by id, in order of arrival."""
        self._unasked: dict[str, _Wanted] = {}
        """Waiting requests that no prefill server was asked about yet."""
        self._num_asked_of: Counter[BootstrapAddr] = Counter()
        """Number of waiting requests that each prefill server was asked about."""
        self._coming: dict[str, _Coming] = {}
        self._lingering: list[_Lingering] = []
        self._let_go: list[Req] = []
        self._ended: list[tuple[Req, FinishReason]] = []
        self._received: list[tuple[Req, FirstToken]] = []
        self._owners: dict[int, str] = {}
        """Id of the request that has a room, by room."""
        registry = state.metrics.registry
        self._metrics = DisaggregationMetrics(
            registry,
            {
                "num_decode_prealloc_queue_reqs": lambda: len(self._wanted),
                "num_decode_transfer_queue_reqs": lambda: len(self._coming),
                "num_decode_lingering_reqs": lambda: len(self._lingering),
            },
        )
        self._transfers = TransferMetrics(registry, (CONTROL, TRANSPORT))

    def on_arrival(self, req: Req) -> FinishReason | None:
        bootstrap = req.spec.bootstrap
        if bootstrap is None:
            return None
        if bootstrap.room in self._owners:
            message = (
                f"bootstrap_room {bootstrap.room} belongs to another request: draw one for each"
            )
            return FinishReason(type="abort", message=message, status_code=400)
        self._owners[bootstrap.room] = req.rid
        peer = canonical_host(bootstrap.host), bootstrap.port
        wanted = _Wanted(req, peer, self._state.now)
        self._wanted[req.rid] = self._unasked[req.rid] = wanted
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        bootstrap = message.bootstrap
        if bootstrap is None:
            return
        if self._take_wanted(message.rid) is not None:
            del self._owners[bootstrap.room]
        self.on_declined(bootstrap, reason.message or "the request was refused")

    def on_declined(self, bootstrap: Bootstrap, reason: str) -> None:
        if bootstrap.room not in self._owners:
            self._new_receiver(bootstrap).abort(reason)

    def _new_receiver(self, bootstrap: Bootstrap) -> BaseKVReceiver:
        address = bootstrap.host, bootstrap.port
        return self._receiver_class(self._kv_manager, address, bootstrap.room)

    def is_remote(self, req: Req) -> bool:
        return req.rid in self._wanted

    def may_compute(self, req: Req) -> bool:
        return req.rid not in self._wanted

    def on_computed(self, work: PrefillWork) -> None:
        pass

    def keeps(self, req: Req) -> bool:
        return False

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        raise AssertionError("a decode server hands nothing over")

    def tick(self) -> None:
        self._init_receivers()
        self._poll()
        self._give_slots()

    def _init_receivers(self) -> None:
        """Let prefill servers be asked for the requests that came."""
        for rid, wanted in list(self._unasked.items()):
            req, bootstrap = wanted.req, wanted.req.spec.bootstrap
            assert bootstrap is not None
            is_full = self._num_asked_of[wanted.peer] >= MAX_POLLED_ROOMS
            if is_full or req.progress.to_abort is not None:
                continue
            del self._unasked[rid]
            self._num_asked_of[wanted.peer] += 1
            wanted.receiver = self._new_receiver(bootstrap)
            wanted.receiver.init()

    def _poll(self) -> None:
        """Act on what the ranks' receivers have seen."""
        asked = [(one, one.receiver) for one in self._wanted.values() if one.receiver is not None]
        coming = list(self._coming.values())
        for one in coming:
            self._compare(one)
        pollers: list[KVPoller] = [receiver for _, receiver in asked]
        pollers += [*coming, *self._lingering]
        polls = poll_and_all_reduce(pollers, self._group)
        failed = [one for one, poll in zip(pollers, polls, strict=True) if poll == KVPoll.Failed]
        reasons = failure_reasons(failed, self._group)
        why = {id(one): reason for one, reason in zip(failed, reasons, strict=True)}
        outcomes = iter(polls)
        for wanted, receiver in asked:
            if (poll := next(outcomes)) == KVPoll.Failed:
                self._fail(wanted.req, why[id(receiver)], had_met=False)
            else:
                wanted.is_known = poll >= KVPoll.WaitingForInput
        for one in coming:
            if (poll := next(outcomes)) == KVPoll.Failed:
                self._fail(one.req, why[id(one)], had_met=True)
            elif poll == KVPoll.Success:
                self._receive(one)
        lingering, self._lingering = self._lingering, []
        for lingers, poll in zip(lingering, outcomes, strict=True):
            if poll == KVPoll.Success:
                self._let_go.append(lingers.coming.req)
            else:
                self._lingering.append(lingers)

    def _compare(self, coming: _Coming) -> None:
        """Compare what a prefill server has found with the request, once it is there."""
        if coming.misfit is None and coming.receiver.poll() == KVPoll.Success:
            metadata = coming.receiver.metadata
            coming.misfit = (
                metadata and why_not(coming.req.spec, metadata, self._state.vocab_size)
            ) or ""

    def _take_wanted(self, rid: str) -> _Wanted | None:
        wanted = self._wanted.pop(rid, None)
        if wanted is not None and self._unasked.pop(rid, None) is None:
            self._num_asked_of[wanted.peer] -= 1
            if not self._num_asked_of[wanted.peer]:
                del self._num_asked_of[wanted.peer]
        return wanted

    def _give_slots(self) -> None:
        """Give slots to the requests whose turn it is."""
        now = self._state.now
        failed = {req.rid for req, _ in self._ended}
        has_retracted = self._has_retracted()  # They wait for the slots that are free.
        blocked: dict[BootstrapAddr, str | None] = {}
        """Prefill servers whose share is used up, with the reason to take no more requests."""
        shares = self._shares()
        for rid, wanted in list(self._wanted.items()):
            req = wanted.req
            if rid in failed or req.progress.to_abort is not None:
                continue
            if now - wanted.arrived > self._wait_s:
                self._fail(req, self._why_late(wanted), had_met=False)
                continue
            is_ready = wanted.is_known and req.progress.grammar_ticket is None
            if has_retracted or not is_ready:
                continue
            share = shares[wanted.peer]
            if wanted.peer not in blocked and self._is_within_share(req, share):
                if (coming := self._hold(wanted)) is None:
                    return
                share.add(coming.num_tokens, None)
                continue
            why = blocked.setdefault(wanted.peer, share.why_stuck(now, self._silent_s))
            if why is not None:
                self._fail(req, why, had_met=False)

    def _why_late(self, wanted: _Wanted) -> str:
        if wanted.is_known:
            return f"no slots were free for the request within {self._wait_s:.0f} s"
        if wanted.receiver is None:
            return f"{MAX_POLLED_ROOMS} requests before it wait for the same prefill server"
        return f"the prefill server does not know the request within {self._wait_s:.0f} s"

    def _shares(self) -> Mapping[BootstrapAddr, Share]:
        """What the prompts on their way from each prefill server hold, those that are not wanted
        any more included."""
        shares: defaultdict[BootstrapAddr, Share] = defaultdict(Share)
        for coming in self._coming.values():
            shares[coming.peer].add(coming.num_tokens, None)
        for one in self._lingering:
            shares[one.coming.peer].add(one.coming.num_tokens, one.ended)
        return shares

    def _is_within_share(self, req: Req, share: Share) -> bool:
        """Whether `req` may have slots beside the other prompts of its prefill server."""
        state, queues, page_size = self._state, self._state.queues, self._state.limits.page_size
        if not share.num_requests:
            return True  # Otherwise a long prompt would never come.
        free_rows = state.limits.max_running_requests - queues.num_holders
        if not is_within_share(share.num_requests, 1, free_rows):
            return False
        # As `PrefillAdder.plan` counts, so that what is within the share finds room.
        free = state.free_tokens() - sum(map(state.reserve_for, queues.holders()))
        need = ceil_to_page(req.progress.num_tokens, page_size) + state.reserve_for(req)
        if is_within_share(share.num_tokens, need, free):
            return True
        match = state.tree.match_prefix(MatchPrefixParams(req.match_key(), req=req.slots))
        need -= len(match.device_indices)
        return is_within_share(share.num_tokens, need, free)

    def _has_retracted(self) -> bool:
        """Whether any waiting request has decoded already."""
        waiting = self._state.queues.waiting
        return len(waiting) > len(self._wanted) and any(req.progress.output_ids for req in waiting)

    def _receive(self, coming: _Coming) -> None:
        req, receiver = coming.req, coming.receiver
        first = receiver.metadata or fake_metadata(req.spec, self._state.vocab_size)
        del self._coming[req.rid]
        stages, metric = req.report.stages, receiver.get_transfer_metric()
        stages.queue = (stages.queue or 0.0) + first.queue_seconds
        stages.prefill, stages.transfer = first.prefill_seconds, metric.transfer_latency_s
        self._transfers.on_read(metric.transfer_total_bytes, metric.transfer_latency_s)
        self._transfers.on_metadata(metric.aux_bytes)
        self._received.append((req, first))

    def _fail(self, req: Req, why: str, *, had_met: bool) -> None:
        logger.warning("request %s: %s", req.rid, why)
        self._metrics.on_failure(had_met=had_met)
        self._ended.append((req, _lost(why)))

    def _hold(self, wanted: _Wanted) -> _Coming | None:
        """Give slots to a request and begin to receive its prompt. None: there is no room now."""
        req, state, queues = wanted.req, self._state, self._state.queues
        outcome = self._holder.hold(req)
        if outcome is not AddOutcome.ADDED:
            if queues.num_holders == 0 and not state.tree.is_busy():
                message = f"the engine has {state.free_tokens()} token slots, too few for it"
                reason = FinishReason(type="abort", message=message, status_code=503)
                queues.abort(req, reason)
            return None
        receiver = wanted.receiver
        assert receiver is not None, "the prefill server has it"
        self._take_wanted(req.rid)
        progress, page_size = req.progress, state.limits.page_size
        begin, end = progress.kv_committed_len, progress.num_tokens
        row = state.pools.req_to_token_pool.req_to_token[req.slots.row]
        slots = row[begin:end:page_size]
        # On a GPU this waits for the step in flight, which is necessary: the step may write to
        # pages that a request gave back meanwhile, and the reads are not queued after it.
        pages = slots.div(page_size, rounding_mode="floor").tolist()
        state_slot = state.pools.req_to_token_pool.state_of(req.slots.row)
        # The same wait covers the zeroing of a recurrent state, which never comes without pages:
        # the tree gives no state of a whole prompt, since its last token has to be computed.
        assert pages or state_slot is None, "the last token of a hybrid's prompt is not cached"
        receiver.send_metadata(
            pages,
            state_indices=() if state_slot is None else (state_slot,),
            decode_prefix_len=begin,
        )
        num_tokens = len(pages) * page_size + state.reserve_for(req)
        coming = self._coming[req.rid] = _Coming(req, wanted.peer, receiver, num_tokens)
        return coming

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        ended, self._ended = self._ended, []
        return ended

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        received, self._received = self._received, []
        return received

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        bootstrap = req.spec.bootstrap
        if bootstrap is None or self._owners.get(bootstrap.room) != req.rid:
            return True
        del self._owners[bootstrap.room]
        message = reason.message or "the request has ended"
        if (wanted := self._take_wanted(req.rid)) is not None:
            (wanted.receiver or self._new_receiver(bootstrap)).abort(message)
        coming = self._coming.pop(req.rid, None)
        if coming is None:
            return True
        coming.receiver.abort(message)
        if self._group.size == 1 and coming.receiver.has_ended:
            return True
        self._lingering.append(_Lingering(coming, self._state.now))
        return False

    def take_let_go(self) -> Sequence[Req]:
        let_go, self._let_go = self._let_go, []
        return let_go

    def close(self) -> None:
        for coming in [*self._coming.values(), *(one.coming for one in self._lingering)]:
            coming.receiver.abort("the server is shutting down")
        self._kv_manager.close()


def _lost(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=LOST_STATUS)
