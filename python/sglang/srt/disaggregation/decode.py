"""The scheduler's part of a decode server: prompts come from prefill servers into held slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.prefill import LOST_STATUS, prompt_digest
from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.policy import AddOutcome

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.protocol import FirstToken
    from sglang.srt.disaggregation.common.remote_prompt import RemotePrompt
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler.batch import PrefillWork
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)

BeginPrompt = Callable[["Bootstrap", Sequence[int], int], "RemotePrompt"]
"""Begins to get a prompt: the room, this server's pages, and the prompt's page that the first of
them is for."""
DeclineRoom = Callable[["Bootstrap", str], None]


@dataclass(slots=True)
class _Coming:
    """A request whose prompt is on its way."""

    req: Req
    prompt: RemotePrompt


class DecodeHalf:
    """Requests whose prompts prefill servers compute.

    A request waits for slots, then for its prompt, then decodes like any other. One that was
    retracted meanwhile is computed again here.

    Args:
        state: The scheduler's.
        holder: Gives requests their slots.
        begin: Begins to get a prompt, in a thread of its own.
        decline: Tells a prefill server, in such a thread, that nobody will come for a room.
        end_all: Ends these threads.
    """

    def __init__(
        self,
        state: SchedulerState,
        holder: Holder,
        begin: BeginPrompt,
        decline: DeclineRoom = lambda meeting, reason: None,
        end_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._holder = holder
        self._begin = begin
        self._decline = decline
        self._end_all = end_all
        self._wanted: dict[str, Req] = {}
        """By id: requests that wait for slots, in order of arrival."""
        self._coming: dict[str, _Coming] = {}
        self._received: list[tuple[Req, FirstToken]] = []
        self._owners: dict[int, str] = {}
        """By room: the id of the request that has it."""

    def on_arrival(self, req: Req) -> FinishReason | None:
        meeting = req.spec.bootstrap
        if meeting is None:
            return None
        if meeting.room in self._owners:
            message = f"bootstrap_room {meeting.room} belongs to another request: draw one for each"
            return FinishReason(type="abort", message=message, status_code=400)
        self._owners[meeting.room] = req.rid
        self._wanted[req.rid] = req
        return None

    def on_refusal(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        meeting = message.bootstrap
        if meeting is None or self._owners.get(meeting.room, message.rid) != message.rid:
            return
        self._wanted.pop(message.rid, None)
        self._owners.pop(meeting.room, None)
        self._decline(meeting, reason.message or "refused")

    def is_remote(self, req: Req) -> bool:
        return req.rid in self._wanted

    def on_computed(self, work: PrefillWork) -> None:
        pass

    def keeps(self, req: Req) -> bool:
        return False

    def hand_over(self, req: Req, reason: FinishReason | None) -> None:
        raise AssertionError("a decode server hands nothing over")

    def tick(self) -> None:
        for coming in [one for one in self._coming.values() if one.prompt.has_ended]:
            if coming.req.progress.to_abort is None:
                self._settle(coming)
        for req in list(self._wanted.values()):
            if req.progress.grammar_ticket is not None or req.progress.to_abort is not None:
                continue
            if not self._hold(req):
                break

    def _settle(self, coming: _Coming) -> None:
        """A prompt has come, or will not."""
        req, prompt = coming.req, coming.prompt
        failure = prompt.failure
        first = prompt.first_token
        if first is not None:
            ids = req.spec.origin_input_ids
            if first.prompt_len != len(ids) or first.prompt_digest != prompt_digest(ids):
                failure = (
                    f"the prefill server computed another prompt, of {first.prompt_len} tokens: "
                    "both servers need the same tokenizer and chat template"
                )
        if failure is not None:
            logger.warning("request %s: %s", req.rid, failure)
            reason = FinishReason(type="abort", message=failure, status_code=LOST_STATUS)
            self._state.queues.abort(req, reason)
            return
        assert first is not None
        del self._coming[req.rid]
        self._received.append((req, first))

    def _hold(self, req: Req) -> bool:
        """Give `req` slots and ask for its prompt. False: there is no room now."""
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
        pages = slots.div(page_size, rounding_mode="floor").tolist()
        self._coming[req.rid] = _Coming(req, self._begin(meeting, pages, begin // page_size))
        return True

    def take_ended(self) -> Sequence[tuple[Req, FinishReason]]:
        return ()

    def take_received(self) -> Sequence[tuple[Req, FirstToken]]:
        received, self._received = self._received, []
        return received

    def may_end(self, req: Req) -> bool:
        coming = self._coming.get(req.rid)
        if coming is None or coming.prompt.has_ended:
            return True
        coming.prompt.cancel()
        return False

    def on_end(self, req: Req, reason: FinishReason) -> None:
        meeting = req.spec.bootstrap
        if meeting is None or self._owners.get(meeting.room) != req.rid:
            return
        del self._owners[meeting.room]
        self._coming.pop(req.rid, None)
        if self._wanted.pop(req.rid, None) is not None:
            self._decline(meeting, reason.message or "the request has ended")

    def close(self) -> None:
        for coming in self._coming.values():
            coming.prompt.cancel()
        self._end_all()
