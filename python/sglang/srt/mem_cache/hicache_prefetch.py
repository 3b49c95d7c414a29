"""Prefetches from L3 under way: who waits for what, and how it is decided.

No bytes are moved here. The tree starts operations, feeds each tick's agreed progress, and takes
back what landed and what is to be freed.

Life of a prefetch: *under way* until its request is scheduled, which cuts it by the policy or
finds it ended, or overtaken by computing (`fetch_choice.py`). What landed is then published. Of the
rest of its host pages, those that the store was not yet given to write to are free at the next
tick; those of the call under way when it was cut stay with it until that call has returned.
Mooncake's can take minutes, if a store node hangs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import torch

from sglang.srt.mem_cache.ballot import MAX_PREFETCHES, PrefetchProgress
from sglang.srt.mem_cache.fetch_worth import PendingRead
from sglang.srt.mem_cache.storage_operation import PrefetchOperation

_ANSWER_S: Final = 0.001
"""Asking a store takes a tenth of it to a third; a tick that has to be waited for, ten times it."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    """Not at all: it takes what has landed."""
    WAIT_COMPLETE = "wait_complete"
    """To the end, at most `prefetch_timeout_max`, however slow L3 is."""
    TIMEOUT = "timeout"
    """A base and some more for each 1,024 tokens, and no longer than computing would take."""


class PrefetchBoard:
    """The prefetches of one scheduler, in order of start. Scheduler thread only.

    Args:
        page_size: Tokens.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._under_way: dict[str, PrefetchOperation] = {}
        self._agreed: dict[str, PrefetchProgress] = {}
        self._cut: list[PrefetchOperation] = []
        self._new: list[PrefetchOperation] = []
        self._unanswered: list[PrefetchOperation] = []

    def __len__(self) -> int:
        return len(self._under_way) + len(self._cut)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._under_way

    @property
    def is_full(self) -> bool:
        """No more may be started now: the ballot has that many slots."""
        return len(self) >= MAX_PREFETCHES

    def held_tokens(self) -> int:
        """Host tokens that prefetches own."""
        return sum(operation.owned_tokens for operation in self.operations())

    def stuck_tokens(self) -> int:
        """Host tokens of reads that nobody waits for any more."""
        return sum(operation.owned_tokens for operation in self._cut)

    def operations(self) -> list[PrefetchOperation]:
        """All that own host pages."""
        return [*self._under_way.values(), *self._cut]

    def start(self, operation: PrefetchOperation) -> None:
        """Take up an operation, which is to be submitted with what comes in the same tick."""
        self._under_way[operation.request_id] = operation
        self._agreed[operation.request_id] = PrefetchProgress()
        self._new.append(operation)

    def take_new(self) -> list[PrefetchOperation]:
        """What has been started since this was called last; to be submitted now."""
        self._unanswered, self._new = self._new, []
        return self._unanswered

    def await_answers(self) -> None:
        """Give the store a moment to say what it has of the prompts that have just come, so that
        one of which it has nothing need not wait for the next tick."""
        if self._unanswered:
            until = time.monotonic() + _ANSWER_S
            for operation in self._unanswered:
                operation.wait_for_answer(until)
            self._unanswered = []

    def progress(self) -> Sequence[PrefetchProgress]:
        """What this rank sees of each of `operations`."""
        if not len(self):
            return ()
        now = time.monotonic()
        seen = []
        for operation in self.operations():
            # `ended` first: what it says of `landed_pages` must not be older than itself.
            ended = operation.ended
            expired = now > operation.deadline
            seen.append(
                PrefetchProgress(
                    operation.hit_pages,
                    operation.landed_pages,
                    ended,
                    expired,
                    operation.handed_pages,
                )
            )
        return seen

    def agree(self, agreed: Sequence[PrefetchProgress]) -> list[torch.Tensor]:
        """Take the tick's agreement on `progress`; returns the host slots to be freed now."""
        waited_for = len(self._under_way)
        self._agreed.update(zip(self._under_way, agreed[:waited_for], strict=True))
        freed = []
        for operation, progress in zip(self._cut, agreed[waited_for:], strict=True):
            # A read that was cut is handed no more pages: only the call under way may write.
            end = progress.landed if progress.ended else progress.handed
            slots = operation.release(
                progress.landed * self._page_size, max(progress.landed, end) * self._page_size
            )
            if len(slots):
                freed.append(slots)
        if self._cut:
            self._cut = [operation for operation in self._cut if operation.owned_tokens]
        return freed

    def may_schedule(self, request_id: str, policy: PrefetchPolicy) -> bool:
        """Whether its request need not wait any longer. From agreed progress only."""
        operation = self._under_way.get(request_id)
        if operation is None or not self._is_reading(operation):
            return True
        expired = self._agreed[request_id].expired
        return expired or policy is PrefetchPolicy.BEST_EFFORT

    # ---- from agreed progress: what is to be read, and what to be computed, in tokens --------

    def _is_reading(self, operation: PrefetchOperation) -> bool:
        """Of one under way."""
        return not (self._agreed[operation.request_id].ended or operation.is_overtaken)

    def waited_for(self) -> list[PrefetchOperation]:
        """The reads that may bring more to requests, in their order."""
        return [one for one in self._under_way.values() if self._is_reading(one)]

    def pending(self, operation: PrefetchOperation, waiting: Mapping[str, int]) -> PendingRead:
        """What is left of one of them.

        Args:
            operation: One of `waited_for`.
            waiting: By request, what no tier had of its prompt when it came.
        """
        progress = self._agreed[operation.request_id]
        landed = progress.landed * self._page_size
        # Until the store has said what it has: all that it is asked for.
        wanted = len(operation.host_indices)
        if progress.hit >= 0:
            wanted = progress.hit * self._page_size
        missing = max(0, wanted - landed)
        return PendingRead(
            unread=max(0, missing - self._half_of_call(progress)),
            missing=missing,
            uncached=max(missing, waiting.get(operation.request_id, 0) - landed),
            is_spared=operation.is_spared,
        )

    def unread_tokens(self) -> int:
        """What these will read, as far as the store has answered."""
        known = [one for one in self.waited_for() if self._agreed[one.request_id].hit >= 0]
        return sum(self.pending(one, {}).unread for one in known)

    def abandoned_tokens(self) -> int:
        """What is read before the first of `waited_for` though nobody waits for it. To be asked
        right after `agree`."""
        before = itertools.takewhile(
            lambda one: not self._is_reading(one), self._under_way.values()
        )
        calls = [self._half_of_call(self._agreed[one.request_id]) for one in before]
        return sum(calls) + self.stuck_tokens() // 2

    def uncached(self, request_id: str, tokens: int) -> int:
        """What of a request's `tokens` waits to be computed now: none while L3 may bring them."""
        operation = self._under_way.get(request_id)
        if operation is None:
            return tokens
        if self._is_reading(operation):
            return 0
        return max(0, tokens - self._agreed[request_id].landed * self._page_size)

    def _half_of_call(self, progress: PrefetchProgress) -> int:
        """A call to the store that is under way has done half of its work, on the average."""
        pages = 0 if progress.ended else max(0, progress.handed - progress.landed)
        return pages * self._page_size // 2

    def finish(self, request_id: str) -> tuple[PrefetchOperation, int] | None:
        """End the wait: the operation and its agreed landed pages, None without one.

        What is not published stays with the operation until a later tick's `agree`.
        """
        operation = self._under_way.pop(request_id, None)
        if operation is None:
            return None
        operation.is_terminated = True
        self._cut.append(operation)
        return operation, self._agreed.pop(request_id).landed
