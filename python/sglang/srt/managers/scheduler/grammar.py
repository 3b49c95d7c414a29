"""Requests with a constraint, until their grammar is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.constrained.ticket import TicketState
from sglang.srt.managers.messages.io_struct import FinishReason

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarBackend
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues

logger = logging.getLogger(__name__)


class GrammarQueue:
    """Gets the grammars of arriving requests, and their matchers when these are there.

    With several ranks, what `poll` sees has to come from rank 0: when a compilation ends is nothing
    that ranks agree on by themselves.

    Args:
        make_backend: Called when the first constraint arrives, since the backend costs memory.
            None: there is none. Raises ValueError where the model cannot be constrained.
    """

    def __init__(self, make_backend: Callable[[], GrammarBackend] | None) -> None:
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._num_compiling = 0

    def on_arrival(self, req: Req) -> FinishReason | None:
        """Ask for the grammar of `req`; why it is refused, or None."""
        params = req.spec.sampling_params
        constraint = params.constraint
        if constraint is None:
            return None
        try:
            backend = self._get_backend()
        except ValueError as error:
            return _refusal(f"{constraint.kind.value}: {error}")
        req.progress.grammar_ticket = backend.get(constraint.kind, constraint.text)
        self._num_compiling += 1
        return None

    def poll(self, queues: RequestQueues) -> None:
        """Give matchers to those that wait and whose grammar is ready; abort those whose grammar
        failed."""
        if not self._num_compiling:
            return
        self._num_compiling = 0
        for req in queues.waiting:
            ticket = req.progress.grammar_ticket
            if ticket is None:
                continue
            if ticket.state is TicketState.COMPILING:
                self._num_compiling += 1
                continue
            req.progress.grammar_ticket = None
            if ticket.state is TicketState.FAILED:
                queues.abort(req, _refusal(ticket.message))
            else:
                stops = req.spec.sampling_params.stop_token_ids or ()
                req.progress.matcher = ticket.grammar.matcher(stops)

    def close(self) -> None:
        """End the backend's threads and processes, if there is one."""
        if self._backend is not None:
            self._backend.close()

    def _get_backend(self) -> GrammarBackend:
        if self._backend is None:
            if self._make_backend is None:
                raise ValueError("this server has no grammar backend: leave it out")
            self._backend = self._make_backend()
            logger.info("constrained decoding is ready, on demand of the first request")
        return self._backend


def _refusal(message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=400)
