"""Which grammar is compiled next, so that long compilations do not hold up the others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sglang.srt.constrained.ticket import GrammarTicket


@dataclass(slots=True)
class CompileJob:
    """A grammar that is to be compiled."""

    ticket: GrammarTicket
    asked_at: float
    """On `time.monotonic`."""
    is_long: bool = False
    """Whether it may take its whole time now."""


class CompileQueue:
    """Jobs that have not begun, and those that took longer than a first try allows.

    A first try is short. What is not done by then goes on only where few others do, else it begins
    again later, so that half of the threads are for first tries. Those take the newest and the
    oldest in turn: whoever queues many waits for them alone, and nobody waits for ever.

    Not locked: its owner is.

    Args:
        threads: Jobs at a time.
    """

    def __init__(self, threads: int) -> None:
        self._most_long = max(threads // 2, 1)
        self._num_long = 0
        self._new: deque[CompileJob] = deque()
        self._again: deque[CompileJob] = deque()
        self._newest_next = True

    def add(self, job: CompileJob) -> None:
        """A new job."""
        self._new.append(job)

    def take(self) -> CompileJob | None:
        """The job to do now, or None: what is left waits for a long one to end."""
        if self._again and self._num_long < self._most_long:
            job = self._again.popleft()
            self.may_go_on(job)
            return job
        if not self._new:
            return None
        job = self._new.pop() if self._newest_next else self._new.popleft()
        self._newest_next = not self._newest_next
        return job

    def may_go_on(self, job: CompileJob) -> bool:
        """Whether a job whose first try is over may take its whole time."""
        if not job.is_long and self._num_long < self._most_long:
            self._num_long += 1
            job.is_long = True
        return job.is_long

    def put_back(self, job: CompileJob) -> None:
        """A job that may not go on begins again later."""
        self._again.append(job)

    def end(self, job: CompileJob) -> None:
        """A job is done."""
        self._num_long -= job.is_long
