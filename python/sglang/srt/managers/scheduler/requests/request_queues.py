"""State of each request between its arrival and its end; the only place that keeps or changes
it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Final

from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.tree.digest import MODULUS, hash_of
from sglang.srt.messages.io_struct import FinishReason


class RequestState(StrEnum):
    """State of a request. All but those that wait or have ended hold slots."""

    WAITING = "waiting"
    """Waits to be scheduled."""
    COMPUTING = "computing"
    """Steps compute the prompt: the rest of it, or a part (`RequestQueues.partial`)."""
    DECODING = "decoding"
    HELD = "held"
    """Holds slots, but no step of this engine computes the request, because another server prefills
    or decodes it."""
    ENDED = "ended"
    """The request has ended, or has never arrived."""


_HOLDING: Final = (RequestState.COMPUTING, RequestState.DECODING, RequestState.HELD)
_LIVING: Final = (RequestState.WAITING, *_HOLDING)
_WEIGHTS: Final = {
    RequestState.WAITING: 0x1F83D9ABFB41BD6B,
    **dict.fromkeys(_HOLDING, 0x1BE0CD19137E2179),
}
"""Factors of a request's name in the digest."""


class RequestQueues:
    """Every request from its arrival to its end, in one state at a time. Scheduler thread only.

    Only the methods in the table change a request's state. Each asserts that its transition is
    allowed, and takes constant time. The queues are `ReplicatedState`: the same on all ranks.

        arrive   -> WAITING
        admit    WAITING, or COMPUTING in parts -> COMPUTING
        cut      WAITING, or COMPUTING in parts -> COMPUTING in parts
        join     COMPUTING, HELD -> DECODING
        hold     WAITING, COMPUTING -> HELD
        retract  COMPUTING in parts, DECODING, HELD -> WAITING
        redo     COMPUTING -> WAITING
        finish   any -> ENDED; a HELD one may keep its slots
        let_go   ENDED -> ENDED, without slots

    The collections are views, which follow changes.

    Attributes:
        alive: Requests that have arrived and not ended, in order of arrival.
        waiting: Requests that wait to be scheduled, in no particular order.
        computing: Requests whose prompt is being computed, whole or in parts.
        decoding: Requests that decode, in the order in which they joined.
        held: Requests whose slots a transfer fills or reads.
        aborted: Requests that end before the next step.
        lingering: Ended requests whose slots a transfer still fills or reads.
        digest: Digest of the requests that wait and of those with slots; see `ReplicatedState`.
        num_admitted: Requests that left the queue for slots, since the start; a retracted one
            counts again.
        num_joined: Requests that began to decode, since the start; a retracted one counts again.
        partial: The only request whose prompt is computed in parts, while more parts follow; or
            None.
    """

    def __init__(self) -> None:
        self._alive: dict[str, Req] = {}
        self._states: dict[str, RequestState] = {}
        self._in: dict[RequestState, dict[str, Req]] = {state: {} for state in _LIVING}
        self._waiting = self._in[RequestState.WAITING]
        self._lingering: dict[int, Req] = {}
        """Ended requests that keep slots, by `id`: a later request may have the same rid."""
        self._aborted: dict[str, Req] = {}
        self.alive: Collection[Req] = self._alive.values()
        self.waiting: Collection[Req] = self._waiting.values()
        self.computing: Collection[Req] = self._in[RequestState.COMPUTING].values()
        self.decoding: Collection[Req] = self._in[RequestState.DECODING].values()
        self.held: Collection[Req] = self._in[RequestState.HELD].values()
        self.aborted: Collection[Req] = self._aborted.values()
        self.lingering: Collection[Req] = self._lingering.values()
        self.partial: Req | None = None
        self.num_admitted = 0
        self.num_joined = 0
        self.digest = 0

    # ---- what ranks compare --------------------------------------------------------------------

    def describe(self) -> Mapping[str, str]:
        """Entries of the digest; see `ReplicatedState`."""
        waiting = self._waiting
        return {
            f"request {rid}": "waits" if rid in waiting else "has been admitted"
            for rid in self._alive
        }

    # ---- queries -------------------------------------------------------------------------------

    def holders(self) -> Iterator[Req]:
        yield from self.decoding
        yield from self.computing
        yield from self.held
        yield from self.lingering

    @property
    def num_holders(self) -> int:
        num_living = len(self.decoding) + len(self.computing) + len(self.held)
        return num_living + len(self.lingering)

    def find(self, rid: str) -> Req | None:
        """The request with the id `rid` that has not ended, or None."""
        return self._alive.get(rid)

    def state_of(self, req: Req) -> RequestState:
        is_alive = self._alive.get(req.rid) is req
        return self._states[req.rid] if is_alive else RequestState.ENDED

    def is_prompt_ahead(self, rid: str | None) -> bool:
        """True if all or a part of the prompt of request `rid` is yet to be scheduled."""
        if rid is None:
            return False
        is_partial = self.partial is not None and self.partial.rid == rid
        return is_partial or rid in self._waiting

    # ---- transitions ---------------------------------------------------------------------------

    def arrive(self, req: Req) -> None:
        """Add `req`, which is new and waits. Its id must be free."""
        assert req.rid not in self._alive, f"request {req.rid} is here already"
        assert req.progress.finish_reason is None, f"request {req.rid} has ended"
        req.turn = self.num_admitted + len(self.waiting)
        self._alive[req.rid] = req
        self._enter(req, RequestState.WAITING)

    def admit(self, req: Req) -> None:
        """Note that the next step computes the whole rest of the prompt of `req`."""
        self._compute(req, "admit")
        if req is self.partial:
            self.partial = None

    def cut(self, req: Req) -> None:
        """Note that the next step computes a part of the prompt of `req`; later steps do more."""
        assert self.partial in (None, req), "one prompt at a time is computed in parts"
        self._compute(req, "cut")
        self.partial = req

    def join(self, req: Req) -> None:
        """Let `req` decode: its prompt is computed, and its first token is known."""
        assert req is not self.partial, f"join: the prompt of request {req.rid} is not complete"
        self._leave(req, "join", RequestState.COMPUTING, RequestState.HELD)
        self._enter(req, RequestState.DECODING)
        self.num_joined += 1

    def hold(self, req: Req) -> None:
        """Note that `req` has slots that a transfer fills or reads."""
        assert req is not self.partial, f"hold: the prompt of request {req.rid} is not complete"
        was_waiting = self.state_of(req) is RequestState.WAITING
        self._leave(req, "hold", RequestState.WAITING, RequestState.COMPUTING)
        self._enter(req, RequestState.HELD)
        self.num_admitted += was_waiting

    def retract(self, req: Req) -> None:
        """Let `req`, which gave its slots back, wait again."""
        is_in_flight = req is not self.partial and self.state_of(req) is RequestState.COMPUTING
        assert not is_in_flight, f"retract: the prompt of request {req.rid} is in flight"
        self._leave(req, "retract", *_HOLDING)
        self._enter(req, RequestState.WAITING)

    def redo(self, req: Req) -> None:
        """Let `req` wait again. Its steps were dropped, and it gave its slots back."""
        self._leave(req, "redo", RequestState.COMPUTING)
        self._enter(req, RequestState.WAITING)

    def finish(self, req: Req, reason: FinishReason, *, lingers: bool = False) -> None:
        """End `req`; its id is free again. `lingers`: it was held, and keeps its slots until
        `let_go`."""
        self._leave(req, "finish", *((RequestState.HELD,) if lingers else _LIVING))
        if lingers:
            self._lingering[id(req)] = req
        del self._alive[req.rid], self._states[req.rid]
        self._aborted.pop(req.rid, None)
        req.progress.finish_reason = reason

    def let_go(self, req: Req) -> None:
        """Note that `req`, which has ended, gave its slots back."""
        assert id(req) in self._lingering, f"let_go: request {req.rid} does not linger"
        del self._lingering[id(req)]

    # ---- aborting, in any state ----------------------------------------------------------------

    def abort(self, req: Req, reason: FinishReason) -> None:
        """Mark `req` to end before the next step. The first reason counts."""
        assert self.state_of(req) is not RequestState.ENDED, f"request {req.rid} has ended"
        if req.progress.to_abort is None:
            req.progress.to_abort = reason
            self._aborted[req.rid] = req

    def _compute(self, req: Req, transition: str) -> None:
        if req is self.partial:
            return
        self._leave(req, transition, RequestState.WAITING)
        self._enter(req, RequestState.COMPUTING)
        self.num_admitted += 1

    def _leave(self, req: Req, transition: str, *allowed: RequestState) -> None:
        state = self.state_of(req)
        assert state in allowed, f"{transition}: request {req.rid} is {state.value}"
        if req is self.partial:
            self.partial = None
        del self._in[state][req.rid]
        self.digest = (self.digest - hash_of(req.rid) * _WEIGHTS[state]) % MODULUS

    def _enter(self, req: Req, state: RequestState) -> None:
        self._states[req.rid] = state
        self._in[state][req.rid] = req
        self.digest = (self.digest + hash_of(req.rid) * _WEIGHTS[state]) % MODULUS
