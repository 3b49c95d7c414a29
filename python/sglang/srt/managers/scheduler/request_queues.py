"""Which requests live, by id, and which of them wait; the only ways in, on and out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from sglang.srt.managers.messages.io_struct import FinishReason
from sglang.srt.managers.scheduler.req import Req
from sglang.srt.mem_cache.tree.digest import MODULUS, hash_of

_WAITING: Final = 0x1F83D9ABFB41BD6B
_ADMITTED: Final = 0x1BE0CD19137E2179
"""What the name of a request is multiplied with in the digest."""


class RequestQueues:
    """Every request from its arrival to its end. No method but `__init__` and `describe` takes
    longer where more requests live. Scheduler thread only.

    They are `Books`: the same on all ranks.

    Attributes:
        num_admitted: How often a request left the queue to be computed, since the start.
    """

    def __init__(self) -> None:
        self._alive: dict[str, Req] = {}
        self._waiting: dict[str, Req] = {}
        self._aborted: dict[str, Req] = {}
        self.num_admitted = 0
        self._digest = 0

    @property
    def digest(self) -> int:
        """Of who waits and who has been admitted; see `Books`."""
        return self._digest

    def describe(self) -> Mapping[str, str]:
        """What the digest is of; see `Books`."""
        return {
            f"request {rid}": "waits" if rid in self._waiting else "has been admitted"
            for rid in self._alive
        }

    def _count(self, req: Req, change: int) -> None:
        self._digest = (self._digest + hash_of(req.rid) * change) % MODULUS

    @property
    def alive(self) -> Collection[Req]:
        """Those that have arrived and not ended, in order of arrival. A live view."""
        return self._alive.values()

    @property
    def waiting(self) -> Collection[Req]:
        """Those that wait to be scheduled, in no order that means anything. A live view."""
        return self._waiting.values()

    @property
    def aborted(self) -> Collection[Req]:
        """Those that shall end before the next step. A live view."""
        return self._aborted.values()

    def waiting_ids(self) -> set[str]:
        """Their ids, as of now."""
        return set(self._waiting)

    def is_waiting(self, rid: str) -> bool:
        """Whether the request `rid` waits to be scheduled."""
        return rid in self._waiting

    def find(self, rid: str) -> Req | None:
        """The request that lives under the id `rid`."""
        return self._alive.get(rid)

    def arrive(self, req: Req) -> None:
        """`req` is new, and waits. Its id must be free."""
        assert req.rid not in self._alive, f"request {req.rid} is here already"
        req.turn = self.num_admitted + len(self._waiting)
        self._alive[req.rid] = req
        self._waiting[req.rid] = req
        self._count(req, _WAITING)

    def admit(self, req: Req) -> None:
        """`req` leaves the queue: its prompt is going to be computed."""
        del self._waiting[req.rid]
        self.num_admitted += 1
        self._count(req, _ADMITTED - _WAITING)

    def retract(self, req: Req) -> None:
        """`req` gave its slots back and waits again."""
        assert self._alive.get(req.rid) is req, f"request {req.rid} has ended"
        self._waiting[req.rid] = req
        self._count(req, _WAITING - _ADMITTED)

    def abort(self, req: Req, reason: FinishReason) -> None:
        """`req` shall end before the next step. The first reason counts."""
        if req.to_abort is None:
            req.to_abort = reason
            self._aborted[req.rid] = req

    def end(self, req: Req) -> None:
        """`req` ends, wherever it is; its id is free again."""
        del self._alive[req.rid]
        was_waiting = self._waiting.pop(req.rid, None) is not None
        self._count(req, -_WAITING if was_waiting else -_ADMITTED)
        self._aborted.pop(req.rid, None)
