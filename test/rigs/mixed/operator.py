"""An operator beside random work: pauses, flushes, sessions, questions, changes of L3."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from rigs.schedulers.random_requests import RandomRequests
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    ControlReq,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetCacheViewReq,
    GetHiCacheStorageReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    PauseGenerationReqInput,
    ToScheduler,
)

_ASKS: Final = 0.03
_PAUSES: Final = 0.01
_CONTINUES: Final = 0.1
"""Shares of the ticks. The other server waits for longer than a pause."""


class Operator:
    """Sends control messages to servers, each of which is a rig.

    Args:
        seed: Determines the messages.
        counts: Gets what became of them.
        attach: Makes a message that attaches L3; returns None if there is no L3.
    """

    def __init__(
        self,
        seed: int,
        counts: Counter[str],
        attach: Callable[[], AttachHiCacheStorageReqInput | None],
    ) -> None:
        self._rng = random.Random(f"operator of {seed}")
        self._counts = counts
        self._requests = RandomRequests(self._rng, 1)
        self._attach = attach
        self._unanswered: dict[SchedulerRig, set[str]] = {}
        self._num_asked = 0

    def messages(self, rig: SchedulerRig, *, is_resting: bool) -> list[ToScheduler]:
        """Draw the messages of a server's next tick. A server that comes to rest ends its pause."""
        rng, is_paused = self._rng, rig.scheduler._control.is_paused
        asked: list[ToScheduler] = []
        if is_resting:
            if is_paused:
                asked.append(self._pause_or_continue(rig))
        elif rng.random() < (_CONTINUES if is_paused else _PAUSES):
            asked.append(self._pause_or_continue(rig))
        if not is_resting and rng.random() < _ASKS:
            asked.append(self._request())
        return [self._note(rig, one) for one in asked]

    def change(self, rig: SchedulerRig) -> ToScheduler | None:
        """A change of L3 for an idle server, or None."""
        if self._rng.random() < 0.5:
            return None
        is_attached = isinstance(rig.tree, HiRadixCache) and rig.tree.store.attached is not None
        change = DetachHiCacheStorageReqInput() if is_attached else self._attach()
        return None if change is None else self._note(rig, change)

    def is_answered(self, rig: SchedulerRig) -> bool:
        """True if a server has answered all."""
        open_ones = self._unanswered.get(rig, set())
        for answer in rig.answers:
            assert answer.req_id in open_ones, f"{answer.req_id} is answered twice, or never asked"
            open_ones.remove(answer.req_id)
            self._counts["operator: done" if answer.success else "operator: refused"] += 1
        rig.answers.clear()
        return not open_ones

    def _pause_or_continue(self, rig: SchedulerRig) -> ToScheduler:
        is_paused = rig.scheduler._control.is_paused
        self._counts["operator: pauses"] += not is_paused
        kind = ContinueGenerationReqInput if is_paused else PauseGenerationReqInput
        return kind()

    def _request(self) -> ToScheduler:
        rng = self._rng
        kinds: list[Callable[[], ToScheduler]] = [
            lambda: FlushCacheReqInput(timeout=rng.choice((0.0, 0.05))),
            GetInternalStateReq,
            GetMetricsReq,
            GetCacheViewReq,
            GetHiCacheStorageReqInput,
            self._attach_or_detach,
            ClearHiCacheReqInput,
            lambda: self._requests.session(""),
            lambda: self._requests.session(""),
        ]
        return rng.choice(kinds)()

    def _attach_or_detach(self) -> ToScheduler:
        attach = self._attach() if self._rng.random() < 0.5 else None
        return attach or DetachHiCacheStorageReqInput()

    def _note(self, rig: SchedulerRig, message: ToScheduler) -> ToScheduler:
        assert isinstance(message, ControlReq)
        self._num_asked += 1
        message.req_id = f"o{self._num_asked}"
        self._counts["operator: clears"] += isinstance(message, ClearHiCacheReqInput)
        self._unanswered.setdefault(rig, set()).add(message.req_id)
        return message
