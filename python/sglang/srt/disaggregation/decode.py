"""The scheduler's part of a decode server: prompts come from prefill servers into held slots."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.protocol import MAX_MEETING
from sglang.srt.disaggregation.common.remote_prompt import OwnSlots
from sglang.srt.disaggregation.common.votes import FAILED, Votes
from sglang.srt.disaggregation.decode_shares import Share, is_within_share
from sglang.srt.disaggregation.prefill import LOST_STATUS, prompt_digest, sampling_digest
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
    from sglang.srt.disaggregation.common.protocol import FirstToken
    from sglang.srt.disaggregation.contact import Contact
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

Peer: TypeAlias = tuple[str, int]
"""A prefill server: canonical host and port of its bootstrap server."""


class PromptVote(IntEnum):
    """Progress of a prompt as a rank has seen it."""

    FAILED = FAILED
    ASKED_FOR = 1
    KNOWN = 2
    """The prefill server has the request."""
    COME = 3
    """The whole prompt has come; for a prompt that is not wanted any more: no read into its slots
    is in flight."""


class Prompt(Protocol):
    """A prompt on its way; see `WholePrompt`."""

    @property
    def outcome(self) -> FirstToken | str | None: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def read_seconds(self) -> float: ...
    @property
    def num_bytes_read(self) -> int: ...
    @property
    def metadata_bytes(self) -> Mapping[str, int]: ...
    def cancel(self, reason: str) -> None: ...


class Remote(Protocol):
    """Interface of `PrefillServers` to decoding. No call blocks."""

    def meet(self, meeting: Bootstrap) -> Contact:
        """Begin to ask a prefill server whether it has a request."""

    def take_news(self) -> Sequence[Contact]:
        """Take the contacts whose standing has changed."""

    def begin(self, contact: Contact, own: OwnSlots) -> Prompt:
        """Begin to receive the prompt of a request that the prefill server has; ends `contact`."""

    def decline(self, meeting: Bootstrap, reason: str) -> None:
        """Tell a prefill server that its prompt will not be read."""

    def close(self) -> None:
        """End the threads."""


@dataclass(slots=True)
class _Wanted:
    """A request that waits for slots."""

    req: Req
    peer: Peer
    arrived: float
    """Time of the arrival, in seconds of the scheduler's ticks."""
    number: int = -1
    """Number of the prompt among all that were asked for so far; the same on all ranks."""
    contact: Contact | None = None
    """None: the prefill server is not asked yet."""
    is_known: bool = False
    """Whether the ranks agree that the prefill server has the request."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A request whose prompt is on its way into its slots."""

    number: int
    """See `_Wanted`."""
    req: Req
    peer: Peer
    prompt: Prompt
    num_tokens: int
    """Slots that were taken for it, and that its output is expected to need."""
    ended: float | None = None
    """Time of the request's end, in seconds of the scheduler's ticks; None: it has not ended."""


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
    fails as soon as the part of one rank fails (`Votes`).

    Args:
        state: State of the scheduler.
        holder: Gives slots to requests.
        remote: Receives their prompts.
        wait_s: Seconds for which a request waits for slots. Prefill servers wait no longer.
        silent_s: Seconds after which reads for ended requests count as stuck.
        group: The ranks.
    """

    def __init__(
        self,
        state: SchedulerState,
        holder: Holder,
        remote: Remote,
        wait_s: float,
        silent_s: float,
        group: RankGroup | None = None,
    ) -> None:
        self._state = state
        self._holder = holder
        self._remote = remote
        self._wait_s = wait_s
        self._silent_s = silent_s
        self._wanted: dict[str, _Wanted] = {}
        """Requests that wait for slots, by id, in order of arrival."""
        self._unasked: dict[str, _Wanted] = {}
        """Those of them that no prefill server is asked for yet."""
        self._num_asked_of: Counter[Peer] = Counter()
        """Those that are asked for, by prefill server."""
        self._coming: dict[str, _Coming] = {}
        self._lingering: dict[int, _Coming] = {}
        """Prompts of ended requests that may still be read; by number."""
        self._let_go: list[Req] = []
        self._votes = Votes(group or SingleRank())
        """Votes on prompts, by their number."""
        self._num_asked = 0
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
        meeting = req.spec.bootstrap
        if meeting is None:
            return None
        if meeting.room in self._owners:
            message = f"bootstrap_room {meeting.room} belongs to another request: draw one for each"
            return FinishReason(type="abort", message=message, status_code=400)
        self._owners[meeting.room] = req.rid
        peer = canonical_host(meeting.host), meeting.port
        wanted = _Wanted(req, peer, self._state.now)
        self._wanted[req.rid] = self._unasked[req.rid] = wanted
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        meeting = message.bootstrap
        if meeting is None:
            return
        if self._take_wanted(message.rid) is not None:
            del self._owners[meeting.room]
        self.on_declined(meeting, reason.message or "the request was refused")

    def on_declined(self, meeting: Bootstrap, reason: str) -> None:
        if meeting.room not in self._owners:
            self._remote.decline(meeting, reason)

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
        self._meet()
        self._look()
        self._count()
        self._give_slots()

    def _count(self) -> None:
        """Act on what the ranks agree on."""
        outcomes = self._votes.count()
        if not outcomes:
            return
        wanted = {one.number: one for one in self._wanted.values()}
        coming = {one.number: one for one in self._coming.values()}
        for number, vote, why in outcomes:
            if number in self._lingering:
                self._votes.close(number)
                self._let_go.append(self._lingering.pop(number).req)
            elif vote == PromptVote.FAILED:
                one = wanted.get(number) or coming[number]
                self._fail(one.req, why, had_met=number in coming)
            elif number in wanted:
                wanted[number].is_known = True
            elif vote == PromptVote.COME:
                self._receive(coming[number])

    def _meet(self) -> None:
        """Let prefill servers be asked for the requests that came."""
        for rid, wanted in list(self._unasked.items()):
            req, meeting = wanted.req, wanted.req.spec.bootstrap
            assert meeting is not None
            is_full = self._num_asked_of[wanted.peer] >= MAX_MEETING
            if is_full or req.progress.to_abort is not None:
                continue
            del self._unasked[rid]
            self._num_asked_of[wanted.peer] += 1
            wanted.number, wanted.contact = self._num_asked, self._remote.meet(meeting)
            self._num_asked += 1
            self._votes.open(wanted.number, PromptVote.ASKED_FOR)

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
        blocked: dict[Peer, str | None] = {}
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
                share.add(coming.num_tokens, coming.ended)
                continue
            why = blocked.setdefault(wanted.peer, share.why_stuck(now, self._silent_s))
            if why is not None:
                self._fail(req, why, had_met=False)

    def _why_late(self, wanted: _Wanted) -> str:
        if wanted.is_known:
            return f"no slots were free for the request within {self._wait_s:.0f} s"
        if wanted.contact is None:
            return f"{MAX_MEETING} requests before it wait for the same prefill server"
        return f"the prefill server does not know the request within {self._wait_s:.0f} s"

    def _shares(self) -> Mapping[Peer, Share]:
        """What the prompts on their way from each prefill server hold, those that are not wanted
        any more included."""
        shares: defaultdict[Peer, Share] = defaultdict(Share)
        for coming in (*self._coming.values(), *self._lingering.values()):
            shares[coming.peer].add(coming.num_tokens, coming.ended)
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

    def _look(self) -> None:
        """Vote on the progress of the prompts on this rank."""
        for contact in self._remote.take_news():
            wanted = self._wanted.get(self._owners.get(contact.meeting.room, ""))
            if wanted is None or wanted.contact is not contact:
                continue
            standing = contact.standing
            vote = PromptVote.KNOWN if standing.failure is None else PromptVote.FAILED
            self._votes.see(wanted.number, vote, standing.failure or "")
        for coming in self._coming.values():
            outcome = coming.prompt.outcome
            if outcome is None:
                continue
            failure = outcome if isinstance(outcome, str) else self._why_not(coming.req, outcome)
            vote = PromptVote.COME if failure is None else PromptVote.FAILED
            self._votes.see(coming.number, vote, failure or "")
        for number, coming in self._lingering.items():
            if coming.prompt.has_ended:
                self._votes.see(number, PromptVote.COME)

    def _receive(self, coming: _Coming) -> None:
        req, prompt = coming.req, coming.prompt
        first = prompt.outcome
        assert first is not None and not isinstance(first, str), "it has come"
        self._votes.close(coming.number)
        del self._coming[req.rid]
        stages = req.report.stages
        stages.queue = (stages.queue or 0.0) + first.queue_seconds
        stages.prefill, stages.transfer = first.prefill_seconds, prompt.read_seconds
        self._transfers.on_read(prompt.num_bytes_read, prompt.read_seconds)
        self._transfers.on_metadata(prompt.metadata_bytes)
        self._received.append((req, first))

    def _fail(self, req: Req, why: str, *, had_met: bool) -> None:
        logger.warning("request %s: %s", req.rid, why)
        self._metrics.on_failure(had_met=had_met)
        self._ended.append((req, _lost(why)))

    def _why_not(self, req: Req, first: FirstToken) -> str | None:
        """Reason why `req` cannot go on with the prefill server's result, or None."""
        spec = req.spec
        ids = spec.origin_input_ids
        if first.prompt_len != len(ids) or first.prompt_digest != prompt_digest(ids):
            return (
                f"the prefill server computed another prompt, of {first.prompt_len} tokens: "
                "both servers need the same tokenizer and chat template"
            )
        wants_token = spec.sampling_params.max_new_tokens > 0
        has_token = first.token_id is not None
        num_tops = min(spec.top_logprobs_num, self._state.vocab_size) * spec.return_logprob
        is_unlike = (
            has_token != wants_token
            or (has_token and spec.return_logprob and first.logprob is None)
            or (has_token and len(first.top_logprobs or ()) != num_tops)
            or first.sampling_digest != sampling_digest(spec.sampling_params)
        )
        if is_unlike:
            return "the prefill server was sent another request: sampling or logprobs differ"
        if first.token_id is not None and not 0 <= first.token_id < self._state.vocab_size:
            return f"the prefill server chose token {first.token_id}, which the model does not have"
        return None

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
        contact = wanted.contact
        assert contact is not None, "the prefill server has it"
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
        own = OwnSlots(pages=pages, first_page=begin // page_size, state=state_slot)
        prompt = self._remote.begin(contact, own)
        num_tokens = len(pages) * page_size + state.reserve_for(req)
        coming = _Coming(wanted.number, req, wanted.peer, prompt, num_tokens)
        self._coming[req.rid] = coming
        return coming

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        ended, self._ended = self._ended, []
        return ended

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        received, self._received = self._received, []
        return received

    def on_end(self, req: Req, reason: FinishReason) -> bool:
        meeting = req.spec.bootstrap
        if meeting is None or self._owners.get(meeting.room) != req.rid:
            return True
        del self._owners[meeting.room]
        message = reason.message or "the request has ended"
        if (wanted := self._take_wanted(req.rid)) is not None:
            if wanted.contact is None:
                self._remote.decline(meeting, message)
            else:
                self._votes.close(wanted.number)
                wanted.contact.leave(message)
        coming = self._coming.pop(req.rid, None)
        if coming is None:
            return True
        self._votes.close(coming.number)
        coming.prompt.cancel(message)
        if self._votes.is_alone and coming.prompt.has_ended:
            return True
        self._votes.open(coming.number, PromptVote.ASKED_FOR)
        self._lingering[coming.number] = replace(coming, ended=self._state.now)
        return False

    def take_let_go(self) -> Sequence[Req]:
        let_go, self._let_go = self._let_go, []
        return let_go

    def close(self) -> None:
        for coming in [*self._coming.values(), *self._lingering.values()]:
            coming.prompt.cancel("the server is shutting down")
        self._remote.close()


def _lost(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=LOST_STATUS)
