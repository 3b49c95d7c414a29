"""The scheduler's part of a decode server: prompts come from prefill servers into held slots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT
from sglang.srt.disaggregation.common.remote_prompt import OwnSlots
from sglang.srt.disaggregation.common.votes import FAILED, Votes
from sglang.srt.disaggregation.prefill import LOST_STATUS, prompt_digest, sampling_digest
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.policy import AddOutcome
from sglang.srt.observability.disaggregation_metrics import (
    DisaggregationMetrics,
    TransferMetrics,
)

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.protocol import FirstToken
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class PromptVote(IntEnum):
    """Progress of a prompt as a rank has seen it."""

    FAILED = FAILED
    COMING = 1
    COME = 2
    """The whole prompt has come; for a prompt that is not wanted any more: no read into its slots
    is in flight."""


class Prompt(Protocol):
    """A prompt on its way; see `WholePrompt`."""

    @property
    def outcome(self) -> FirstToken | str | None: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def has_met(self) -> bool: ...
    @property
    def read_seconds(self) -> float: ...
    @property
    def num_bytes_read(self) -> int: ...
    @property
    def metadata_bytes(self) -> Mapping[str, int]: ...
    def cancel(self, reason: str) -> None: ...


class Remote(Protocol):
    """Interface of `PrefillServers` to decoding. No call blocks."""

    def begin(self, meeting: Bootstrap, own: OwnSlots) -> Prompt:
        """Begin to receive a prompt."""

    def decline(self, meeting: Bootstrap, reason: str) -> None:
        """Tell a prefill server that its prompt will not be read."""

    def close(self) -> None:
        """End the threads."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request that waits for slots."""

    req: Req
    arrived: float
    """Time of the arrival, in seconds of the scheduler's ticks."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A request whose prompt is on its way."""

    number: int
    """Number of the prompt among all prompts so far; the same on all ranks."""
    req: Req
    prompt: Prompt


class DecodeHalf:
    """Requests whose prompts prefill servers compute.

    A request waits for slots, then for its prompt, then decodes like any other. A retracted request
    is computed again on this server, before new ones get slots. A request that ends while its
    prompt is read keeps its slots until no read into them is in flight.

    Each rank reads its own part of a prompt. A request goes on once all ranks have their parts, and
    fails as soon as the part of one rank fails (`Votes`).

    Args:
        state: State of the scheduler.
        holder: Gives slots to requests.
        remote: Receives their prompts.
        wait_s: Seconds for which a request waits for slots. Prefill servers wait no longer.
        group: The ranks.
    """

    def __init__(
        self,
        state: SchedulerState,
        holder: Holder,
        remote: Remote,
        wait_s: float,
        group: RankGroup | None = None,
    ) -> None:
        self._state = state
        self._holder = holder
        self._remote = remote
        self._wait_s = wait_s
        self._wanted: dict[str, _Wanted] = {}
        """Requests that wait for slots, by id, in order of arrival."""
        self._coming: dict[str, _Coming] = {}
        self._lingering: dict[int, _Coming] = {}
        """Prompts of ended requests that may still be read; by number."""
        self._let_go: list[Req] = []
        self._votes = Votes(group or SingleRank())
        """Votes on prompts, by their number."""
        self._num_begun = 0
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
        self._wanted[req.rid] = _Wanted(req, self._state.now)
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        meeting = message.bootstrap
        if meeting is None:
            return
        if self._wanted.pop(message.rid, None) is not None:
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
        self._look()
        coming = {one.number: one for one in self._coming.values()}
        for number, vote, why in self._votes.count():
            if number in self._lingering:
                self._votes.close(number)
                self._let_go.append(self._lingering.pop(number).req)
            elif vote == PromptVote.FAILED:
                one = coming[number]
                self._fail(one.req, why, had_met=one.prompt.has_met)
            else:
                self._receive(coming[number])
        if self._has_retracted():
            return  # Otherwise new requests would take the slots that these wait for.
        now = self._state.now
        for wanted in list(self._wanted.values()):
            req = wanted.req
            if req.progress.to_abort is not None:
                continue
            if now - wanted.arrived > self._wait_s:
                why = f"no slots were free for the request within {self._wait_s:.0f} s"
                self._fail(req, why, had_met=False)
            elif req.progress.grammar_ticket is None and not self._hold(req):
                break

    def _has_retracted(self) -> bool:
        """Whether any waiting request has decoded already."""
        waiting = self._state.queues.waiting
        return len(waiting) > len(self._wanted) and any(req.progress.output_ids for req in waiting)

    def _look(self) -> None:
        """Vote on the progress of the prompts on this rank."""
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

    def _hold(self, req: Req) -> bool:
        """Give slots to `req` and begin to receive its prompt. False: there is no room now."""
        state, queues = self._state, self._state.queues
        outcome = self._holder.hold(req)
        if outcome is not AddOutcome.ADDED:
            if queues.num_holders == 0 and not state.tree.is_busy():
                message = f"the engine has {state.free_tokens()} token slots, too few for it"
                reason = FinishReason(type="abort", message=message, status_code=503)
                queues.abort(req, reason)
            return False
        del self._wanted[req.rid]
        meeting, progress = req.spec.bootstrap, req.progress
        assert meeting is not None
        page_size = state.limits.page_size
        begin, end = progress.kv_committed_len, progress.num_tokens
        row = state.pools.req_to_token_pool.req_to_token[req.slots.row]
        slots = row[begin:end:page_size]
        # On a GPU this waits for the step in flight, which is necessary: the step may write to
        # pages that a request gave back meanwhile, and the reads are not queued after it.
        pages = slots.div(page_size, rounding_mode="floor").tolist()
        state_slot = state.pools.req_to_token_pool.state_of(req.slots.row)
        if state_slot is not None and not pages:
            device_runtime(state.pools.device).synchronize()  # The state is being zeroed.
        own = OwnSlots(pages=pages, first_page=begin // page_size, state=state_slot)
        coming = _Coming(self._num_begun, req, self._remote.begin(meeting, own))
        self._num_begun += 1
        self._votes.open(coming.number, PromptVote.COMING)
        self._coming[req.rid] = coming
        return True

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
        if self._wanted.pop(req.rid, None) is not None:
            self._remote.decline(meeting, reason.message or "the request has ended")
        coming = self._coming.pop(req.rid, None)
        if coming is None:
            return True
        self._votes.close(coming.number)
        coming.prompt.cancel(reason.message or "the request has ended")
        if self._votes.is_alone and coming.prompt.has_ended:
            return True
        self._votes.open(coming.number, PromptVote.COMING)
        self._lingering[coming.number] = coming
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
