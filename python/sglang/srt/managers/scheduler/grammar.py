"""Requests with a constraint, until their grammar is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sglang.srt.constrained.constraint import Constraint, GrammarError
from sglang.srt.constrained.grammar import Grammar, GrammarTicket
from sglang.srt.messages.io_struct import (
    FinishReason,
    GrammarResult,
    TokenizedGenerateReqInput,
    ToScheduler,
    abort_reason,
)

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues

logger = logging.getLogger(__name__)

_LATE_S: Final = 60.0
"""Seconds within which every compilation has ended or failed; see `GrammarLimits`."""


class GrammarManager:
    """Asks for the grammars of arriving requests, and gives requests their matchers.

    Every rank compiles for itself. Rank 0 decides whether a compilation has ended or failed: its
    `collect_results` gives the results for the tick, and all ranks apply them (`apply_results`).

    Args:
        make_backend: Called when the first constraint arrives, since the backend costs memory.
            None: constraints are refused. Raises ValueError if the model cannot be constrained,
            and RuntimeError if the system has no thread left.
    """

    def __init__(self, make_backend: Callable[[], XGrammarBackend] | None) -> None:
        self._make_backend = make_backend
        self._backend: XGrammarBackend | None = None
        self._num_compiling = 0
        """Rank 0: upper bound of the number of requests that wait for a grammar;
        `collect_results` updates it."""
        self._requested: dict[str, GrammarTicket] = {}
        """Rank 0, within a tick: tickets of requests that are among its messages."""

    def collect_results(
        self, queues: RequestQueues, messages: Sequence[ToScheduler]
    ) -> Sequence[GrammarResult]:
        """Rank 0: the ended compilations of requests that wait or are about to arrive. The grammars
        of `messages`, which the next tick brings, are asked for at once, so that requests with
        cached grammars do not wait for a later tick."""
        self._requested.clear()
        results: list[GrammarResult] = []
        if self._num_compiling:
            tickets = [(req.rid, req.progress.grammar_ticket) for req in queues.waiting]
            compiling = [(rid, ticket) for rid, ticket in tickets if ticket is not None]
            self._num_compiling = len(compiling)
            results += [_result(rid, ticket) for rid, ticket in compiling if ticket.done()]
        for message in messages:
            if not isinstance(message, TokenizedGenerateReqInput):
                continue
            constraint = message.sampling_params.constraint
            if constraint is None or message.rid in self._requested or queues.find(message.rid):
                continue
            try:
                ticket = self._request(constraint)
            except ValueError:
                continue  # `on_arrival` refuses it.
            self._requested[message.rid] = ticket
            if ticket.done():
                results.append(_result(message.rid, ticket))
        return results

    def on_arrival(self, req: Req) -> FinishReason | None:
        """Ask for the grammar of `req`; return the reason to refuse the request, or None."""
        constraint = req.spec.sampling_params.constraint
        if constraint is None:
            return None
        ticket = self._requested.pop(req.rid, None)
        if ticket is None:
            try:
                ticket = self._request(constraint)
            except ValueError as error:
                return abort_reason(f"{constraint.kind.value}: {error}", 400)
        req.progress.grammar_ticket = ticket
        self._num_compiling += 1
        return None

    def apply_results(self, results: Sequence[GrammarResult], queues: RequestQueues) -> None:
        """All ranks: apply rank 0's results to waiting requests. A ready grammar gives a matcher, a
        failed one aborts its request."""
        for result in results:
            req = queues.find(result.rid)
            ticket = None if req is None else req.progress.grammar_ticket
            if req is None or ticket is None:
                continue  # The request was refused on arrival.
            req.progress.grammar_ticket = None
            if result.failure is not None:
                queues.abort(req, abort_reason(result.failure, 400))
            else:
                stops = req.spec.sampling_params.stop_token_ids or ()
                req.progress.matcher = self._grammar_of(ticket).matcher(stops)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _request(self, constraint: Constraint) -> GrammarTicket:
        if self._make_backend is None:
            raise ValueError("this server has no grammar backend: leave it out")
        if self._backend is None:
            try:
                self._backend = self._make_backend()
            except RuntimeError as error:
                ticket = GrammarTicket(constraint)
                kind = constraint.kind.value
                ticket.fail(f"{kind}: cannot be compiled now, {error}: retry later")
                return ticket
            logger.info("constrained decoding is ready, on demand of the first request")
        return self._backend.get(constraint)

    def _grammar_of(self, ticket: GrammarTicket) -> Grammar:
        """The grammar of a ticket that is ready on rank 0; another rank may have to wait for it.
        Raises GrammarError if this rank cannot compile what rank 0 has compiled."""
        try:
            return ticket.result(_LATE_S)
        except (GrammarError, TimeoutError):
            # Rank 0's trial has shown that the grammar is harmless.
            assert self._backend is not None, "it was asked for the ticket"
            return self._backend.compile_now(ticket.constraint)


def _result(rid: str, ticket: GrammarTicket) -> GrammarResult:
    error = ticket.exception()
    return GrammarResult(rid, None if error is None else str(error))
