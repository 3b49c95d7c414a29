"""Handles messages: queues new requests, marks requests to abort, passes control requests on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.messages.io_struct import (
    ABORTED_BY_CLIENT,
    AbortReq,
    DeclineRoomReq,
    FinishReason,
    RequestOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.tree.base_prefix_cache import MatchPrefixParams

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import ToScheduler
    from sglang.srt.managers.scheduler.control import ControlHandler
    from sglang.srt.managers.scheduler.grammar import GrammarManager
    from sglang.srt.managers.scheduler.output import OutputCollector
    from sglang.srt.managers.scheduler.results import ResultProcessor
    from sglang.srt.managers.scheduler.role import Role
    from sglang.srt.managers.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class InputHandler:
    """Accepts and refuses requests, and ends aborted ones."""

    def __init__(
        self,
        state: SchedulerState,
        control: ControlHandler,
        results: ResultProcessor,
        outputs: OutputCollector,
        grammar: GrammarManager,
        role: Role,
    ) -> None:
        self._state = state
        self._control = control
        self._results = results
        self._outputs = outputs
        self._grammar = grammar
        self._role = role
        self._num_arrivals = 0

    def handle(self, message: ToScheduler) -> None:
        """Act on one message."""
        if isinstance(message, TokenizedGenerateReqInput):
            self._arrive(message)
        elif isinstance(message, DeclineRoomReq):
            self._role.on_declined(message.bootstrap, message.reason)
        elif isinstance(message, AbortReq):
            self.abort(None if message.abort_all else message.rid, ABORTED_BY_CLIENT)
        else:
            self._control.handle(message)

    def abort(self, rid: str | None, reason: FinishReason) -> None:
        """Mark request `rid` (None: every one) to end before the next step. An unknown id is
        ignored: the request may have ended while the message was on its way."""
        queues = self._state.queues
        if rid is None:
            for req in queues.alive:
                queues.abort(req, reason)
        elif (found := queues.find(rid)) is not None:
            queues.abort(found, reason)

    def end_aborted(self) -> None:
        """End the marked requests, in any state. No step may be in flight."""
        state = self._state
        for req in list(state.queues.aborted):
            assert req.progress.to_abort is not None
            state.tree.release_aborted_request(req.rid)
            self._results.end(req, req.progress.to_abort)

    def _arrive(self, message: TokenizedGenerateReqInput) -> None:
        if self._state.queues.find(message.rid) is not None:
            # The server refuses used ids. An answer would end the stream of the request that has
            # the id.
            logger.error("dropped a request: rid %s is in use", message.rid)
            return
        refusal = self._refusal_of(message)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        req = Req.of(
            message,
            arrival_number=self._num_arrivals,
            max_request_tokens=self._state.limits.max_request_tokens,
            eos_token_ids=self._state.eos_token_ids,
        )
        refusal = self._role.on_arrival(req) or self._grammar.on_arrival(req)
        if refusal is not None:
            self._refuse(message, refusal)
            return
        self._num_arrivals += 1
        self._state.queues.arrive(req)
        if not req.is_probe and not self._role.is_remote(req):
            self._look_ahead(req)

    def _refuse(self, message: TokenizedGenerateReqInput, reason: FinishReason) -> None:
        self._role.on_refusal(message, reason)
        output = RequestOutput(
            rid=message.rid,
            output_ids=[],
            finish_reason=reason,
            prompt_tokens=len(message.input_ids),
        )
        self._outputs.refuse(output)
        self._state.counters.aborted += 1

    def _refusal_of(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        """Reason why a request cannot be accepted, or None."""
        limits = self._state.limits
        num_input = len(message.input_ids)
        if self._control.is_draining:
            return _refusal("the server is shutting down", 503)
        full = len(self._state.queues.waiting) >= limits.max_queued_requests
        if full and not message.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return _refusal(
                f"the request queue is full: --max-queued-requests {limits.max_queued_requests} "
                "wait already; try again later",
                503,
            )
        if num_input == 0:
            return _refusal("input_ids is empty: give at least one token", 400)
        if num_input > limits.max_input_tokens:
            return _refusal(
                f"the prompt has {num_input} tokens, at most {limits.max_input_tokens} can ever "
                f"fit (context {limits.context_len}, device pool {limits.pool_tokens} tokens): "
                "send a shorter prompt",
                400,
            )
        return None

    def _look_ahead(self, req: Req) -> None:
        """While the request waits, keep its cached pages in L1 and L2, and read missing ones from
        L3. A sample shares the pages that are read for the request that computes its prompt."""
        tree, queues = self._state.tree, self._state.queues
        key = req.match_key()
        match = tree.match_prefix(MatchPrefixParams(key, req=req.slots))
        known = len(match.device_indices) + match.host_hit_length
        req.progress.cached_on_arrival = known
        tree.note_waiting(req.rid, req.arrival_number, match.last_host_node)
        tree.prefetch_from_storage(
            req.rid,
            match.last_host_node,
            key.token_ids[known:],
            extra_key=req.spec.extra_key,
            only_join=queues.is_prompt_ahead(req.spec.sample_of),
        )


def _refusal(message: str, status_code: int) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=status_code)
